import pytest
import torch

from gan import later


def test_outside_of_a_phase_it_is_read_at_once():
    found = []
    later.read(torch.tensor([1.0, 2.0]), found.extend)
    assert found == [1, 2]


def test_together_it_is_read_once_in_the_order_of_the_questions(monkeypatch):
    found, reads, tolist = [], [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda values: reads.append(values) or tolist(values))
    with later.together():
        for values in (torch.tensor([0.1, float("nan")]), torch.tensor([7, 2**24]), torch.tensor([True])):
            later.read(values, found.append)
        later.read(torch.tensor([1e-300], dtype=torch.float64), found.append)
        assert not found
        later.now()
        assert len(found) == 4
    assert len(reads) == 1
    assert found[1:] == [[7, 2**24], [1], [1e-300]]
    assert found[0][0] == torch.tensor(0.1).item() and found[0][1] != found[0][1]


def test_halves_do_not_round_whole_numbers():
    found = []
    with later.together():
        later.read(torch.tensor([0.5], dtype=torch.bfloat16), found.extend)
        later.read(torch.tensor([257]), found.extend)
    assert found == [0.5, 257]


def test_the_end_reads_what_is_left_but_not_after_an_error():
    found = []
    with later.together():
        later.read(torch.ones(1), found.extend)
    assert found == [1]
    with pytest.raises(ValueError, match="mine"), later.together():
        later.read(torch.ones(1), found.extend)
        raise ValueError("mine")
    assert found == [1]


def test_what_is_told_may_ask_again():
    found = []
    with later.together():
        later.read(torch.ones(1), lambda _: later.read(torch.zeros(1), found.extend))
        later.now()
        assert not found
        later.now()
        assert found == [0]
