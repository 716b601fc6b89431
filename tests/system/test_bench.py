"""The benchmarks: the command that finds them, the tables of each, and the figures in them."""

import csv
import re
import time

import pytest
import torch
import torch.distributed as dist

from gan.bench import __main__ as bench
from gan.bench import peers, sean
from gan.bench.peers import Peer, PeersBenchmark
from gan.bench.sean import SeanBenchmark
from gan.bench.task import alternate, weights
from gan.files.errors import UserError
from strategies.policies import POLICIES

slow = pytest.mark.slow


class Echo:
    def __init__(self, argv):
        if not argv:
            raise UserError("no")
        self.argv = argv

    def main(self):
        return len(self.argv)


def test_the_benchmark_of_that_name_gets_the_rest_and_what_a_user_can_mend_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(bench.BENCHMARKS, "sean", Echo)
    assert [bench.main(["sean", *rest]) for rest in (["--size", "8"], ["--size"], [])] == [2, 1, 2]
    assert capsys.readouterr().err == "error: no\n"


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2)])
def test_it_says_what_there_is(argv, code, capsys):
    assert bench.main(argv) == code
    said = capsys.readouterr().out
    assert "usage: python -m gan.bench NAME" in said
    for name, benchmark in bench.BENCHMARKS.items():
        assert f"  {name} " in said and benchmark.about.splitlines()[0] in said


# ---- grid ----


@slow
def test_the_grid_prints_and_writes_every_cell(capsys, tmp_path):
    tiny = "--width 4 --generator-blocks 4 --discriminator-blocks 1 --size 4 --rounds 1 --steps 2 --warm 2"
    mixed = "generator=pipeline,*=ddp"
    cells = ("--batch-sizes", "8", "--policies", "ddp", mixed, "--chunks", "2,3", "--stages", "2,9")
    assert bench.main(["grid", *tiny.split(), *cells, "--out", str(tmp_path)]) == 0
    assert "generator=pipeline+stages:2+chunks:2,*=ddp on 2, 8 in 2 parts: " in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "grid.csv").open()))
    by_cell = {(row["strategy"], row["parts"], row["stages"]): row for row in rows}
    assert len(by_cell) == len(rows) == 2 * 4
    alone, ddp, staged = (by_cell[cell] for cell in (("one process", "2", ""), ("ddp", "2", ""), (mixed, "2", "2")))
    for row in (alone, ddp, staged):
        assert float(row["of_one"]) > 0 and float(row["pictures_per_second"]) > 0 and row["why_not"] == ""
    assert float(alone["of_one"]) == 1 and alone["payload_bytes"] == "0"
    assert int(ddp["payload_bytes"]) > 0 and float(staged["bubble"]) == 0.3333
    assert "can be cut into 6 stages, and there are 2 ranks" in by_cell[mixed, "2", "9"]["why_not"]
    assert "batch of 8 does not divide into 3 micro-batches" in by_cell["one process", "3", ""]["why_not"]
    assert "do not divide into 3 chunks" in by_cell[mixed, "3", "2"]["why_not"]
    assert (tmp_path / "grid.png").stat().st_size > 10_000


# ---- peers ----


TINY = ["--width=8", "--batch-size=8", "--rounds=2", "--steps=2"]
NUMBERS = (64 * 8 + 8) + 2 * (8 * 8 + 8) + (8 * 64 + 64) + (64 * 8 + 8) + 2 * (8 * 8 + 8) + (8 + 1)  # in both networks


def measured(way, needs=()):
    """The figures of a peer on two ranks, or what the table says in their place."""
    benchmark = PeersBenchmark([*TINY, "--limit=60"])
    cell = "plain", Peer("mine", way, needs)
    benchmark.cells = lambda: [cell]
    benchmark.play()
    return benchmark.why.get(cell) or benchmark.found[cell][0]


def deaf(task):
    """The control: the loop by hand without its synchronisation."""
    networks = task.networks()
    alternate(task, networks, networks, task.adams(*networks))
    return weights(*networks)


def raises(task):
    if task.rank == 1:
        raise RuntimeError("rank 1 has had enough\nand says more")
    dist.barrier()  # waits for ever


@slow
def test_a_peer_without_synchronisation_is_wrong():
    result = measured(deaf)
    assert result["verdict"] == "WRONG" and result["difference"] > 1e-4
    assert result["payload, kB"] == 0 and result["of by hand"] > 0


@slow
def test_a_peer_that_raises_is_told_by_its_first_line():
    began = time.monotonic()
    assert measured(raises) == "fails: RuntimeError: rank 1 has had enough"
    assert time.monotonic() - began < 45


def test_a_peer_that_is_not_installed_is_skipped():
    assert measured(deaf, ("torch", "not_there", "nor_this")) == "skipped: not_there and nor_this not installed"


@slow
def test_it_prints_a_line_for_every_peer_that_is_always_there(capsys):
    assert PeersBenchmark([*TINY, "--only", "torch", "Lightning", "ours, ddp", "--games", "r1"]).main() == 0
    said = capsys.readouterr().out
    assert "2 ranks on cpu, of one thread each, three hidden layers of 8, batch 8" in said
    lines = [re.split("  +", line) for line in said.splitlines() if line.startswith("r1  ")]
    lines = {title: rest for _, title, *rest in lines}
    for title in ("torch, by hand", "torch, DDP", "ours, ddp"):
        verdict, difference, *_, moved = lines[title]
        assert (verdict, moved) == ("exact", f"{4 * NUMBERS / 1000:.1f}") and float(difference) < 1e-10
    assert lines["torch, FSDP2 kept gathered"][0] == "exact"
    assert re.search(r"^\(\d\) fails: RuntimeError: It looks like your LightningModule has param", said, re.MULTILINE)
    assert lines["Lightning ddp"][0].startswith("see (")
    verdict, *_, moved = lines["Lightning ddp_find_unused_parameters_true"]
    assert verdict == "exact" and float(moved) > 1.9 * 4 * NUMBERS / 1000  # it reduces both networks in both turns


def test_every_peer_is_named_once_and_so_is_every_policy_of_ours():
    titles = [peer.title for peer in peers.peers()]
    assert len(set(titles)) == len(titles) and max(map(len, titles)) < 44
    several = [f"ours, {name}" for name, policy in POLICIES.items() if policy.max_ranks != 1 and name != "dp"]
    assert [title for title in titles if title.startswith("ours")] == several


# ---- sean ----


WAYS = "the plain reference", "ours", "ours, nothing recomputed"
OF_SEAN = ["--size", "32", "--batches", "2", "--repeats", "1", "--width", "2", "--hidden", "3", "--style", "4"]


@slow
def test_every_kind_of_mask_is_painted_alike_in_every_way(capsys):
    assert SeanBenchmark(OF_SEAN).main() == 0
    said = capsys.readouterr().out
    for kind in sean.MASKS:
        for way in WAYS:
            row = rf"^{kind} +2  {way} +[\d.]+ +([\d.]+) +\d+ +([\d.]+) +(\S+)$"
            speed, share, apart = map(float, re.search(row, said, re.MULTILINE).groups())
            assert apart < 1e-4 and (way != WAYS[0] or share == speed == 1)


@slow
@pytest.mark.parametrize("kind", sean.MASKS)
def test_what_sean_keeps_is_at_most_half(kind):
    """Bytes do not depend on the machine. It has a quarter of the published widths, half the size and two pictures."""
    sizes = {"size": 128, "labels": 19, "width": 16, "hidden": 32, "style": 128}
    planes, codes = sean.masks_of(kind, 2, 128, 19), torch.randn(2, 19, 128)
    kept = {}
    for way in WAYS:
        net = sean.painter(way, sizes, torch.device("cpu"))
        with sean.keeping(net.parameters()) as count:
            net(planes, codes)
        kept[way] = sum(count.values())
    assert kept["ours"] <= 0.5 * kept[WAYS[0]] and kept["ours"] < kept[WAYS[2]] < kept[WAYS[0]]


@slow
def test_the_whole_step_is_measured_in_both_ways(capsys):
    """In processes of their own, from the same weights: their first losses are the same."""
    sizes = "--whole --repeats 1 --size 64 --batches 1 --width 4 --hidden 8 --style 16"
    assert SeanBenchmark(sizes.split()).main() == 0
    said = capsys.readouterr().out
    assert re.search(r"whole step at 64 px, on \d+ CPU threads; a plain convolution has \d+ GFLOP/s", said)
    reference, ours = (re.split("  +", line) for line in said.splitlines() if line.startswith("faces  "))
    assert (reference[2], ours[2]) == WAYS[:2]
    for row in (reference, ours):
        seconds, generator, discriminator = map(float, row[3:6])
        assert seconds == pytest.approx(generator + discriminator, abs=0.011) and float(row[-1]) < 1e-5
    assert float(reference[8]) == 1 and float(ours[8]) < 0.95  # what is kept, by all networks


@slow
def test_without_a_checkout_the_reference_is_named_and_ours_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sean, "REFERENCE", tmp_path / "sean_reference.py")
    monkeypatch.setattr(sean, "in_world", lambda function, *args, device: [function(*args)])
    monkeypatch.setattr(sean, "keep_freed_memory", lambda: True)
    assert SeanBenchmark([*OF_SEAN, "--masks", "blocks"]).main() == 0
    said = capsys.readouterr().out
    assert "sean_reference.py, which only a checkout of this project has" in said
    assert re.search(r"^blocks +2  the plain reference +see \(1\)$", said, re.MULTILINE)
    assert re.search(r"^blocks +2  ours +[\d.]+ +\d+$", said, re.MULTILINE)  # seconds, and what it keeps
