"""Where the ranks of one host talk: on loopback, which no other host reaches."""

import os
from types import SimpleNamespace

import pytest

from strategies import PhaseStrategy, meeting
from strategies.processes import interface
from strategies.processes.interface import GLOO
from tests.support.parity import trainer
from tests.support.posix import only_on_linux


class Tied(Exception):
    pass


@only_on_linux
@pytest.mark.parametrize(("nodes", "talk"), [(1, ("lo", "127.0.0.1")), (2, ("far0", "10.0.0.7"))])
def test_ranks_of_one_host_talk_on_loopback_whatever_its_name_means(nodes, talk, monkeypatch):
    monkeypatch.setenv(GLOO, "")
    monkeypatch.delenv(GLOO)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setattr(interface, "_interface", {"127.0.0.1": "lo", "10.0.0.7": "far0"}.get)
    monkeypatch.setattr(interface, "own_address", lambda towards: towards)
    monkeypatch.setattr(meeting, "own_name", lambda main: main)
    strategy = trainer(PhaseStrategy("ddp"), 2, 1, num_nodes=nodes).strategy
    strategy.set_world_ranks = lambda: None
    monkeypatch.setattr(meeting.RanksStrategy, "_store", lambda self, rank, size: None)
    told = []

    def tie(store, size, host, advice):
        told.append(host)
        raise Tied

    strategy.lockstep.survivor = SimpleNamespace(tie=tie)
    with pytest.raises(Tied):
        strategy.setup_distributed()
    assert (os.environ[GLOO], *told) == talk
