"""HiFi-GAN's published files, read into our networks and back: g_* and do_* with config.json beside them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from gan.files.disk import read_text
from gan.files.errors import UserError, reason
from nets.hifigan import HifiGenerator, Judges
from nets.mel import Mel
from nets.published.files import PublishedFile

CONFIG = "config.json"
MOST = 2**20  # bytes of a config.json
COMMON = {  # what the published configurations have in common
    "num_gpus": 0,
    "batch_size": 16,
    "learning_rate": 2e-4,
    "adam_b1": 0.8,
    "adam_b2": 0.99,
    "lr_decay": 0.999,
    "seed": 1234,
    "segment_size": 8192,
    "num_mels": 80,
    "num_freq": 1025,
    "n_fft": 1024,
    "hop_size": 256,
    "win_size": 1024,
    "sampling_rate": 22050,
    "fmin": 0,
    "fmax": 8000,
    "fmax_for_loss": None,
    "num_workers": 4,
    "dist_config": {"dist_backend": "nccl", "dist_url": "tcp://localhost:54321", "world_size": 1},
}
V1 = COMMON | {
    "resblock": "1",
    "upsample_rates": [8, 8, 2, 2],
    "upsample_kernel_sizes": [16, 16, 4, 4],
    "upsample_initial_channel": 512,
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3,
}
V3 = V1 | {
    "resblock": "2",
    "upsample_rates": [8, 8, 4],
    "upsample_kernel_sizes": [16, 16, 8],
    "upsample_initial_channel": 256,
    "resblock_kernel_sizes": [3, 5, 7],
    "resblock_dilation_sizes": [[1, 2], [2, 6], [3, 12]],
}
CONFIGS: dict[str, dict[str, Any]] = {"V1": V1, "V2": V1 | {"upsample_initial_channel": 128}, "V3": V3}
ENDS = {  # of keys: torch's names of computed weights, and the published ones
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
    "parametrizations.weight.original": "weight_orig",
    "parametrizations.weight.0._u": "weight_u",
    "parametrizations.weight.0._v": "weight_v",
}


def read_config(path: Path) -> dict[str, Any]:
    """A published configuration."""
    try:
        content = json.loads(read_text(str(path), MOST))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({reason(error)}); give a config.json of HiFi-GAN") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration of HiFi-GAN; give a config.json of HiFi-GAN")
    return content


def networks(config: Mapping[str, Any], where: str, width: float = 1.0) -> tuple[HifiGenerator, Mel]:
    """The generator and its spectrogram, of a published configuration, with `width` times its channels."""
    try:
        rates, window = list(map(int, config["upsample_rates"])), int(config["win_size"])
        if (config["n_fft"], config["hop_size"]) != (window, math.prod(rates)) or config.get("fmax_for_loss"):
            raise UserError(
                f"{where}: n_fft and win_size must be equal, hop_size the product of upsample_rates, and fmax_for_loss "
                f"null; change them there"
            )
        mel = Mel(config["sampling_rate"], config["num_mels"], window, math.prod(rates), config["fmax"], config["fmin"])
        channels, least = int(config["upsample_initial_channel"]), 2 ** len(rates)
        generator = HifiGenerator(
            mel.bands,
            channels if width == 1 else max(least, int(channels * width) // least * least),
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


class Named(nn.Module):
    """A network by the published keys of its weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.keys = {key: _published(key) for key in network.state_dict()}  # ours, and the published ones

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        found = self.network.state_dict()
        return {theirs: found[ours] for ours, theirs in self.keys.items()}

    def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self.network.load_state_dict({ours: state[theirs] for ours, theirs in self.keys.items()})


def _published(key: str) -> str:
    return next((key.removesuffix(end) + name for end, name in ENDS.items() if key.endswith(end)), key)


def files(generator: HifiGenerator, judges: Judges, mel: Mel, rate: float, decay: float) -> list[PublishedFile]:
    """The published files of a training. Optimizers begin anew when the published code goes on with them."""
    config = COMMON | {
        "resblock": "1" if generator.twice else "2",
        "learning_rate": rate,
        "lr_decay": decay,
        "upsample_rates": generator.rates,
        "upsample_kernel_sizes": generator.up_kernels,
        "upsample_initial_channel": generator.width,
        "resblock_kernel_sizes": generator.kernels,
        "resblock_dilation_sizes": generator.dilations,
        "segment_size": 32 * mel.hop,
        "num_mels": mel.bands,
        "n_fft": mel.window,
        "hop_size": mel.hop,
        "win_size": mel.window,
        "sampling_rate": mel.rate,
        "fmin": mel.bottom,
        "fmax": mel.top,
    }
    anew: dict[str, Any] = {
        name: AdamW(network.parameters(), rate, betas=(0.8, 0.99)).state_dict()
        for name, network in (("optim_g", generator), ("optim_d", judges))
    }
    both = {"mpd": Named(judges.mpd), "msd": Named(judges.msd)}
    return [
        PublishedFile("g_00000000", {"generator": Named(generator)}, "g*[0-9]"),
        PublishedFile("do_00000000", both, "do_*", anew | {"steps": 0, "epoch": -1}),
        PublishedFile(CONFIG, {}, text=json.dumps(config, indent=4)),
    ]
