"""What the guides say is so: programs run, commands are read, and quotes are quotes."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan import GanModule, Phase, Player, fit
from gan.app.run.folder import RunFolder
from gan.app.training import metrics
from gan.runs import RUNS, build
from strategies import PhaseStrategy

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
assert spec is not None and spec.loader is not None
guides = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guides)
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def reader():
    with guides.reader() as folder:
        yield folder


def test_the_gan_in_full_trains_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, _ = guides.blocks((ROOT / "docs/guide/game.md").read_text(), "python")
    exec(program.replace("max_steps=100", "max_steps=3"), names := {"__name__": "__main__"})
    assert names["trainer"].global_step == 3


class Networks(GanModule):
    """What the game in the README derives from."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.G, self.D = nn.Linear(4, 2).double(), nn.Linear(2, 1).double()


def test_the_two_columns_of_the_readme_give_the_same_weights():
    by_hand, game = guides.blocks(README, "py")
    batches = [(torch.randn(8, 2).double(), torch.randn(8, 4).double()) for _ in range(4)]
    loader = DataLoader(batches, batch_size=None)
    before, hand = Networks(), Networks()
    optimizers = {f"{name}_optimizer": Adam(getattr(hand, name.upper()).parameters(), lr=1e-3) for name in "gd"}
    exec(by_hand, {"G": hand.G, "D": hand.D, "loader": loader, "softplus": softplus, **optimizers})
    names = {"GanModule": Networks, "Player": Player, "Phase": Phase, "partial": partial, "Adam": Adam}
    exec(game, names | {"softplus": softplus}, names := names | {"softplus": softplus})
    played = names["Game"]()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "precision": "64-true"}
    trainer = Trainer(strategy=PhaseStrategy("ddp"), accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(played, loader)
    for one, other, start in zip(hand.parameters(), played.parameters(), before.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-12 < (one - start).abs().max()


@pytest.mark.parametrize("page", guides.GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fragments_compile_and_commands_are_read(page, reader):
    guides.check_fragments(page)
    for words in guides.commands(page.read_text()):
        guides.check_command(words)


def test_the_control_a_wrong_command_is_refused(reader):
    ((*words,),) = guides.commands("```sh\npython -m gan.fit --strategy zero3 --btch-size 3   # so many\n```\n")
    with pytest.raises(AssertionError, match="btch-size 3 is refused"):
        guides.check_command(words)


def test_the_page_of_questions_trains_what_it_says(reader, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    few = partial(RUNS["wgan-gp-faces"], faces=64, held_out=16, batch_size=16)
    monkeypatch.setitem(RUNS, "wgan-gp-faces", few)
    size = ["--devices", "1", "--size", "16", "--out", str(tmp_path)]
    for name, steps in {"judged": 2, "brighter": 2, "stopping": 60}.items():
        typed = [f"{reader}/answers.py:{name}", *size, "--max-steps", str(steps), "--sample-every", "1"]
        assert fit.main(typed) == 0
        (run,) = tmp_path.glob(f"*-{name}")
        done = max(metrics.read(run / "metrics.csv")) + 1
        assert done == steps if name != "stopping" else 3 < done < steps, done
        assert RunFolder(run).newest_checkpoint() == RunFolder(run).checkpoint(done)
    assert "2: Conv2d" in next(tmp_path.glob("*-judged/game.txt")).read_text()  # the critic is ours


def test_the_table_beside_others_has_a_line_for_each_row():
    rows = re.findall(r"^\| [^|]+ \| `(python -m [^`]+)` \|", (ROOT / "docs/guide/questions.md").read_text(), re.M)
    assert len(rows) == 18 and all(row.split()[2:] in guides.commands(f"| `{row}` |") for row in rows)


def test_its_own_run_is_one(reader):
    assert build(f"{reader}/my_gan.py:my_run", batch_size=8).max_steps == 1000


def test_troubles_quotes_what_is_said():
    guides.check_quotes(ROOT / "docs/troubles.md")


def test_what_the_readme_links_to_is_there():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "strategies/README.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), target


def test_front_doors_are_short():
    longest = {"README.md": 150, "CONTRIBUTING.md": 80, "strategies/README.md": 20}
    assert all(len((ROOT / name).read_text().splitlines()) <= most for name, most in longest.items())
