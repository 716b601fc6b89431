"""Tiny trained runs, to open in tests."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from datasets import Faces
from gan import GanModule
from gan import fit as fit
from gan.app.exporting import card
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import SavedRun, _load
from gan.export import Exported, networks
from gan.files.checkpoint import load
from gan.runs import Run, build
from tests.support import narrow_vgg

WIDTHS = dict(size=32, width=4, hidden=8, style=8)
SMALL = dict(upsamplings=2, workers=0, **WIDTHS)  # settings of a run on files
NARROW = dict(size=16, width=8, latent=8, faces=16, held_out=4)  # of a game from noise


def typed(settings: dict[str, Any]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def train(out: Path, name: str, **settings) -> Path:
    """A run's folder after two steps on one device."""
    steps = {"max-steps": 2, "save-every": 2, "log-every": 1}
    settings = {"devices": 1, "accelerator": "cpu", "batch-size": 4, **steps, **settings}
    assert fit.main(["--run", name, "--out", str(out), *typed(settings)]) == 0
    return max(out.glob(f"*-{name}"))


def sean_run(out: Path) -> Path:
    """SEAN on drawn faces."""
    return train(out, "sean-faces", faces=16, held_out=4, **WIDTHS)


def drawn(root: Path, count: int, size: int) -> Path:
    faces = Faces(count, size=size)
    for part, draw in (("images", faces.draw), ("labels", faces.label)):
        (root / part).mkdir(parents=True)
        for number in range(count):
            draw(number).save(root / part / f"{number}.png")
    return root


def folder_run(root: Path) -> Path:
    """SEAN on a folder of pictures, with a perceptual loss whose weights were removed after training."""
    data = drawn(root / "data", 8, 32)
    vgg = Path(narrow_vgg.save(root / "vgg.pth"))
    run = train(root / "runs", "sean-folder", data=data, perceptual=vgg, held_out=2, **SMALL)
    vgg.unlink()
    return run


def untrained(name: str, **settings) -> SavedRun:
    """A run that is open, with its networks as they were made."""
    run = build(name, **settings)
    run.game.eval().requires_grad_(False)
    folder = RunFolder(Path("nowhere"))
    return SavedRun(name, folder, folder.checkpoint(0), 0, {}, run, frozenset())


def exported(game: GanModule, checkpoint: Path, weights: str) -> list[Exported]:
    """The networks of a game as gan.export writes them from a checkpoint."""
    return networks(game, _load(Run(game, None, 1), load(checkpoint), checkpoint, weights, exactly=True))


def program(call: card.Call, path: Path) -> Any:
    """A network as a program of torch in a file, as it was loaded to be compared: to load it again takes seconds."""
    load, found = torch.export.load, []
    with mock.patch.object(torch.export, "load", lambda file: found.append(load(file)) or found[0]):
        assert card.write("torch", "generator", call, path) < 1e-5
    return found[0].module()


@torch.no_grad()
def set_grain(game: GanModule, scale: float) -> None:
    """How much of the noise is seen in what SEAN's generator paints."""
    for name, weight in game.named_parameters():
        if name.endswith("noise_scale"):
            weight.fill_(scale)


def rewrite(folder: Path, **changes) -> None:
    """Change some of a run's settings on the disk."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
