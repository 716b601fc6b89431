"""The benchmark command finds its benchmarks and lists them; the grid's table and file."""

import csv

import pytest

from gan.bench import __main__ as bench
from gan.files.errors import UserError


class Echo:
    def __init__(self, argv):
        if not argv:
            raise UserError("no")
        self.argv = argv

    def main(self):
        return len(self.argv)


def test_the_benchmark_of_that_name_gets_the_rest_and_what_a_user_can_mend_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(bench.BENCHMARKS, "sean", Echo)
    assert bench.main(["sean", "--size", "8"]) == 2
    assert bench.main(["sean", "--size"]) == 1
    assert bench.main(["sean"]) == 2
    assert capsys.readouterr().err == "error: no\n"


def test_it_says_what_there_is(capsys):
    for argv, code in ((["--help"], 0), ([], 2)):
        assert bench.main(argv) == code
        said = capsys.readouterr().out
        assert "usage: python -m gan.bench NAME" in said
        for name, benchmark in bench.BENCHMARKS.items():
            assert f"  {name} " in said and benchmark.about.splitlines()[0] in said
    assert bench.main(["seen"]) == 2
    assert "there is no benchmark 'seen'" in capsys.readouterr().err


# ---- grid ----


TINY = ("--width", "4", "--generator-blocks", "4", "--discriminator-blocks", "1", "--size", "4")
FEW = ("--rounds", "1", "--steps", "2", "--warm", "2", "--batch-sizes", "8")


@pytest.mark.slow
def test_it_prints_and_writes_every_cell(capsys, tmp_path):
    mixed = "generator=pipeline,*=ddp"
    cells = ("--policies", "ddp", mixed, "--chunks", "2,3", "--stages", "2,9")
    assert bench.main(["grid", *TINY, *FEW, *cells, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "generator=pipeline+stages:2+chunks:2,*=ddp on 2, 8 in 2 parts: " in said
    rows = list(csv.DictReader((tmp_path / "out" / "grid.csv").open()))
    by_cell = {(row["strategy"], row["parts"], row["stages"]): row for row in rows}
    assert len(by_cell) == len(rows) == 2 * 4
    for row in (by_cell["one process", "2", ""], by_cell["ddp", "2", ""], by_cell[mixed, "2", "2"]):
        assert float(row["of_one"]) > 0 and float(row["pictures_per_second"]) > 0 and row["why_not"] == ""
        assert int(row["peak_memory_bytes"]) >= 0 and float(row["memory_of_one"]) >= 0
    assert float(by_cell["one process", "2", ""]["of_one"]) == 1
    assert by_cell["one process", "2", ""]["payload_bytes"] == "0"
    assert int(by_cell["ddp", "2", ""]["payload_bytes"]) > 0
    assert float(by_cell[mixed, "2", "2"]["bubble"]) == 0.3333
    assert "can be cut into 6 stages, and there are 2 ranks" in by_cell[mixed, "2", "9"]["why_not"]
    assert "batch of 8 does not divide into 3 micro-batches" in by_cell["one process", "3", ""]["why_not"]
    assert "do not divide into 3 chunks" in by_cell[mixed, "3", "2"]["why_not"]
    assert (tmp_path / "out" / "grid.png").stat().st_size > 10_000

    # Of 8 samples, 4 maps of 4 x 4 numbers go in, 4 over the cut and 3 out, each number of 4 bytes. The discriminator's
    # turn has this once, the generator's also has gradients of what came out and of the cut. ddp adds those of weights.
    maps = 8 * 4 * 4 * 4
    discriminator = 4 * ((27 * 4 + 4) + 2 * (36 * 4 + 4) + (4 * 16 + 1))
    least = 2 * (4 + 4 + 3) * maps + (4 + 3) * maps + discriminator
    assert least < int(by_cell[mixed, "2", "2"]["payload_bytes"]) < least + 3000
