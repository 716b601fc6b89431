"""By torch's own functions a sample draws the same numbers, whichever rank and micro-batch it is in."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gan import noise
from strategies.batches.draw_kernels import draws_follow


@pytest.fixture(autouse=True)
def following():
    with draws_follow(torch.device("cpu")):
        yield


def drawn(draw, first, rows, stride=1, total=8, **more):
    """One draw of some rows of a global batch of 8."""
    with noise.at(noise.Place((1,), first, rows, total, stride, **more)):
        return draw(torch.ones(rows, 3))


BY_ROWS = {
    "randn": lambda x: torch.randn(len(x), 5),
    "rand": lambda x: torch.rand((len(x),)),
    "randint": lambda x: torch.randint(0, 100, (len(x), 5)),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal": lambda x: torch.normal(x, 2 * x),
    "normal around 0": lambda x: torch.normal(0.0, x),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, (len(x), 2)),
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.1),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "random_": lambda x: x.random_(),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "bernoulli of one number": lambda x: torch.bernoulli(x, p=0.5),
    "bernoulli_": lambda x: x.bernoulli_(x / 2),
    "poisson": lambda x: torch.poisson(5 * x),
    "gamma": lambda x: torch.distributions.Gamma(x, x, validate_args=False).rsample(),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "multinomial of one row": lambda x: torch.multinomial(torch.ones(50, device=x.device), len(x), replacement=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: nn.Dropout2d()(x[..., None, None].expand(-1, -1, 2, 2)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "distribution": lambda x: torch.distributions.Normal(x, x, validate_args=False).sample(),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_rank_draws_its_own_rows(name):
    draw = BY_ROWS[name]
    whole = drawn(draw, 0, 8)
    assert len(whole[0].unique()) > 1 or len(whole.unique()) > 1
    assert torch.equal(torch.cat([drawn(draw, 0, 4), drawn(draw, 4, 4)]), whole)
    assert torch.equal(drawn(draw, 1, 2, stride=2), whole[1:4:2])  # a micro-batch


@pytest.mark.parametrize("name", [*BY_ROWS, "native_dropout in use"])
def test_a_stand_in_without_values_counts_the_same_draws(name):
    """Between the blocks of a pipeline. What has no stand-in among its arguments is drawn on all ranks."""
    if name == "gamma" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 has no stand-in of a gamma, so a pipeline refuses the draw")
    draw = BY_ROWS.get(name, lambda x: torch.native_dropout(x, 0.5, False)[0])
    places = {device: noise.Place((1,), 0, 4, 8) for device in ("cpu", "meta")}
    for device, place in places.items():
        with noise.at(place):
            draw(torch.ones(4, 3, device=device))
    assert places["meta"].calls == places["cpu"].calls


def test_two_draws_differ_and_torchs_generator_stays_as_it_was():
    before, place = torch.get_rng_state(), noise.Place((1,), 0, 4, 8)
    with noise.at(place):
        one, other = torch.rand(4), torch.rand(4)
    assert not torch.equal(one, other)
    assert [(draw.name, draw.shape, draw.dim) for draw in place.drawn.values()] == [("uniform_", (4,), 0)] * 2
    assert torch.equal(torch.get_rng_state(), before)


BY_GENERATOR = {
    "randn": lambda x, g: torch.randn(len(x), 5, generator=g),
    "randint": lambda x, g: torch.randint(0, 100, (len(x), 5), generator=g),
    "normal": lambda x, g: torch.normal(x, 2 * x, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x / 2, generator=g),
    "uniform_ in float64": lambda x, g: x.double().uniform_(generator=g),
    "two for each sample": lambda x, g: torch.randn(2 * len(x), 5, generator=g),
    "one for all": lambda x, g: torch.randn(5, 2, generator=g),
}


@pytest.mark.parametrize("name", BY_GENERATOR)
def test_ranks_draw_their_rows_by_the_authors_generator_which_moves_on_alike(name):
    """And each micro-batch draws anew, as on one device."""

    def draw(first, rows, stride=1, total=8):
        generator = torch.Generator().manual_seed(1)
        return drawn(lambda x: BY_GENERATOR[name](x, generator), first, rows, stride, total), generator.get_state()

    whole, state = draw(0, 8)
    assert torch.equal(whole, BY_GENERATOR[name](torch.ones(8, 3), torch.Generator().manual_seed(1)))
    halves, micro = [draw(first, 4) for first in (0, 4)], [draw(first, 4, 2, 16) for first in (1, 9)]
    for one, other in (halves, micro):
        assert torch.equal(one[1], state) and torch.equal(other[1], state)
        parts = [each.unflatten(0, (-1, 4)) if len(each) % 4 == 0 else each for each in (one[0], other[0])]
        joined = torch.cat(parts, 1).flatten(0, 1) if len(whole) % 8 == 0 else parts[0]
        assert torch.equal(joined, whole)


def test_a_row_by_row_draw_that_all_share_is_one_devices_whatever_that_takes_it_for():
    def shared(x):
        return torch.poisson(torch.full((8,), 5.0))

    known = {(0, ()): noise.Drawn("poisson", (8,), 2, None)}
    assert torch.equal(drawn(shared, 4, 4, known=known), drawn(shared, 0, 8))
