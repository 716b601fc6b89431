"""The grid of policies: its cells, its figures, its table, its file and its table."""

import csv
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from gan.bench.grid import command, table, worker
from gan.bench.grid.game import blocks
from gan.bench.grid.measuring import SINGLE, Cell, Planned, Rounds, cells, planned, refuse_strategy
from gan.bench.grid.worker import Clock, Found, cut_phases
from gan.files.errors import UserError
from strategies.pipelining.cutting import cut, units_of
from strategies.processes.world import Failure, WorldFailed, WorldHangs
from tests.support.posix import only_on_linux

MIXED = "generator=pipeline,*=ddp"


# ---- cells ----


def test_each_cell_comes_after_its_one_process():
    found = list(cells(["ddp", MIXED], [1, 2, 4], [2, 4], [1, 8], [16, 32]))
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2 + 2 * 2)
    for cell in found:
        assert found.index(cell.one) <= found.index(cell)
        assert (cell.strategy == SINGLE) == (cell.processes == 1) == (cell == cell.one)
        assert (cell.stages is None) == (not cell.piped)


@pytest.mark.parametrize(
    ("strategy", "stages", "typed", "micro_batches"),
    [
        ("ddp", None, "ddp", 4),
        ("zero3+offload", None, "zero3+offload", 4),
        ("pipeline", None, "pipeline+chunks:4", 1),
        ("pipeline+recompute", 2, "pipeline+recompute+stages:2+chunks:4", 1),
        (MIXED, 2, "generator=pipeline+stages:2+chunks:4,*=ddp", 1),
    ],
)
def test_a_pipeline_gets_the_parts_as_chunks_and_others_as_micro_batches(strategy, stages, typed, micro_batches):
    cell = Cell(strategy, 2, stages, 4, 32)
    assert (cell.typed, cell.micro_batches) == (typed, micro_batches)
    assert cell.one == Cell(SINGLE, 1, None, 4, 32) and cell.one.micro_batches == 4


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("pipeline+chunks:4", "has chunks, which the grid varies; type --chunks 1,4"),
        ("a=ddp,*=pipeline+stages:2", "has stages, which the grid varies; type --stages 2,4"),
        ("single", "'single' is for one process, which the grid always measures"),
        ("auto", "unknown strategy 'auto'"),
        ("dpd", "unknown strategy 'dpd'"),
    ],
)
def test_a_strategy_that_says_what_the_grid_varies_is_refused(strategy, words):
    with pytest.raises(UserError, match=words.replace("+", r"\+")):
        refuse_strategy(strategy)


# ---- what is typed ----


def test_lists_are_read_and_the_run_has_its_own_options():
    settings = command.parse(
        ["--policies", "ddp,zero3", MIXED, "--chunks", "1,8,1", "--batch-sizes=8", "--width", "16"]
    )
    assert settings.policies == ["ddp", "zero3", MIXED]
    assert (settings.chunks, settings.batch_sizes, settings.stages, settings.width) == ([1, 8], [8], [None], 16)
    assert command.parse(["r3gan-faces", "--stages", "2"]).stages == [2]


def test_what_cannot_be_read_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="cannot read --batch-sizes '8;16'; type numbers with commas, such as"):
        command.parse(["--batch-sizes", "8;16"])
    (tmp_path / "fixed.py").write_text("from gan.runs import Run\ndef game(width: int = 3) -> Run: ...\n")
    with pytest.raises(UserError, match=r"has no argument 'batch_size'.*def game\(batch_size: int = 32, "):
        command.parse([f"{tmp_path}/fixed.py:game"])
    with pytest.raises(SystemExit):
        command.parse(["--batch-size", "8"])  # one size is no list, and the grid sets it
    assert "did you mean --batch-sizes?" in capsys.readouterr().err


# ---- the game ----


def test_a_pipeline_cuts_the_games_generator_in_halves():
    game = blocks(width=8, generator_blocks=6, discriminator_blocks=2).game
    for player in game.configure_players():
        units = units_of(player, "", player.module)
        parts = [0, 0]
        for unit, stage in zip(units, cut(units, 2), strict=True):
            parts[stage] += unit.elements
        assert player.name != "generator" or max(parts) < 0.6 * sum(parts)


def test_one_process_plays_the_parts_as_micro_batches():
    game = blocks(width=2, generator_blocks=1, discriminator_blocks=1).game
    whole = list(game.configure_phases())
    cut_phases(game, 4)
    assert [phase.micro_batches for phase in game.configure_phases()] == [4 * phase.micro_batches for phase in whole]
    assert [phase.loss for phase in game.configure_phases()] == [phase.loss for phase in whole]


# ---- a rank ----


@only_on_linux
def test_a_clock_times_the_steps_after_the_first_and_forgets_the_memory_before_them():
    trainer = SimpleNamespace(strategy=SimpleNamespace(policies={"net": nn.Linear(1, 1)}))
    clock = Clock(warm=2, steps=3)
    for step in range(5):
        assert clock.found is None
        clock.on_train_batch_start(trainer, None, None, step)
        if step == 2:
            resident = worker._resident()
        held = torch.ones(2 ** (26 if step < 2 else 24))  # 256 MB, then 64 MB
        assert held.sum() > 0
        del held
        clock.on_train_batch_end(trainer, None, None, None, step)
    found = clock.found
    assert found.seconds > 0 and 0 <= found.waited + found.queued <= found.seconds
    assert 0.9 * 2**26 < found.peak - resident < 3 * 2**26  # the first two steps have taken 4 * 2**26
    assert found.payload == 0 and found.shape is None


# ---- rounds ----


def found(seconds, peak=100, payload=8, shape=None):
    return Found(seconds, 0.25 * seconds, 0.5 * seconds, peak, payload, shape)


ONE, TWO, FOUR = Cell(SINGLE, 1, None, 1, 8), Cell("ddp", 2, None, 1, 8), Cell(MIXED, 2, 2, 1, 8)
CUT, WRONG = Cell(SINGLE, 1, None, 4, 8), Cell("pipeline", 2, 9, 4, 8)


@pytest.fixture
def rounds():
    """Three rounds: in each the machine has another speed, and one cell cannot be played."""
    speed = iter([1.0] * 4 + [10.0] * 4 + [2.0] * 4)
    asked = []

    def play(cell):
        asked.append(cell)
        if cell == WRONG:
            failure = Failure(0, "UserError: 9 stages", message="9 stages\n  are many", refused=True)
            raise WorldFailed(failure)
        slow = next(speed)
        if cell == ONE:
            return [found(slow)]
        if cell == CUT:
            return [found(0.5 * slow, peak=50)]
        if cell == FOUR:
            return [found(0.8 * slow, 60, 5, (2, 2, 1)), found(0.7 * slow, 70, 7, (2, 2, 1))]
        return [found(slow / (2 if slow == 1 else 4)), found(slow / 8)]

    plans = {TWO: Planned(50, 16.0), ONE: Planned(200, 0)}
    rounds = Rounds([ONE, TWO, FOUR, CUT, WRONG, ONE], 5, play, plans.get)
    rounds.said = [list(rounds.round()) for _ in range(3)]
    rounds.asked = asked
    return rounds


def test_cells_take_turns_and_one_that_fails_is_not_played_again(rounds):
    order = [ONE, TWO, FOUR, CUT]
    assert rounds.asked == [*order, WRONG, *reversed(order), *order]
    assert rounds.why == {WRONG: "refused: 9 stages are many"}
    assert rounds.said[0][0] == (ONE, "40.0 pictures/s") and rounds.said[0][-1] == (WRONG, rounds.why[WRONG])
    assert [len(said) for said in rounds.said] == [5, 4, 4]


def test_ratios_are_those_within_a_round(rounds):
    figures = rounds.figures(TWO)
    assert figures.ratio == pytest.approx((2.0, 4.0, 4.0))
    assert figures.fastest == pytest.approx(2.0)  # its fastest round is the first, and so is that of one process
    assert figures.of_best == pytest.approx(2.0)  # CUT takes half of ONE's time
    assert figures.rate == pytest.approx(5 * 8 / 0.5)
    assert (figures.waits, figures.queues) == pytest.approx((0.25, 0.5))
    assert figures.memory == 1 and figures.bubble is None
    piped = rounds.figures(FOUR)
    assert piped.ratio == pytest.approx((1.25,) * 3)  # of the rank that takes longest
    assert (piped.peak, piped.memory, piped.payload, piped.bubble) == (70, pytest.approx(0.7), 7, 0.5)
    assert piped.work == pytest.approx(0.8)
    assert rounds.figures(ONE).ratio == (1, 1, 1) and rounds.figures(CUT).of_best == 1


def test_without_one_process_there_is_no_ratio():
    def play(cell):
        if cell == ONE:
            raise WorldFailed(Failure(0, "rank 0 ended with 9"))
        return [found(1.0)]

    rounds = Rounds([ONE, TWO], 1, play)
    assert [words for _, words in rounds.round()] == ["fails: rank 0 ended with 9", "8.0 pictures/s"]
    figures = rounds.figures(TWO)
    assert (figures.ratio, figures.fastest, figures.of_best, figures.work, figures.memory) == (None,) * 5
    assert "80.0" not in "\n".join(table.lines(rounds)) and "fails: rank 0" in "\n".join(table.lines(rounds))


def test_a_cell_that_hangs_says_so():
    def play(cell):
        raise WorldHangs(3, {})

    rounds = Rounds([ONE], 1, play)
    assert list(rounds.round()) == [(ONE, "hangs: no end within 3 s")]


def test_a_cell_is_planned_as_it_is_played():
    """Parts of the batch need less memory at a time; a pipeline moves less than two whole copies do."""
    settings = {"generator_blocks": 4, "width": 64, "batch_size": 8}
    plans = {
        (strategy, parts): planned(command.BLOCKS, settings, Cell(strategy, 1 + (strategy != SINGLE), None, parts, 8))
        for strategy in (SINGLE, "ddp", MIXED)
        for parts in (1, 4)
    }
    assert plans[SINGLE, 4].peak < plans[SINGLE, 1].peak and plans[SINGLE, 1].payload == 0
    assert plans["ddp", 1].payload > plans[MIXED, 1].payload > 0
    assert planned(command.BLOCKS, settings, Cell("pipeline", 3, None, 4, 8)) is None


# ---- what is shown ----


def test_the_table_has_a_line_for_each_cell_and_says_why_not(rounds):
    said = list(table.lines(rounds))
    assert sum(line.startswith("    ") for line in said) == 5
    (line,) = (line for line in said if MIXED in line)
    ranks, stages, ratio, spread, fastest, best, work, memory, _, bubble, waits, queues, _, rate = line.split(MIXED)[
        1
    ].split()
    assert (ranks, stages, ratio, spread) == ("2", "2", "1.25", "1.25-1.25")
    assert (fastest, best, work, memory) == ("1.25", "0.62", "0.80", "0.70")
    assert (bubble, waits, queues, rate) == ("50%", "25%", "50%", "25.0")
    assert any(line.split()[-3:-1] == ["0.50,", "2.00"] for line in said if " ddp " in line)
    assert any(line.endswith("impossible, see (1)") for line in said) and said[-1] == "(1) refused: 9 stages are many"


def test_the_file_has_all_of_it(rounds, tmp_path):
    table.write(rounds, tmp_path / "grid.csv")
    rows = list(csv.DictReader((tmp_path / "grid.csv").open()))
    assert len(rows) == 5
    assert rows[2]["strategy"] == MIXED and float(rows[2]["of_one"]) == 1.25 and rows[2]["payload_bytes"] == "7"
    assert (rows[1]["planned_peak_bytes"], rows[1]["planned_payload_bytes"]) == ("50", "16")
    assert rows[2]["planned_peak_bytes"] == ""
    assert rows[4]["why_not"] == "refused: 9 stages are many" and rows[4]["of_one"] == rows[4]["payload_bytes"] == ""
    assert all(None not in row and None not in row.values() for row in rows)


def test_the_chart_is_drawn_with_what_could_be_played(rounds, tmp_path):
    table.draw(rounds, tmp_path / "grid.png", "some rounds")
    with Image.open(tmp_path / "grid.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # of two lines; WRONG has none
    assert (44, 160, 44) not in colours
