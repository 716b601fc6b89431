"""Tiny runs that are trained once, from which the cases copy, and what the commands make of them undamaged.

faces     two steps of R3GAN on one device, a checkpoint of each, and files that no run wrote
sharded   the same on two ranks, so that a checkpoint has two files of tensors
folder    SEAN on a folder of pictures, which lies beside it in data/
"""

import json
import multiprocessing
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from safetensors.torch import load_file

from gan.files.disk import whole_file
from gan.fit import main as fit
from tests.faults.case import COMMANDS
from tests.faults.child import Ended, Running, adopt
from tests.support.opening import drawn
from tests.support.saved import tensors
from tests.support.worlds import free_port, place

ONE = ("--devices", "1", "--strategy", "single", "--accelerator", "cpu")
SMALL = ("--size", "16", "--width", "2", "--latent", "2", "--faces", "6", "--held-out", "2", "--batch-size", "4")
EVERY = ("--save-every", "1", "--log-every", "1", "--sample-every", "2")
FACES = ("r3gan-faces", *SMALL, *EVERY)
PICTURES = ("--size", "16", "--upsamplings", "2", "--width", "2", "--hidden", "4", "--style", "4", "--workers", "0")
FOLDER = ("sean-folder", "--data", "data", "--perceptual", "off", "--held-out", "2", "--batch-size", "4", *PICTURES)
STEPS = (1, 2)
LAST = 3  # the step to which checkpoints are trained on


def make(known: Path) -> None:
    """Train the known runs, in this process's children."""
    adopt()
    for name, train in (("faces", _faces), ("sharded", _sharded), ("folder", _folder)):
        (known / name).mkdir(parents=True)
        train(known / name)
        run = next((known / name / "runs").iterdir())
        (run / "keep.txt").write_text("a note of a person's own\n")
        (run / "samples" / "keep.png").write_bytes(b"a person's own picture")
        shutil.copytree(run / "checkpoints" / "step-000001.ckpt", run / "checkpoints" / "step-000001-keep.ckpt")
        (known / name / "keep").mkdir()
        (known / name / "keep" / "notes.txt").write_text("and another\n")


def _faces(folder: Path) -> None:
    _well(fit, [*FACES, "--max-steps", "2", *ONE], folder)


def _folder(folder: Path) -> None:
    drawn(folder / "data", 6, 16)
    _well(fit, [*FOLDER, *EVERY, "--max-steps", "2", *ONE], folder)


def _sharded(folder: Path) -> None:
    sharded = ("--strategy", "zero3", "--accelerator", "cpu", "--check", "false")
    _well(_two_ranks, [*FACES, "--max-steps", "2", *sharded], folder)


def _two_ranks(words: list[str]) -> int:
    """As torchrun would start them. The second one is a fork of the first."""
    port, second = free_port(), os.fork()
    rank = int(not second)
    os.environ.update(place(rank, 2, port), TORCHELASTIC_RUN_ID="faults")
    rank_zero_only.rank = rank
    status = fit(words)
    if not second:
        os._exit(status)
    return status or os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])


def _well(main: Callable[[list[str]], int], words: list[str], folder: Path) -> Ended:
    with _scratch() as place:
        ended = Running(main, words, folder, place / "beside").wait()
    assert ended.status == 0, ended
    return ended


# ---- what came of a checkpoint ----

BY = {  # the commands that each is given to, once its checkpoint is damaged
    "faces": ("sample", "export", "resume"),
    "sharded": ("sample", "export", "resume"),
    "folder": ("evaluate",),
}


def words(what: str, which: object) -> list[str]:
    """The command whose result `made` compares, for a run's folder, a checkpoint or auto."""
    more = {
        "sample": ["show", "--count", "2"],
        "evaluate": ["--scores", "ssim,rmse,psnr", "--devices", "1", "--accelerator", "cpu"],
        "export": [],
        "resume": ["--max-steps", str(LAST), *ONE],
    }
    return [*(["--resume"] if what == "resume" else []), str(which), *more[what]]


def made(what: str, ended: Ended) -> tuple[int, Any]:
    """The step whose checkpoint a command says that it has taken, and what it made of it, in this folder."""
    run = next(Path("runs").glob("001-*"))
    if what == "sample":
        step = int(re.search(r", step (\d+)$", ended.out, re.MULTILINE)[1])
        return step, Image.open(run / "samples" / "show.png").convert("RGB").tobytes()
    if what == "evaluate":
        path = Path(re.search(r"saved in (.*)", ended.out)[1])
        found = json.loads(path.read_text())
        return found["step"], found["scores"]
    if what == "export":
        paths = [Path(line) for line in ended.out.splitlines() if line.endswith(".safetensors")]
        step = int(re.search(r"step-(\d+)", str(paths[0]))[1])
        return step, {path.name: _bits(load_file(path)) for path in paths}
    step = int(re.search(r", from .*?step-(\d+)\S*?\.ckpt(?:;|$)", ended.out, re.MULTILINE)[1])
    return step, _bits(tensors(run / "checkpoints" / f"step-{LAST:06d}.ckpt"))


def _bits(found: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return {name: (str(each.dtype), tuple(each.shape), bits(each)) for name, each in found.items()}


def reference(folder: Path, what: str, step: int) -> Any:
    """What a command makes of a known run's checkpoint. The first case that asks makes it, in a copy."""
    kept = folder.parent / f"{folder.name}-{what}-{step}"
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    home = Path.cwd()
    with _scratch() as place:
        here = place / "here"
        shutil.copytree(folder, here)
        run = next((here / "runs").iterdir()).relative_to(here)
        checkpoint = run / "checkpoints" / f"step-{step:06d}.ckpt"
        ended = _well(COMMANDS[what], words(what, checkpoint), here)
        os.chdir(here)
        found, result = made(what, ended)
        os.chdir(home)
    assert found == step, (what, found, step)
    with whole_file(kept) as part:
        part.write_bytes(pickle.dumps(result))
    return result


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder. A forked process would remove a TemporaryDirectory of this one when it ends."""
    place = Path(tempfile.mkdtemp(prefix="gan-faults-"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def made_apart(known: Path) -> None:
    """`make` in a process of its own: this one is forked, so it must not compute anything."""
    process = multiprocessing.get_context("fork").Process(target=make, args=(known,))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the known runs could not be trained in {known}; see above")
