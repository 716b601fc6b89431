"""The page of questions: each of its lines is typed, in a folder with small pictures and tiny runs.

Inception's published file is downloaded, and this machine need not have a network. Another file in its place is
refused; then random convolutions stand in for the network.
"""

import re
import shlex
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from onnxruntime import InferenceSession

from datasets import Faces
from gan import export, fit
from gan.app.fitting import metrics
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import open_run
from gan.app.scoring import features
from gan.app.scoring.features import Extractor, RandomConvolutions
from gan.runs import RUNS
from tests.support import editor, opening
from tests.support.guides import ROOT, guides

PAGE = (ROOT / "docs/guide/questions.md").read_text()
LINES = list(dict.fromkeys(map(shlex.join, guides.commands(PAGE))))
OWN = [line for line in LINES if "answers.py" in line]
# Of what these do other files ask. A line with which another one begins is typed with that one.
ELSEWHERE = (
    *("wandb", "--format", "--from", "zero3", "bf16", "--score-every", "--channels", "--resume"),
    *("gan.compare", "mix", "walk.mp4", "project", "directions"),
)
TYPED = [
    pytest.param(line, marks=[pytest.mark.slow] * (apart or any(f"{line} " in other for other in LINES)))
    for line in LINES
    for apart in [any(part in line for part in ELSEWHERE)]
    if line not in OWN and line != "gan.edit"
]


ONE = ["--devices", "1", "--accelerator", "cpu"]
PICTURES = ["--size", "32", "--batch-size", "4", "--max-steps", "1", "--workers", "0", "--held-out", "0.25"]
NARROW = ["--width", "0.005", "--mapping", "1"]
RUN, NEW = "runs/003-stylegan2", "runs/004-stylegan2"  # what `auto` opens, and what is trained next
PROGRAMS = "runs/001-r3gan-faces/export/step-000002/generator"
SAVED = f"{NEW}/checkpoints/step-000001.ckpt/values.json"


class Typed(NamedTuple):
    """What makes a line small, words that it prints, and the files that it leaves."""

    small: list[str]
    said: str
    left: tuple[str, ...]


FIT = partial(Typed, [*ONE, *PICTURES, *NARROW])
EXPECTED = {  # by the part of a line that no line above has
    "--resume": Typed([*ONE, "--max-steps", "2"], "goes on", (f"{RUN}/checkpoints/step-000002.ckpt/values.json",)),
    "my-classes": FIT("2 classes (old, young", (SAVED,)),
    "--from": Typed([*ONE, *PICTURES], "stylegan2 on", (SAVED,)),
    "--score-every": FIT("", (SAVED, f"{NEW}/scores.json")),
    "wandb": FIT("", (f"{NEW}/wandb/offline-run-*/logs/debug.log",)),  # tests/system/test_loggers.py reads the rest
    "zero3": Typed(
        [*PICTURES, *NARROW, "--accelerator", "cpu", "--check", "false"], "2 CPU processes, strategy zero3", (SAVED,)
    ),
    "--channels 4": FIT("RGBA", (SAVED,)),
    "gan.fit": FIT("12 pictures in a folder (32x32; RGB 12); no classes", (SAVED,)),
    "gan.evaluate": Typed(ONE, "FID ", (f"{RUN}/evaluation-step-000001.json",)),
    "gan.compare": Typed([], "compare.html in a browser", ("runs/compare.html",)),
    "--seeds": Typed([], "", (f"{RUN}/samples/seeds-0-63-truncation-0.7.png",)),
    "mix": Typed([], "", (f"{RUN}/samples/mix-rows-0-3-columns-4-9-layers-4-7.png",)),
    "walk.mp4": Typed(["--frames", "3"], "", ("walk.mp4",)),
    "project": Typed(
        ["--steps", "3", "--tune", "2"],
        " tuned",
        tuple(f"{RUN}/samples/project-me.{end}" for end in ("png", "mp4", "pt", "pkl")),
    ),
    "directions": Typed(["--count", "2"], "", (f"{RUN}/samples/directions-by-weights-seeds-0-3.png",)),
    "--format": Typed([], "generator as a program of onnx gives ", (f"{PROGRAMS}.onnx", f"{PROGRAMS}.pt2")),
    "--card": Typed([], "", (f"{RUN}/export/step-000001/README.md",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page's lines need, in a folder: my-pictures, my-classes, me.jpg, FILE.pkl and three runs."""
    folder = tmp_path_factory.mktemp("newcomer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("answers.py").write_text("\n\n".join(guides.blocks(PAGE, "python")))
        faces = Faces(12, size=32)
        for number in range(12):
            for path in (Path("my-pictures"), Path("my-classes", ("old", "young")[number % 2])):
                path.mkdir(parents=True, exist_ok=True)
                faces.draw(number).save(path / f"{number}.png")
        faces.draw(20).convert("RGB").save("me.jpg")
        for gamma in (2, 50):
            opening.train(Path("runs"), "r3gan-faces", gamma=gamma, **opening.NARROW)
        assert fit.main(["stylegan2", "--data", "my-pictures", *ONE, *PICTURES, *NARROW]) == 0
        assert export.main([RUN, "--published", "--to", "made"]) == 0
        Path("made/network-snapshot.pkl").rename("FILE.pkl")
    return folder


@pytest.fixture
def here(folder, here, monkeypatch):
    """A copy of the folder, and we are in it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    return shutil.copytree(folder, here, dirs_exist_ok=True)


@pytest.mark.parametrize("line", TYPED)
def test_a_line_of_the_page_does_what_it_says(line, here, monkeypatch, capfd):
    command, *words = line.replace("RUN", "runs/001-r3gan-faces" if "--format" in line else RUN).split()
    typed = next(typed for part, typed in EXPECTED.items() if part in line)
    type_it = partial(import_module(command).main, [*words, *typed.small])
    if "torch-fidelity" in line:
        monkeypatch.setattr(torch.hub, "_hub_dir", "hub")
        features.cached(features.INCEPTION).parent.mkdir(parents=True)
        features.cached(features.INCEPTION).write_bytes(b"another network")
        assert type_it() == 2
        assert f"{features.INCEPTION} is not the published Inception of FID" in capfd.readouterr().err
        stand_in = Extractor("Inception", RandomConvolutions(), 960, fid=True)
        monkeypatch.setattr(features, "inception", lambda path: stand_in)
    assert not [path for pattern in typed.left for path in Path().glob(pattern)]
    assert type_it() == 0
    assert typed.said in "".join(capfd.readouterr())
    left = [next(Path().glob(pattern)) for pattern in typed.left]
    assert all(path.stat().st_size for path in left)
    assert "torch-fidelity" not in line or 'fid": ' in left[-1].read_text()
    if "--format" in line:
        run = open_run("runs/001-r3gan-faces").run.game
        z = torch.randn(3, run.drawer.latent)
        (made,) = InferenceSession(f"{PROGRAMS}.onnx").run(None, {"z": z.numpy()})
        assert (torch.from_numpy(made) - run.drawer(z)).abs().max() < 1e-4 < made.std()


def test_the_line_for_the_editor_opens_the_newest_run(here):
    with editor.typed("gan.edit") as address:
        status, answer = editor.Visitor(address).draw(seed=3)
        assert status == 200 and answer["picture"].startswith("data:image/png")


def test_answers_in_python_train_what_they_say(here, monkeypatch):
    few = partial(RUNS["wgan-gp-faces"], faces=12, held_out=4, batch_size=4, width=4)
    monkeypatch.setitem(RUNS, "wgan-gp-faces", few)
    for line in OWN:
        name, words = line.partition(":")[2], line.split()[1:]
        steps = 60 if name == "stopping" else 2
        small = ["--size", "16", "--max-steps", str(steps), "--sample-every", "1" if name == "stopping" else "3"]
        assert fit.main([*words, "--devices", "1", *small]) == 0
        (run,) = Path("runs").glob(f"*-{name}")
        done = max(metrics.read(run / "metrics.csv"))
        assert done == steps if name != "stopping" else 3 < done < steps, done
        assert RunFolder(run).newest_checkpoint() == RunFolder(run).checkpoint(done)
    assert "2: Conv2d" in next(Path("runs").glob("*-judged/game.txt")).read_text()  # the critic is ours


def test_each_question_and_each_row_of_the_table_has_a_line():
    _, *questions = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    _, _, *rows = re.findall(r"^\|.*$", PAGE, re.MULTILINE)
    assert (len(questions), len(rows)) == (11, 18)
    assert all(guides.commands(question) for question in questions)
    assert all(len(guides.commands(row)) == 1 for row in rows)
