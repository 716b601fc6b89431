"""Noise follows the sample: rank, micro-batch and copy do not matter, step, phase and call do."""

import copy
import pickle

import pytest
import torch
from torch import nn

from gan import noise
from gan.files.errors import UserError
from gan.noise import Place, seed_for


def at(first, rows, total=8, stride=1, key=(1,), **more):
    return noise.at(Place(key, first, rows, total, stride, **more))


def draw(first, rows, shape=(3,), key=(1, 5, "phase"), calls=1, copies=1):
    with at(first, rows, key=key):
        drawn = [noise.randn((rows * copies, *shape)) for _ in range(calls)]
    return drawn[-1]


def seeded(function, *args):
    torch.manual_seed(3)
    return function(*args)


def test_seeds_are_stable_and_unrelated():
    assert seed_for(1, 2, "x") == 7284216157882031730  # on every machine, in every process
    assert len({seed_for(a, b) for a in range(30) for b in range(30)}) == 900
    assert 0 <= seed_for("anything") < 2**63


# ---- what is drawn ----


def test_draws_of_rows_calls_seeds_steps_and_phases_are_unrelated():
    keys = [(seed, step, phase) for seed in (1, 2) for step in (5, 6) for phase in "dg"]
    drawn = [draw(0, 4, (20_000,), key, calls) for key in keys for calls in (1, 2)]
    x = torch.cat([torch.cat(drawn), draw(0, 4, (20_000,), (1, 5, "phase"), copies=2)[4:]])
    together = (x @ x.T / x.shape[1]).fill_diagonal_(0)
    assert together.abs().max() < 6 / 20_000**0.5
    control = torch.stack([x[0], draw(0, 4, (20_000,), (1, 5, "d"))[0]])
    assert (control[0] * control[1]).mean() > 0.9, "the same place draws the same"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # float64 has the numbers of float32
def test_they_have_the_right_distributions(dtype):
    """Of small draws, of many blocks, and of the first numbers of many seeds."""
    like, many = torch.zeros(0, dtype=dtype), [(2, (2,), 20_000)] * (dtype == torch.float32)
    for rows, shape, times in ((4, (50_000,), 1), (8, (4, 100), 60), *many):
        with at(0, rows, key=(2, "x")):
            normal = torch.stack([noise.randn((rows, *shape), like) for _ in range(times)]).double()
            uniform = torch.stack([noise.rand((rows, *shape), like) for _ in range(times)]).double()
        error = 5 / normal.numel() ** 0.5
        rounding = torch.finfo(dtype).eps
        assert abs(normal.mean()) < error and abs(normal.var() - 1) < 1.5 * error + rounding
        assert abs(normal.pow(4).mean() - 3) < 10 * error + 3 * rounding
        assert abs(uniform.mean() - 0.5) < 0.3 * error + rounding
        assert abs(uniform.var() - 1 / 12) < 0.1 * error + rounding
        assert uniform.min() >= 0 and uniform.max() < 1 + rounding


@pytest.mark.parametrize("width", [1, 7, 300, 5000, 40_000])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_draw_of_any_size_is_cut_into_the_rows_of_ranks_and_micro_batches(width, copies):
    """Blocks of many rows and of one; ranks whose rows begin within a block; every third row."""

    def rows(first, count, stride):
        with at(first, count, 24, stride):
            return noise.rand((copies * count, width)).view(copies, count, width)

    whole = rows(0, 24, 1)
    assert len(whole[..., 0].unique()) == 24 * copies
    for ranks in (2, 3, 8):
        size = 24 // ranks
        assert torch.equal(torch.cat([rows(rank * size, size, 1) for rank in range(ranks)], 1), whole)
    for part in range(3):
        assert torch.equal(rows(12 + part, 4, 3), whole[:, 12 + part : 24 : 3])


def test_integers_lie_in_their_range_and_follow_the_sample():
    def integers(first, rows):
        with at(first, rows):
            return noise.randint(-2, 3, (rows, 500))

    whole = integers(0, 8)
    assert whole.dtype == torch.int64 and whole.unique().tolist() == [-2, -1, 0, 1, 2]
    assert torch.equal(torch.cat([integers(0, 4), integers(4, 4)]), whole)
    with pytest.raises(UserError, match=r"noise.randint\(3, 3\) has no number to draw, because 3 is never drawn"):
        noise.randint(3, 3, (4,))


def test_a_common_draw_is_the_same_for_all_rows_and_another_one_each_time():
    def draws(first):
        with at(first, 4):
            common = [noise.rand(shape, common=True) for shape in ((), (), (3, 2))]
            return [*common, noise.randint(0, 1000, (5,), common=True), noise.randn((4, 2))]

    (*ours, first), (*theirs, last) = draws(0), draws(4)
    assert all(map(torch.equal, ours, theirs)) and ours[0] != ours[1]
    assert not torch.equal(first, last), "the control: a draw that is not common differs"


def test_what_belongs_to_no_sample_is_refused_on_several_ranks():
    with at(0, 4):
        with pytest.raises(UserError, match=r"noise of 3 rows in a phase whose batch has 4: .* type common=True"):
            noise.randn((3, 2))
        with pytest.raises(UserError, match=r"noise without a shape .* type common=True"):
            noise.rand(())
        with pytest.raises(UserError, match=r"which is torch.int64; type like=x.float"):
            noise.randn((4, 2), like=torch.zeros(4, dtype=torch.int64))
    with at(0, 8):
        assert noise.randn((3, 2)).shape == (3, 2)  # on one device any number of rows will do


# ---- draws of networks: what belongs to samples ----


def of_network(place, shape, name="normal_", site=()):
    dim = place.drawn_by_network(place.next_call(), name, shape, site).dim
    assert place.drawn[place.calls - 1].dim == dim
    return dim


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((4, 3), 0), ((16,), 0), ((20,), None), ((3,), None), ((6,), None), ((), None), ((0, 4), None), ((3, 4), None)],
)
def test_without_a_trial_one_row_for_each_sample_or_a_few_are_the_samples(shape, dim):
    assert of_network(Place((1,), 0, 4, 8), shape) == dim


def test_what_a_trial_has_shown_is_kept_where_the_draw_is_the_same():
    one, other = ("loss", 1), ("loss", 2)
    known = {(0, one): noise.Drawn("normal_", (512, 7), 1, 0), (1, other): noise.Drawn("normal_", (8, 3), 1, None)}
    place = Place((1,), 0, 4, 8, known=known)
    asked = ((512, 7), one), ((4, 3), other), ((4, 3), ("loss", 3)), ((512, 8), one), ((16, 7), other)
    assert [of_network(place, shape, site=site) for shape, site in asked] == [0, None, 0, 0, None]
    assert [draw.guessed for draw in place.drawn.values()] == [False, False, True, False, False]
    assert of_network(Place((1,), 0, 4, 8, known=known), (512, 8)) is None  # of no site, and another than the trial's
    assert of_network(Place((1,), 0, 4, 8, known=known), (512, 7), "uniform_", one) is None


def test_samples_further_back_are_so_at_any_time_and_in_later_calls():
    place = Place((1,), 0, 4, 8, known={(0, ()): noise.Drawn("bernoulli_", (4, 2, 3), 2, 1)})
    shapes = (4, 4, 3), (9, 4, 3), (5, 8, 7), (4, 3, 3), (4, 4)
    assert [of_network(place, shape, "bernoulli_") for shape in shapes] == [1, 1, 1, None, 0]


# ---- dropout ----


def dropped(layer, x, first=0):
    with at(first, len(x)):
        return layer(x)


def halves(layer, x):
    return torch.cat([dropped(layer, x[:4]), dropped(layer, x[4:], 4)])


def test_dropout_follows_the_sample_and_scales_as_torchs_which_does_not_follow():
    plain, layer, x = nn.Dropout(0.3), nn.Dropout(0.3), torch.ones(8, 40, 50, dtype=torch.float64)
    noise.convert_dropout(layer)
    whole = dropped(layer, x)
    assert isinstance(layer, noise.Dropout) and torch.equal(halves(layer, x), whole)
    assert not torch.equal(halves(plain, x), dropped(plain, x)), "the control"
    assert whole.unique().tolist() == [0, pytest.approx(1 / 0.7)]
    assert abs((whole == 0).double().mean() - 0.3) < 0.03
    assert torch.equal(dropped(layer, x.float()) == 0, whole == 0), "in every precision the same"
    # Outside a phase, and in evaluation, it is torch's own.
    assert torch.equal(seeded(plain, x), seeded(layer, x))
    layer.eval()
    assert torch.equal(dropped(layer, x), x)


def test_dropout_in_place_and_what_it_refuses():
    x = torch.ones(8, 5)
    assert dropped(noise.Dropout(0.5, inplace=True), x) is x and (x == 0).any()
    with pytest.raises(UserError, match=r"p=1.5 is not between 0 and 1"):
        dropped(lambda x: noise.dropout(x, 1.5), x)


# ---- the count of draws, and their form ----


def test_whoever_goes_back_finds_its_numbers():
    with at(0, 4, calls=9):
        found = [noise.randn((4, 3)) for _ in range(5)]
        for place in (noise.here(), copy.deepcopy(noise.here()), pickle.loads(pickle.dumps(noise.here()))):
            with noise.at(place):
                noise.go_to(place, 11)
                assert torch.equal(noise.randn((4, 3)), found[2])
                with torch.inference_mode():
                    assert torch.equal(noise.randn((4, 3)), found[3])
                assert torch.equal(noise.randn((4, 3)), found[4])
