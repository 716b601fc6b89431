"""The benchmark command finds its benchmarks and lists them."""

import pytest

from gan.bench import command as bench
from gan.files.errors import UserError


class Echo:
    def __init__(self, argv):
        if not argv:
            raise UserError("no")
        self.argv = argv

    def main(self):
        return len(self.argv)


def test_the_benchmark_of_that_name_gets_the_rest(monkeypatch):
    monkeypatch.setitem(bench.BENCHMARKS, "sean", Echo)
    assert bench.main(["sean", "--size", "8"]) == 2
    assert bench.main(["sean", "--size"]) == 1


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2)])
def test_it_says_what_there_is(argv, code, capsys):
    assert bench.main(argv) == code
    said = capsys.readouterr().out
    assert "usage: python -m gan.bench NAME" in said
    for name, benchmark in bench.BENCHMARKS.items():
        assert f"  {name} " in said and benchmark.about.splitlines()[0] in said


def test_a_name_that_there_is_not_is_refused(capsys):
    assert bench.main(["seen"]) == 2
    assert "there is no benchmark 'seen'" in capsys.readouterr().err


def test_what_a_user_can_mend_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(bench.BENCHMARKS, "sean", Echo)
    assert bench.main(["sean"]) == 2
    assert capsys.readouterr().err == "error: no\n"
