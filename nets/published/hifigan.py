"""HiFi-GAN's configurations, as config.json lies beside its published files; and these files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import AdamW

from gan.files.disk import read_text
from gan.files.errors import UserError, explained
from nets.hifigan import HifiGenerator, Judges
from nets.mel import Mel
from nets.published.files import PublishedFile

CONFIG = "config.json"
MOST = 2**20  # bytes of a config.json
# What a configuration says of the generator and of the spectrogram, by our names.
OF_GENERATOR = {"num_mels": "bands", "upsample_initial_channel": "width", "upsample_rates": "rates"}
OF_GENERATOR |= {"upsample_kernel_sizes": "up_kernels", "resblock_kernel_sizes": "kernels"}
OF_GENERATOR |= {"resblock_dilation_sizes": "dilations"}
OF_MEL = {"num_mels": "bands", "sampling_rate": "rate", "win_size": "window", "hop_size": "hop"}
OF_MEL |= {"fmax": "top", "fmin": "bottom"}
# config_v1.json as published, and what is different in config_v3.json.
V1 = """{"resblock": "1", "num_gpus": 0, "batch_size": 16, "learning_rate": 0.0002, "adam_b1": 0.8, "adam_b2": 0.99,
"lr_decay": 0.999, "seed": 1234, "upsample_rates": [8, 8, 2, 2], "upsample_kernel_sizes": [16, 16, 4, 4],
"upsample_initial_channel": 512, "resblock_kernel_sizes": [3, 7, 11],
"resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "segment_size": 8192, "num_mels": 80, "num_freq": 1025,
"n_fft": 1024, "hop_size": 256, "win_size": 1024, "sampling_rate": 22050, "fmin": 0, "fmax": 8000,
"fmax_for_loss": null, "num_workers": 4,
"dist_config": {"dist_backend": "nccl", "dist_url": "tcp://localhost:54321", "world_size": 1}}"""
V3 = """{"resblock": "2", "upsample_rates": [8, 8, 4], "upsample_kernel_sizes": [16, 16, 8],
"upsample_initial_channel": 256, "resblock_kernel_sizes": [3, 5, 7],
"resblock_dilation_sizes": [[1, 2], [2, 6], [3, 12]]}"""
CONFIGS: dict[str, dict[str, Any]] = {"V1": json.loads(V1)}
CONFIGS |= {"V2": CONFIGS["V1"] | {"upsample_initial_channel": 128}, "V3": CONFIGS["V1"] | json.loads(V3)}


def read_config(path: Path) -> dict[str, Any]:
    why = f"cannot read {path} ({{why}}); give a config.json of HiFi-GAN"
    with explained(why, OSError, ValueError, RecursionError):
        content = json.loads(read_text(str(path), MOST))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration of HiFi-GAN; give a config.json of HiFi-GAN")
    return content


def networks(config: Mapping[str, Any], where: str, width: float = 1.0) -> tuple[HifiGenerator, Mel]:
    """The generator and its spectrogram, of a published configuration, with `width` times its channels."""
    silent = explained(f"{where} does not say {{why}}; give a config.json of HiFi-GAN", KeyError)
    with silent, explained(f"{where} is no configuration of HiFi-GAN: {{why}}", TypeError, ValueError):
        hop = math.prod(map(int, config["upsample_rates"]))
        if not config["n_fft"] == config["win_size"] or config["hop_size"] != hop or config.get("fmax_for_loss"):
            raise UserError(
                f"{where}: n_fft and win_size must be equal, hop_size the product of upsample_rates, and fmax_for_loss "
                f"null; change them there"
            )
        mel = Mel(**{ours: config[theirs] for theirs, ours in OF_MEL.items()})
        shape = {ours: config[theirs] for theirs, ours in OF_GENERATOR.items()}
        if width != 1:
            least = 2 ** len(shape["rates"])
            shape["width"] = max(least, int(shape["width"] * width) // least * least)
        return HifiGenerator(**shape, twice=str(config["resblock"]) == "1"), mel


def files(
    generator: HifiGenerator, judges: Judges, mel: Mel, rate: float, decay: float, told: Mapping[str, Any]
) -> list[PublishedFile]:
    """The published files of a training. Optimizers begin anew there. `told` is what config.json says beside that."""
    about = {"learning_rate": rate, "lr_decay": decay, "n_fft": mel.window, **told}
    about |= {"resblock": "1" if generator.twice else "2"}
    for network, names in ((generator, OF_GENERATOR), (mel, OF_MEL)):
        about |= {theirs: getattr(network, ours) for theirs, ours in names.items()}
    anew: dict[str, Any] = {
        name: AdamW(network.parameters(), rate, betas=(0.8, 0.99)).state_dict()
        for name, network in (("optim_g", generator), ("optim_d", judges))
    }
    both = {"mpd/": judges.mpd, "msd/": judges.msd}
    return [
        PublishedFile("g_00000000", {"generator/": generator}, "g*[0-9]"),
        PublishedFile("do_00000000", both, "do_*", anew | {"steps": 0, "epoch": -1}),
        PublishedFile(CONFIG, {}, others=CONFIGS["V1"] | about, save=_write_config),
    ]


def _write_config(config: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(config, indent=4), "utf-8")
