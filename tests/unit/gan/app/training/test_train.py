"""What is said before a training begins."""

from types import SimpleNamespace

import pytest
from jsonargparse import Namespace
from torch import nn

from gan.app.run.folder import RunFolder
from gan.app.training import train


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"size": None, "width": None}, "a CPU; a small --size and --width would show sooner"),
        ({"width": None}, "a CPU; a small --width would show"),  # sounds have no size
        ({}, "take long on a CPU\n"),
    ],
)
def test_large_networks_on_a_cpu_are_named_with_options_that_the_run_has(known, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train, "MANY", 1)
    run = SimpleNamespace(game=nn.Linear(2, 2), max_steps=1, batch_size=1)
    settings = Namespace(run="mine", strategy="ddp", resume=None, **known)
    train.begin(settings, run, SimpleNamespace(kind="cpu", words="1 CPU process"), RunFolder(tmp_path), None)
    assert said in capsys.readouterr().out
