"""First values of networks on the meta device: each module by its own seed, whoever else is made."""

import copy
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gan import Player
from gan.files.checkpoint import Share
from gan.files.errors import UserError
from gan.making import Making, aside, give_memory, meta, on_meta
from gan.noise import seed_for
from tests.support.hard_games import mlp
from tests.support.meta_games import Judge

CPU = torch.device("cpu")


def network(make=Judge):
    with torch.device("meta"):
        return make()


def made(module, seed=3, names=None, name="net"):
    """The values of a network's tensors, or of those with these names."""
    making = Making(module, [Player(name, module)])
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    values = {key: torch.empty(state[key].shape, dtype=state[key].dtype) for key in names or state}
    making.make({state[key]: Share.whole(value) for key, value in values.items()}, seed, CPU)
    return values


def test_a_module_has_the_values_that_its_constructor_draws_under_its_seed():
    values = made(network(lambda: mlp(4, 6)))
    for name, make in (("0", lambda: nn.Linear(4, 8)), ("2", lambda: nn.Linear(8, 6))):
        torch.manual_seed(seed_for(3, "net", name))
        assert all(torch.equal(values[f"{name}.{key}"], value) for key, value in make().state_dict().items())


def test_they_do_not_depend_on_what_else_is_made():
    whole = made(network())
    assert whole.keys() == dict(Judge().named_parameters()).keys() | dict(Judge().named_buffers()).keys()
    for name, value in whole.items():
        assert torch.equal(made(network(), names=[name])[name], value)
    assert not torch.equal(made(network(), seed=4)["rnn.weight_ih_l0"], whole["rnn.weight_ih_l0"])
    assert not torch.equal(made(network(), name="other")["rnn.weight_ih_l0"], whole["rnn.weight_ih_l0"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_makes_its_ranges(ranks):
    whole, module = made(network()), network()
    making, state = Making(module, [Player("net", module)]), dict(module.named_parameters())
    for rank in range(ranks):
        shares = {}
        for weight in state.values():
            length = -(-weight.numel() // ranks)
            start, stop = min(rank * length, weight.numel()), min((rank + 1) * length, weight.numel())
            shares[weight] = Share(torch.empty(stop - start), weight.shape, start) if start < stop else None
        making.make(shares, 3, CPU)
        for name, weight in state.items():
            if (share := shares[weight]) is not None:
                assert torch.equal(share.tensor, whole[name].reshape(-1)[share.start : share.stop])


def test_what_reaches_into_a_sub_module_is_kept():
    attention = made(network())
    assert attention["attention.out_proj.bias"].abs().sum() == 0
    torch.manual_seed(seed_for(3, "net", "attention.out_proj"))
    assert torch.equal(attention["attention.out_proj.weight"], nn.Linear(6, 6).weight)


def test_generators_are_left_as_they_are():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    made(network())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_tensor_that_gets_memory_stays_the_same_object():
    class Named(nn.Parameter):
        pass

    layer = nn.Linear(2, 3, device="meta")
    layer.weight = Named(layer.weight)
    layer.weight.tag = "mine"
    weight, other = layer.weight, copy.copy(layer)
    give_memory(weight, torch.ones(3, 2))
    assert layer.weight is weight is other.weight
    assert type(weight) is Named and weight.tag == "mine" and weight.requires_grad
    assert torch.equal(weight, torch.ones(3, 2))
    assert on_meta(layer) == [layer.bias]


def test_torchs_rnns_get_memory():
    rnn = network(lambda: nn.GRU(2, 3))
    assert weakref.getweakrefs(rnn.weight_ih_l0)
    with aside(rnn, meta):
        assert rnn.weight_ih_l0 is None
        rnn.cpu()
    for weight in on_meta(rnn):
        give_memory(weight, torch.zeros(weight.shape))
    assert torch.equal(rnn(torch.ones(1, 2))[0], torch.zeros(1, 3))


def test_a_module_that_cannot_make_its_tensors_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.empty(2))
            self.register_buffer("count", torch.empty(1, dtype=torch.int64))

    class Some(Bare):
        def reset_parameters(self):
            self.gain.zero_()

    class Wide(Bare):
        def reset_parameters(self):
            self.gain = nn.Parameter(torch.ones(3))
            self.count.zero_()

    words = {
        Bare: r"player 'net': '1.gain' is on torch.device\('meta'\), and its module \(Bare\) has no reset_param",
        Some: r"player 'net': '1.count' is on torch.device\('meta'\), and reset_parameters\(\) of its module \(Some\)",
        Wide: r"player 'net': '1.gain' is on .* does not make it, in the shape \(2,\)",
    }
    for kind, said in words.items():
        with pytest.raises(UserError, match=said):
            made(network(lambda kind=kind: nn.Sequential(nn.Linear(2, 2), kind())))
    assert made(network(lambda: nn.Sequential(nn.Linear(2, 2), Bare())), names=["0.weight"])  # who asks for no more


def test_weights_that_are_computed_from_others_are_refused():
    def normed():
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))

    with pytest.raises(UserError, match=r"'0.parametrizations.weight.original0' .* \(ParametrizationList\)"):
        made(network(normed))


def test_values_that_are_there_stay():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.scale = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

        def reset_parameters(self):
            self.gain.fill_(1)
            self.scale.fill_(1)

    module = network(Scaled)
    module.scale = nn.Parameter(torch.full((2,), 7.0))
    assert made(module, names=["gain"])["gain"].tolist() == [1, 1]
    assert module.scale.tolist() == [7, 7]
