"""HiFi-GAN's published files, read into our networks and back: g_* and do_* with config.json beside them."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gan.files.disk import load_plain, read_text, regular
from gan.files.errors import UserError, reason
from nets.hifigan import HifiGenerator, Judges
from nets.mel import Mel

CONFIG = "config.json"
MOST = 2**20  # bytes of a config.json
ENDS = {  # of keys: torch's names of computed weights, and the published ones
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
    "parametrizations.weight.original": "weight_orig",
    "parametrizations.weight.0._u": "weight_u",
    "parametrizations.weight.0._v": "weight_v",
}


def files(path: Path) -> tuple[Path, Path | None, Path | None]:
    """The generator's file, the discriminators' and config.json, of a folder (its newest ones) or of a file."""
    if path.is_dir():
        found = sorted(path.glob("g_*")) or sorted(path.glob("generator*"))
        if not found:
            raise UserError(f"{path} has no published HiFi-GAN: no file g_00000000; give the file itself")
        path = found[-1]
    judges = path.with_name(f"do_{path.name.removeprefix('g_')}")
    beside = path.with_name(CONFIG)
    return path, judges if judges.exists() else None, beside if beside.exists() else None


def read_config(path: Path) -> dict[str, Any]:
    """A published configuration."""
    try:
        content = json.loads(read_text(str(path), MOST))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({reason(error)}); give a config.json of HiFi-GAN") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration of HiFi-GAN; give a config.json of HiFi-GAN")
    return content


def networks(config: Mapping[str, Any], where: str) -> tuple[HifiGenerator, Mel]:
    """The generator and its spectrogram, of a published configuration."""
    try:
        rates, window = list(map(int, config["upsample_rates"])), int(config["win_size"])
        if (config["n_fft"], config["hop_size"]) != (window, math.prod(rates)) or config.get("fmax_for_loss"):
            raise UserError(
                f"{where}: n_fft and win_size must be equal, hop_size the product of upsample_rates, and fmax_for_loss "
                f"null; change them there"
            )
        mel = Mel(config["sampling_rate"], config["num_mels"], window, math.prod(rates), config["fmax"], config["fmin"])
        generator = HifiGenerator(
            mel.bands,
            config["upsample_initial_channel"],
            rates,
            config["upsample_kernel_sizes"],
            config["resblock_kernel_sizes"],
            config["resblock_dilation_sizes"],
            str(config["resblock"]) == "1",
        )
    except KeyError as error:
        raise UserError(f"{where} does not say {error}; give a config.json of HiFi-GAN") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} is no configuration of HiFi-GAN: {error}") from error
    return generator, mel


def load(network: nn.Module, weights: Any, where: str) -> None:
    """Let a network have published weights."""
    names, given = keys(network), weights if isinstance(weights, dict) else {}
    if wrong := set(names.values()) ^ given.keys():
        raise UserError(
            f"{where} has other networks than --config or its config.json says: see '{min(map(str, wrong))}'"
        )
    try:
        network.load_state_dict({ours: given[theirs] for ours, theirs in names.items()})
    except (RuntimeError, TypeError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(f"{where} has other sizes than --config or its config.json says: {first}") from error


def read(path: Path, *parts: str) -> list[Any]:
    """These parts of a published file, such as "generator". No code in it is run."""
    try:
        regular(path)
        content = load_plain(path)
        return [content[part] for part in parts]
    except (UserError, OSError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{path} is no published file of HiFi-GAN with {' and '.join(parts)} ({reason(error)})"
        ) from error


def published(network: nn.Module) -> dict[str, Tensor]:
    """The network's weights by their published keys."""
    state = network.state_dict()
    return {theirs: state[ours].detach().clone() for ours, theirs in keys(network).items()}


def keys(network: nn.Module) -> dict[str, str]:
    """Our key of each tensor, and the published one."""

    def theirs(key: str) -> str:
        return next((key.removesuffix(end) + name for end, name in ENDS.items() if key.endswith(end)), key)

    return {key: theirs(key) for key in network.state_dict()}


def written(
    generator: HifiGenerator, judges: Judges, mel: Mel, step: int, rate: float, decay: float
) -> dict[str, Callable[[Path], object]]:
    """The published files of a training, by name. Its optimizers begin anew there."""
    config = {
        "resblock": "1" if generator.twice else "2",
        "num_gpus": 0,
        "batch_size": 16,
        "learning_rate": rate,
        "adam_b1": 0.8,
        "adam_b2": 0.99,
        "lr_decay": decay,
        "seed": 1234,
        "upsample_rates": generator.rates,
        "upsample_kernel_sizes": generator.up_kernels,
        "upsample_initial_channel": generator.width,
        "resblock_kernel_sizes": generator.kernels,
        "resblock_dilation_sizes": generator.dilations,
        "segment_size": 32 * mel.hop,
        "num_mels": mel.bands,
        "num_freq": mel.window + 1,
        "n_fft": mel.window,
        "hop_size": mel.hop,
        "win_size": mel.window,
        "sampling_rate": mel.rate,
        "fmin": mel.bottom,
        "fmax": mel.top,
        "fmax_for_loss": None,
        "num_workers": 4,
        "dist_config": {"dist_backend": "nccl", "dist_url": "tcp://localhost:54321", "world_size": 1},
    }
    optimizers = {
        name: AdamW(network.parameters(), rate, betas=(0.8, 0.99)).state_dict()
        for name, network in (("optim_g", generator), ("optim_d", judges))
    }
    both = {"mpd": published(judges.mpd), "msd": published(judges.msd)} | optimizers | {"steps": step, "epoch": -1}
    drawer, text = {"generator": published(generator)}, json.dumps(config, indent=4)
    return {
        f"g_{step:08d}": lambda path: torch.save(drawer, path),
        f"do_{step:08d}": lambda path: torch.save(both, path),
        CONFIG: lambda path: path.write_text(text, "utf-8"),
    }
