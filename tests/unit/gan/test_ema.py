"""The average of weights."""

import pytest
import torch
from torch import nn

from gan.ema import Ema, half_life


def make(decay=0.9):
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    return net, Ema(dict(net.named_parameters()), decay if callable(decay) else lambda updates: decay)


def test_it_is_the_exponential_average():
    net, ema = make(0.9)
    expected = [weight.detach().clone() for weight in net.parameters()]
    for _ in range(5):
        for weight, mean in zip(net.parameters(), expected, strict=True):
            weight.data += torch.randn_like(weight)
            mean.mul_(0.9).add_(weight.detach(), alpha=0.1)
        ema.update()
    for mean, ours in zip(expected, ema.average, strict=True):
        assert torch.allclose(mean, ours, rtol=0, atol=1e-15)


def test_the_decay_may_depend_on_the_number_of_updates():
    """With n / (n + 1) it is the plain mean of all weights."""
    net, ema = make(lambda n: n / (n + 1))
    seen = []
    for _ in range(5):
        net.weight.data += torch.randn_like(net.weight)
        seen.append(net.weight.detach().clone())
        ema.update()
    assert torch.allclose(ema.average[0], torch.stack(seen).mean(0), rtol=0, atol=1e-15)
    assert ema.updates == 5


def test_a_rank_that_owns_nothing_counts_as_the_others_do():
    ema = Ema({}, lambda updates: 0.9)
    ema.update()
    assert ema.updates == 1


def test_swapping_and_back_is_exact_also_after_an_error():
    net, ema = make()
    net.weight.data += 1
    weight, average = net.weight.detach().clone(), ema.average[0].clone()
    with pytest.raises(KeyError), ema.swapped():
        assert torch.equal(net.weight, average)
        raise KeyError
    assert torch.equal(net.weight, weight)
    assert torch.equal(ema.average[0], average)


def test_its_state_has_the_parameters_names_and_travels():
    net, ema = make()
    net.weight.data += 1
    ema.update()
    other_net, other = make()
    other.load_state_dict(ema.state_dict())
    assert list(ema.state_dict()) == ["weight", "bias"]
    assert torch.equal(other.average[0], ema.average[0])
    assert not torch.equal(other_net.weight, net.weight)


def test_without_a_saved_average_it_starts_at_the_weights():
    net, ema = make()
    net.weight.data += 1
    ema.load_state_dict(None)
    assert torch.equal(ema.average[0], net.weight)


def test_a_half_life_in_images_with_a_beginning():
    decay = half_life(1000, batch_size=50)
    assert decay(0) == decay(99) == pytest.approx(0.5 ** (1 / 20))
    rising = half_life(1000, batch_size=50, ramp_up=0.05)
    assert rising(0) == 0  # the average begins as the weights
    assert rising(200) == pytest.approx(0.5 ** (50 / 500))  # a twentieth of 10,000 images
    assert rising(400) == rising(4000) == pytest.approx(decay(0))
