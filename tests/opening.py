"""Tiny trained runs, to open in tests."""

from pathlib import Path

import yaml

from datasets import Faces
from gan import fit

WIDTHS = dict(size=32, width=4, hidden=8, style=8)


def train(out: Path, name: str, **settings) -> Path:
    """A run's folder after two steps on one device."""
    settings = {"devices": 1, "accelerator": "cpu", "max-steps": 2, "batch-size": 4, "log-every": 1, **settings}
    options = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    assert fit.main(["--run", name, "--out", str(out), *options]) == 0
    return max(out.glob(f"*-{name}"))


def sean_run(out: Path) -> Path:
    """SEAN on drawn faces."""
    return train(out, "sean-faces", faces=16, held_out=4, **WIDTHS)


def folder_run(root: Path) -> tuple[Path, Path]:
    """SEAN on a folder of pictures, and that folder."""
    data, faces = root / "data", Faces(8, size=32)
    for part, draw in (("images", faces.draw), ("labels", faces.label)):
        (data / part).mkdir(parents=True)
        for number in range(8):
            draw(number).save(data / part / f"{number}.png")
    widths = {**WIDTHS, "upsamplings": 2, "held_out": 2, "workers": 0}
    return train(root / "runs", "sean-folder", data=data, **widths), data


def rewrite(folder: Path, **changes) -> None:
    """Change some of a run's settings on the disk."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
