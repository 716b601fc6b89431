"""The notebook, executed from start to end in its own kernel."""

import ast
import base64
import re
import sys
from io import BytesIO
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient
from PIL import Image

import gan
from gan.app.sampling.grids import MARGIN, TITLE
from nets.published.files import latest_nets
from nets.resnet import ResnetGenerator
from tests.support import commands, drawers

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(SAMPLES / "inspect.ipynb", as_version=4)


def forked(words, cwd, env=None, **_):
    """A kernel, by the words that start one."""
    kernel = commands.Typed(words[words.index("-m") :], cwd=cwd, env=env, start_new_session=True)
    kernel.stdin = kernel.stdout = kernel.stderr = None
    return kernel


@pytest.fixture(scope="module")
def executed(notebook, sean_run):
    """What each cell shows, by the cell's name. At first the line that chooses a run names one that does not exist."""
    book = nbformat.from_dict(notebook)
    client = NotebookClient(book, timeout=300, allow_errors=True, resources={"metadata": {"path": str(SAMPLES)}})
    shown = {}
    with mock.patch.object(local_provisioner, "launch_kernel", forked), client.setup_kernel():
        for number, cell in enumerate(book.cells):
            if cell.cell_type != "code":
                continue
            if cell.id == "which":
                line = cell.source
                assert line.count('RUN = "auto"') == 1
                for run in ("runs/999-none", str(sean_run)):
                    cell.source = line.replace('RUN = "auto"', f"RUN = {run!r}")
                    client.execute_cell(cell, number)
                    shown.setdefault("no run", cell.outputs)
            else:
                client.execute_cell(cell, number)
            shown[cell.id] = cell.outputs
            if cell.id == "edit":
                cell.source = cell.source.replace("REGION = None", "REGION = 'moon'")
                client.execute_cell(cell, number)
                shown["no region"] = cell.outputs
    return shown


def html(outputs) -> str:
    (output,) = outputs
    assert output.output_type == "execute_result", output
    return output.data["text/html"]


def images(outputs) -> list[Image.Image]:
    found = re.findall(r'src="data:image/(?:png|webp);base64,([^"]+)"', html(outputs))
    return [Image.open(BytesIO(base64.b64decode(data))) for data in found]


def test_it_is_committed_clean(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.source.count("\n") < 8 for cell in code)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def value(cell, **names):
    """What a cell shows, of its last line."""
    *before, last = ast.parse(cell.source).body
    exec(compile(ast.Module(before, []), cell.id, "exec"), names)
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), cell.id, "eval"), names)


def test_of_a_run_from_noise_styles_are_mixed_and_seeds_walked_between(notebook, here):
    cells = {cell.id: cell for cell in notebook.cells}
    drawers.publish(Path("style.pkl"), G_ema=drawers.generator())
    opened = gan.open("style.pkl", device="cpu")
    assert len(value(cells["exchange"], opened=opened)) == 4 * 6
    assert value(cells["edit"], opened=opened).count == 24
    latest_nets({"G": ResnetGenerator(3, 3, 2, 1)})[0].write(Path("net.pth"))
    assert value(cells["edit"], opened=gan.open("net.pth", device="cpu")) is None


@pytest.mark.parametrize("folder", [SAMPLES, SAMPLES.parent, SAMPLES.parent / "gan" / "games"])
def test_it_starts_anywhere_in_the_checkout(notebook, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [])
    (setup,) = (cell.source for cell in notebook.cells if cell.id == "setup")
    exec(setup, {})
    assert Path.cwd() == SAMPLES.parent and sys.path == [str(SAMPLES.parent)]


@pytest.mark.slow
def test_every_cell_shows_what_the_run_is_and_makes(executed, sean_run):
    for name in ("which", "settings", "curves", "time", "masks", "legend", "exchange", "nearest"):
        assert html(executed[name])
    facts = html(executed["which"])
    assert sean_run.name in facts and "2 of 2 steps" in facts and "transfer error" in facts
    assert "batch_size" in html(executed["settings"])
    titles = re.findall(r'alt="curves of ([^"]*?) over', html(executed["curves"]))
    assert set(titles) == {"generator", "discriminator", "held-out scores", "gradient norms", "learning rates"}
    grid = images(executed["time"])
    assert len(grid) % 4 == 0 and {image.size for image in grid} == {(32, 32)}
    assert "step 0" in html(executed["time"]) and "step 2" in html(executed["time"])
    assert len(images(executed["masks"])) == 3 * 4
    assert len(images(executed["nearest"])) == 4 * 4
    assert "hair" in html(executed["legend"])
    (output,) = executed["sample"]  # as gan.sample draws it
    sheet = Image.open(BytesIO(base64.b64decode(output.data["image/png"])))
    assert sheet.height == TITLE + MARGIN + 4 * (128 + MARGIN)  # of four held-out pictures


@pytest.mark.slow
def test_styles_are_exchanged_region_by_region(executed):
    shown = html(executed["exchange"])
    assert shown.count("<tr>") == shown.count('<th scope="row">') + 1 > 4
    assert "style of picture 3" in shown
    *_, output = executed["edit"]  # after notes on regions that one of the two pictures lacks
    sheet = Image.open(BytesIO(base64.b64decode(output.data["image/png"])))
    assert sheet.height == TITLE + MARGIN + 128 + MARGIN and sheet.width > 8 * 128  # two pictures and six steps


@pytest.mark.slow
def test_mistakes_are_told_in_one_line(executed):
    for name, words in (("no run", "there is no 'runs/999-none'"), ("no region", "moon")):
        (output,) = executed[name]
        assert output.output_type == "error"
        assert len(output.traceback) == 1 and words in output.traceback[0]
