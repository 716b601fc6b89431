"""The augmentation equals the published one, follows the sample, and its probability moves as published."""

import pytest
import torch

from gan import noise
from gan.files.errors import UserError
from nets import ada
from nets.ada import COINS, NORMAL, PIPES, UNIFORM, Ada, Augmentation
from tests.support import families

ALONE = tuple(PIPES["bgcfnc"])
ABOUT = dict(rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def golden():
    return families.load("augment.pt")


@pytest.fixture
def pictures():
    torch.manual_seed(0)
    return torch.rand(8, 3, 8, 8, dtype=torch.float64) * 2 - 1


def compared(golden, wanted, pipe, p, draws, name="image") -> float:
    """The largest difference of pictures and gradients, in full and as sizes of each sample."""
    settings = golden["settings"]
    recipe = families.Recipe(settings["seed"])
    batch, height, width = settings["batch"], settings["height"], settings["width"]
    shape = {"wide": (2, 3, 24, 40), "gray": (batch, 1, height, width)}.get(name, (batch, 3, height, width))
    image = recipe.uniform(name, *shape, low=-1).requires_grad_()
    probe = recipe.normal("probe" if name == "image" else f"{name}_probe", *shape)
    with families.drawing(draws(recipe, shape)):
        output = Augmentation(pipe, p).double()(image)
    (gradient,) = torch.autograd.grad((output * probe).sum(), image)
    step = settings["stride"] if "grad" in wanted and wanted["grad"].shape[-1] < width else 1
    found = {
        "each": [families.size(each) for each in output.detach()],
        "grad_each": [families.size(each) for each in gradient],
        "image": output.detach() if "image" in wanted and wanted["image"].ndim == 4 else output[0, :, ::step, ::step],
        "grad": gradient[0, :, ::step, ::step],
    }
    return max(families.difference(found[key], wanted[key]) for key in wanted.keys() & found.keys())


def drawn(prefix, noisy):
    def draws(recipe, shape):
        return *recipe.augmentation(prefix, shape[0]), *[recipe.normal(prefix + "noise.map", *shape)] * noisy

    return draws


def of_percentile(percentile, noisy):
    """Every sample gets the value of this percentile."""

    def draws(recipe, shape):
        uniform = torch.full((shape[0], len(COINS) + len(UNIFORM)), percentile, dtype=torch.float64)
        uniform[:, : len(COINS)] = torch.tensor([float(coin == "rotate.post") for coin in COINS])
        normal = torch.full((shape[0], len(NORMAL)), 2 * percentile - 1, dtype=torch.float64)
        normal[:, NORMAL.index("noise")] = percentile
        return uniform, normal.erfinv(), *[recipe.normal("noise.map", *shape)] * noisy

    return draws


@pytest.mark.parametrize("name", [*ALONE, "bgc", "bgcfnc"])
def test_each_change_equals_the_published_one(golden, monkeypatch, name):
    if name in ALONE:
        monkeypatch.setitem(PIPES, name, {name: 1.0})
    every = golden["alone"] | golden["together"]
    for wanted, percentile in zip(every[name], golden["settings"]["percentiles"], strict=True):
        assert compared(golden, wanted, name, 1.0, of_percentile(percentile, "noise" in PIPES[name])) < 1e-9


@pytest.mark.parametrize("name", ["bgc", "bgcfnc", "r3gan", "wide", "gray", "never"])
def test_random_changes_equal_the_published_ones(golden, name):
    pipe = name if name in PIPES else "bgcfnc"
    for number, wanted in enumerate(golden["drawn"][name] if name in golden["drawn"] else [golden[name]]):
        prefix = f"{name}." if name in ("wide", "gray") else f"draw{number}."
        p = 0.0 if name == "never" else golden["settings"]["p"]
        image = name if name in ("wide", "gray") else "image"
        assert compared(golden, wanted, pipe, p, drawn(prefix, pipe == "bgcfnc"), image) < 1e-9


def placed(augmentation, pictures, first=0):
    with noise.at(noise.Place(("test",), first, len(pictures), 8)):
        return augmentation(pictures)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_sample_looks_the_same_in_every_batch_with_the_same_margin(pictures, channels, monkeypatch):
    monkeypatch.setattr(ada, "_margins", lambda x, *_: ([5, 7], [5, 7]))
    pictures = torch.cat([pictures, -pictures], 1)[:, :channels, :, :6]
    pipe = Augmentation("bgcfnc", 0.7)
    halves = placed(pipe, pictures[:4]), placed(pipe, pictures[4:], first=4)
    torch.testing.assert_close(torch.cat(halves), placed(pipe, pictures), **ABOUT)


def test_what_it_cannot_change_is_refused(pictures):
    with pytest.raises(UserError, match="blit"):
        Augmentation("all")
    with pytest.raises(UserError, match="2 channels"):
        Augmentation("bgc")(pictures[:, :2])


def test_the_probability_moves_by_the_number_of_pictures_and_has_no_ceiling():
    control = Ada(target=0.6, images=64)
    steps = [(16, 16), (13, 16), (12, 16), (32, 32), *[(16, 16)] * 3]  # the mean signs 1, 0.625, 0.5, 1
    found = []
    for positive, count in steps:
        control.adjust(torch.tensor(positive), torch.tensor(count), 16)
        found.append(control.p.item())
    assert found == [0.25, 0.5, 0.25, 0.5, 0.75, 1.0, 1.25]
    for _ in range(6):
        control.adjust(torch.tensor(0), torch.tensor(16), 16)
    assert control.p == 0
    assert "p" in control.state_dict()
