"""The grid of policies: its cells, what a rank measures, its columns, its file and its chart."""

import csv
import mmap

import pytest
import torch

from gan.bench import grid
from gan.bench.blocks import blocks
from gan.bench.grid import ONE, Cell, GridBenchmark, measuring, planned, together
from gan.files.system import in_proc
from strategies import PhaseStrategy
from strategies.pipelining.cutting import cut, units_of
from tests.support.posix import only_on_linux

MIXED = "generator=pipeline,*=ddp"


# ---- cells ----


def test_each_cell_comes_after_its_one_process():
    dials = ["--processes", "1,2,4", "--stages", "2,4", "--chunks", "1,8", "--batch-sizes", "16,32"]
    found = list(GridBenchmark(["--policies", "ddp", MIXED, *dials]).cells())
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2 + 2 * 2)
    for cell in found:
        assert found.index(cell.one) <= found.index(cell)
        assert (cell.strategy == ONE) == (cell.processes == 1) == (cell == cell.one)
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
    cell = Cell(32, 4, strategy, 2, stages)
    assert (cell.typed, cell.micro_batches) == (typed, micro_batches)
    assert cell.one == Cell(32, 4) and (cell.one.typed, cell.one.micro_batches) == ("single", 4)


def test_lists_are_read_and_the_run_has_its_own_options():
    dials = ["--policies", "ddp,zero3", MIXED, "--chunks", "1,8,1", "--batch-sizes=8", "--width", "16"]
    settings = GridBenchmark(dials).settings
    assert settings.policies == ["ddp", "zero3", MIXED]
    assert (settings.chunks, settings.batch_sizes, settings.stages, settings.width) == ([1, 8], [8], [None], 16)
    assert GridBenchmark(["r3gan-faces", "--stages", "2"]).settings.stages == [2]


# ---- the game ----


def test_a_pipeline_cuts_the_games_generator_in_halves():
    game = blocks(width=8, generator_blocks=6, discriminator_blocks=2).game
    for player in game.configure_players():
        units = units_of(player, "", player.module)
        parts = [0, 0]
        for unit in cut(units, 2):
            parts[unit.stage] += unit.elements
        assert player.name != "generator" or max(parts) < 0.6 * sum(parts)


def test_one_process_plays_the_parts_as_micro_batches():
    sizes = {"width": 2, "generator_blocks": 1, "discriminator_blocks": 1}
    whole, parts = (Cell(8, number).build(grid.BLOCKS, sizes).game.configure_phases() for number in (1, 4))
    for phase, cut_phase in zip(whole, parts, strict=True):
        assert (phase.name, 4 * phase.micro_batches) == (cut_phase.name, cut_phase.micro_batches)


# ---- a rank ----


@only_on_linux
def test_a_clock_times_the_steps_after_the_first_and_forgets_the_memory_before_them():
    clock = measuring(PhaseStrategy("single"), 0, 2, 3)
    next(clock)
    for step in range(1, 6):
        if step == 3:
            resident = in_proc("self/status", "VmRSS")
        held = mmap.mmap(-1, 2 ** (28 if step < 3 else 26))  # not by malloc, which may keep what earlier tests had
        torch.frombuffer(held, dtype=torch.uint8).fill_(1)
        held.close()
        if step < 5:
            next(clock)
    with pytest.raises(StopIteration) as ended:
        next(clock)
    found = ended.value.value
    assert found["seconds"] > 0
    assert 0.9 * 2**26 < found["peak"] - resident < 3 * 2**26  # the first two steps have taken 4 * 2**26
    assert found["payload"] == 0 and "bubble" not in found


def test_a_cell_is_as_slow_as_its_slowest_rank():
    ranks = [{"seconds": 2.0, "peak": 0, "payload": 5}, {"seconds": 4.0, "peak": 0, "payload": 7}]
    found = together(ranks, pictures=40)
    assert (found["rate"], found["payload"], found["peak"], found["memory"]) == (10.0, 7, 0, 1)


# ---- figures ----

FIRST, TWO, FOUR = Cell(8, 1), Cell(8, 1, "ddp", 2), Cell(8, 1, MIXED, 2, 2)
CUT, WRONG, LONELY = Cell(8, 4), Cell(8, 4, "pipeline", 2, 9), Cell(16, 1, "ddp", 2)


def figures(rate, peak=100, **more):
    return {"rate": rate, "peak": peak, "memory": peak, "payload": 8, **more}


@pytest.fixture
def benchmark():
    """Three rounds: in each the machine has another speed. One cell is impossible, another has no one process."""
    made = GridBenchmark(["--policies", "ddp", "--chunks", "1,4", "--batch-sizes", "8,16"])
    made.found = {
        FIRST: [figures(rate) for rate in (40.0, 4.0, 20.0)],
        TWO: [figures(rate, **{"planned peak": 50}) for rate in (80.0, 16.0, 80.0)],
        FOUR: [figures(rate, 70, bubble=0.5) for rate in (50.0, 5.0, 25.0)],
        CUT: [figures(rate, 50) for rate in (80.0, 8.0, 40.0)],
        WRONG: [],
        LONELY: [figures(1.0)] * 3,
    }
    made.why = {WRONG: "refused: 9 stages are many"}
    return made


def test_a_cell_is_planned_as_it_is_played():
    """Parts of the batch need less memory at a time; a pipeline moves less than two whole copies do."""
    settings = {"generator_blocks": 4, "width": 48}
    plans = {
        (strategy, parts): planned(grid.BLOCKS, settings, Cell(8, parts, strategy, 1 + (strategy != ONE)))
        for strategy, parts in ((ONE, 1), (ONE, 4), ("ddp", 1), (MIXED, 1))
    }
    peaks, payloads = ({cell: plan[f"planned {what}"] for cell, plan in plans.items()} for what in ("peak", "payload"))
    assert peaks[ONE, 4] < peaks[ONE, 1] and payloads[ONE, 1] == 0
    assert payloads["ddp", 1] > payloads[MIXED, 1] > 0
    assert planned(grid.BLOCKS, settings, Cell(8, 4, "pipeline", 3)) == {}


def test_the_file_has_all_of_it(benchmark, tmp_path):
    benchmark.write_csv(tmp_path / "grid.csv")
    rows = list(csv.DictReader((tmp_path / "grid.csv").open()))
    assert len(rows) == 6
    assert list(rows[0])[:6] == ["batch_size", "parts", "strategy", "processes", "stages", "of_one"]
    assert rows[2]["strategy"] == MIXED and rows[2]["payload_bytes"] == "8"
    names = "pictures_per_second", "of_one_least", "of_one", "of_one_most", "memory_of_one", "planned_peak_bytes"
    two, four, lonely = ([rows[number][name] for name in names] for number in (1, 2, 5))
    assert two == ["80.0000", "2.0000", "4.0000", "4.0000", "1.0000", "50"]  # each round is compared with one process
    assert four == ["25.0000", "1.2500", "1.2500", "1.2500", "0.7000", ""]
    assert lonely == ["1.0000", "", "", "", "", ""]
    assert rows[4]["why_not"] == "refused: 9 stages are many" and rows[4]["of_one"] == rows[4]["payload_bytes"] == ""
    assert all(None not in row and None not in row.values() for row in rows)
