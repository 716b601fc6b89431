"""`python -m gan.plan` as a person types it, and the table in the guide."""

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from gan.app.planning import planned as planning
from gan.app.run import options as fitting
from gan.plan import main
from strategies.policies.amounts import readable_bytes
from tests.support import commands
from tests.support.parity import often

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "plan.md").read_text()
RUN = f"{ROOT}/samples/distillation.py:distillation"
TABLE = re.search(r"\n((?:    +[\d.]+ +\d+ GB .*\n)+)", GUIDE)
ROWS = [line.split() for line in TABLE[1].splitlines()] if TABLE else []


def planned(capsys, *words: str) -> dict:
    """The plan for programs."""
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Another file of this name, as that of the guides' reader, may be opened later."""
    yield
    sys.modules.pop("distillation", None)


@pytest.fixture
def opened_once(monkeypatch):
    """All plans of a test are of the game that the first of them has opened and played."""
    real, found = planning.opened, []
    monkeypatch.setattr(planning, "opened", lambda *args: found[0] if found else found.append(real(*args)) or found[0])


@pytest.fixture
def unsearched(monkeypatch):
    """What is typed is planned, and nothing cheaper is looked for."""
    monkeypatch.setattr(planning.Planned, "others", lambda self: [*self.found.values()] * 2)


def row(capsys, billions: str, memory: str, nodes: int) -> str:
    """A row of the table: one sample on each rank, nodes of 8."""
    words = ["--billions", billions, "--nodes", str(nodes), "--devices", "8", "--batch-size", str(8 * nodes)]
    plan = planned(capsys, RUN, *words, "--memory", f"{memory}G")
    best = plan["cheapest"]
    found = f"{readable_bytes(best['bytes']):>8}  {best['strategy']}" if best["fits"] else f"{'-':>8}  nothing fits"
    return f"    {billions:>10}  {memory:>5} GB  {8 * nodes:>6}  {readable_bytes(plan['bytes']):>9}  {found}"


@pytest.mark.slow
@pytest.mark.parametrize("cells", ROWS)
def test_the_table_in_the_guide_is_what_it_says(cells, capsys):
    billions, memory, _, ranks, *_ = cells
    assert row(capsys, billions, memory, int(ranks) // 8) in GUIDE.splitlines()


def test_the_table_has_games_of_three_sizes_and_devices_of_two():
    assert {(cells[0], cells[1]) for cells in ROWS} == {(b, m) for b in ("1.5", "14", "70") for m in ("32", "80")}


OWN = """
from gan.runs import Run
from tests.unit.gan.app.planning.test_opening import {game} as Game


def mine(batch_size: int = 4, billions: float = 1.0) -> Run:
    return Run(Game(batch_size), None, 1)
"""


def own(here: Path, game: str) -> str:
    """What is typed for a run in a person's file, whose game is one of those of another test."""
    (here / "own_plan.py").write_text(OWN.format(game=game))
    return "own_plan.py:mine"


def test_what_it_says_to_a_person(here, capsys):
    words = [own(here, "Fed"), "--billions", "0.02", "--nodes", "2", "--devices", "4", "--strategy", "auto"]
    assert main([*words, "--batch-size", "8", "--memory", "32G"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^mine: \d+ parameters, on 8 ranks, 2 nodes of 4; 1 samples on each rank$", said, re.MULTILINE)
    assert re.search(r"^  discriminator +\S+ +[\d.]+ [kB]+ +", said, re.MULTILINE)
    assert re.search(r"^auto would take .*: fits, with .* to spare of 32 GB less a tenth$", said, re.MULTILINE)
    (command,) = re.findall(r"^  (python -m gan\.fit own_plan.py:mine .*)$", said, re.MULTILINE)
    typed = fitting.parse(command.replace("'", "").split()[3:])[0]
    assert (typed.billions, str(typed.nodes), typed.devices, typed.batch_size) == (0.02, "2", 4, 8)


def test_a_speed_gives_the_hours_of_the_whole_training(capsys, opened_once, unsearched):
    small = "wgan-gp-faces --size 16 --width 4 --latent 4 --faces 64 --held-out 4 --devices 2"
    words = f"{small} --max-steps 781250 --batch-size 32".split()
    main(words)
    assert "781,250 steps are 25,000,000 samples; for the hours type --speed" in capsys.readouterr().out
    main([*words, "--speed", "125"])
    assert "25,000,000 samples: 27.8 hours at 125 samples/s on each rank" in capsys.readouterr().out
    assert planned(capsys, *words, "--speed", "125")["hours"] == pytest.approx(25e6 / 250 / 3600)


@pytest.mark.slow
def test_what_does_not_fit_is_told_by_how_much(capsys):
    words = [RUN, "--billions", "1.5", "--devices", "2", "--batch-size", "2"]
    assert main([*words, "--memory", "2G"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^ddp: does not fit: .* GB too much of 2 GB less a tenth$", said, re.MULTILINE)
    assert "nothing fits: the least is " in said


def test_a_game_that_reads_values_is_measured(here, capsys):
    assert main([own(here, "ReadsValue"), "--devices", "2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"measured on this CPU, because it cannot be played without values: RuntimeE.*item\(\)", said)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("pix2pix-faces --faces 16", marks=pytest.mark.slow),
        "vqgan --config f4 --data pictures --width 32 --blocks 1",
    ],
)
def test_label_maps_new_pictures_and_the_weights_of_a_distance_need_no_values(words, capsys, here, unsearched):
    """A loader that reads headers, and a file that LPIPS reads, are on the CPU while the game is made on meta."""
    Path("pictures").mkdir()
    for number in range(8):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(f"pictures/{number}.png")
    assert main([*words.split(), "--devices", "1", "--size", "32", "--batch-size", "2"]) == 0
    assert not list(here.rglob("pixels-*")), "no picture is decoded into the cache"
    said = capsys.readouterr().out
    assert "measured on this CPU" not in said and "made-up" not in said


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("stylegan2 --width 0.01 --mapping 1", "390,625 steps are 25,000,000 samples"),
        pytest.param(
            "cyclegan --max-steps 5 --width 2 --blocks 1 --layers 1 --batch-size 8",
            "5 steps are 40 samples",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stylegan2", "cyclegan"],
)
def test_a_plan_without_data_says_what_it_has_counted_with(words, more, capsys, unsearched):
    assert main([*words.split(), "--data", "nowhere", "--size", "16", "--devices", "8"]) == 0
    first, said, settings, then, *_ = capsys.readouterr().out.splitlines()
    assert said == "no data that can be read: counted with 1,000,000 made-up pictures of 16x16"
    assert then.startswith(more) and settings.startswith("settings: ") and first.endswith(" samples on each rank")
    assert settings.endswith(f"batch-size {64 if 'stylegan2' in words else 8}")


OF_ALL_KINDS = ["cyclegan-faces", "vqgan-faces", "dmd2-lora-faces", "byol-faces", "stylegan-faces", "hifigan-tones"]


@pytest.mark.parametrize("run", often(OF_ALL_KINDS, []))
def test_games_of_all_kinds_have_a_plan(run, capsys, opened_once):
    """With image pools, phases that begin later, parameters that players share, players that follow others."""
    for strategy in ("zero3", "fsdp"):
        plan = planned(capsys, run, "--devices", "2", "--batch-size", "4", "--strategy", strategy)
        assert plan["fits"]
        assert plan["bytes"] > sum(sum(held.values()) for held in plan["between_phases"].values()) > 0


def test_ranks_that_serve_a_player_have_a_plan_of_their_own(capsys):
    words = ["tests.support.placed_run:taught", "--devices", "4", "--memory", "1M"]
    strategy = "teacher=zero3@2-3,*=ddp@0-1"
    assert main([*words, "--strategy", strategy]) == 0
    said = capsys.readouterr().out
    assert "on 4 ranks; 8 samples on each rank that trains" in said
    assert re.findall(r"^---- ranks (.*)$", said, re.MULTILINE) == ["0-1 train", "2-3 serve"]
    assert said.count(": fits, with ") == 2
    assert main([*words, "--strategy", strategy, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    held = {
        at: {name: player["weights"] for name, player in part["between_phases"].items()}
        for at, part in plan["parts"].items()
    }
    assert held["0-1"].keys() == {"generator", "discriminator", "teacher"} and held["0-1"]["teacher"] == 0
    weights = 4 * (6 * 8 + 8 + 8 * 6 + 6)
    assert held["2-3"] == {"teacher": pytest.approx(weights / 2, abs=8)}
    assert main([*words, "--strategy", "generator=zero3@2-3,*=ddp@0-1"]) == 2
    assert "and only frozen players can be" in capsys.readouterr().err


@pytest.mark.slow
def test_seventy_billion_on_4096_ranks_take_less_than_a_minute():
    words = ["--billions", "70", "--nodes", "512", "--devices", "8", "--batch-size", "4096", "--strategy", "zero3"]
    done = commands.run("gan.plan", RUN, *words, limit=60)
    assert done.returncode == 0, done.stderr
    assert "on 4096 ranks, 512 nodes of 8" in done.stdout
