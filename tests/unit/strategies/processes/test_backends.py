"""The backend that a person has named."""

import pytest
import torch.distributed as dist

from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.support.parity import trainer


@pytest.mark.parametrize("name", ["mpi", "cpu:mpi", "smoke"])
def test_what_torch_lacks_is_refused(name):
    word = name.rpartition(":")[2]
    with pytest.raises(UserError, match=f"has no backend '{word}' here, but gloo.*; type gloo") as refusal:
        PhaseStrategy(process_group_backend=name)
    assert ("built on a machine with MPI" in str(refusal.value)) == (word == "mpi")


def test_nccl_is_refused_on_the_cpu(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    with pytest.raises(UserError, match="nccl communicates between GPUs only, and ranks compute on cpu; type gloo"):
        trainer(PhaseStrategy(process_group_backend="nccl"), 2, 1)
    trainer(PhaseStrategy(process_group_backend="nccl"), 1, 1)  # one rank communicates with nobody


def test_a_torch_with_mpi_is_asked_for_a_store_too(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    for name, given in (("mpi", "cpu:mpi,cuda:mpi"), ("gloo", "gloo"), (None, "gloo")):
        made = trainer(PhaseStrategy(process_group_backend=name), 2, 1)
        assert made.strategy._get_process_group_backend() == given
