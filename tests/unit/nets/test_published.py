"""Published state dicts in and out, and the golden figures that the published networks make of them."""

from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from gan.files.errors import UserError
from gan.losses import feature_matching, hinge_discriminator, hinge_generator
from nets.blocks import onehot
from nets.discriminator import MultiScaleDiscriminator
from nets.published import export_discriminator, export_generator, load_discriminator, load_generator
from nets.sean.generator import SeanGenerator, StyleEncoder
from tests.support import families, oracle

TOLERANCE, ZERO = 1e-9, 1e-12


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    return families.load("sean_small.pt")


def recipe(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    found = families.weights(shapes, seed)
    for key in shapes:
        if key.endswith("noise_var"):
            found[key].zero_()
        if key.endswith(("blending_gamma", "blending_beta")):
            found[key] = families.Recipe(seed).normal(key, *shapes[key])
    return found


def inputs(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Picture and label map; region 7 is absent everywhere."""
    rng = numpy.random.default_rng(settings["seed"] + 2)
    batch, crop = settings["batch"], settings["crop"]
    cells = rng.integers(0, 19, (batch, crop // 16, crop // 16))
    cells[cells == 7] = 3
    label = numpy.kron(cells, numpy.ones((1, 16, 16), dtype=numpy.int64))
    image = rng.uniform(-1, 1, (batch, 3, crop, crop))
    return torch.from_numpy(image), torch.from_numpy(label)


@pytest.fixture(scope="module")
def figures(wanted) -> dict[str, Any]:
    """What our networks make of the recipe, under the golden keys."""
    settings = wanted["settings"]
    image, label = inputs(settings)
    mask = onehot(label, settings["labels"], image)
    judge_weights = recipe(wanted["discriminator_keys"], settings["seed"] + 1)
    weights = recipe(wanted["generator_keys"], settings["seed"])
    encoder, generator = load_generator(weights, settings["upsampling"])
    discriminator = load_discriminator(judge_weights)
    found: dict[str, Any] = {}

    def judged(fake: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        both = torch.cat([torch.cat([mask, fake], 1), torch.cat([mask, image], 1)])
        return [[tuple(features.chunk(2)) for features in scale] for scale in discriminator(both)]

    # Evaluation.
    for net in (encoder, generator, discriminator):
        net.eval()
    with torch.no_grad():
        found["style_codes"] = encoder(image, mask)
        found["eval_image"] = generator(mask, found["style_codes"])
        found["eval_scores_fake"] = [scale[-1][0] for scale in judged(found["eval_image"])]

    # The generator's turn.
    for net in (encoder, generator, discriminator):
        net.train()
    fake = generator(mask, encoder(image, mask))
    pairs = judged(fake)
    ours, theirs = ([[pair[side] for pair in scale] for scale in pairs] for side in (0, 1))
    found["train_image"] = fake.detach()
    found["g_gan"] = torch.stack([hinge_generator(scale[-1]) for scale in ours]).mean()
    found["g_feat"] = 10 * feature_matching(theirs, ours)
    (found["g_gan"] + found["g_feat"]).backward()
    found["g_grads"] = oracle.gradients(encoder, "Zencoder.") | oracle.gradients(generator)

    # The discriminator's turn, on the same pictures and from the recipe's weights again.
    discriminator = load_discriminator(judge_weights)
    pairs = judged(found["train_image"])
    nothing = torch.tensor(1.0)
    found["d_fake"] = torch.stack([hinge_discriminator(nothing, scale[-1][0]) for scale in pairs]).mean()
    found["d_real"] = torch.stack([hinge_discriminator(scale[-1][1], -nothing) for scale in pairs]).mean()
    (found["d_fake"] + found["d_real"]).backward()
    found["d_grads"] = oracle.gradients(discriminator)
    return found


def deviation(found: Any, wanted: Any) -> float:
    """The largest relative deviation, tensor by tensor; absolute where the figure is zero up to rounding."""
    if isinstance(wanted, dict):
        # The scale of the random noise is not among the figures.
        assert {key for key in found if not key.endswith("noise_var")} == wanted.keys()
        return max(
            deviation(size, torch.tensor(figure, dtype=torch.double))
            for key, figures in wanted.items()
            for size, figure in zip((found[key].norm(), found[key].sum()), figures or [0.0, 0.0], strict=True)
        )
    if isinstance(wanted, list):
        return max(deviation(one, other) for one, other in zip(found, wanted, strict=True))
    difference = (found.detach() - wanted.reshape(found.shape)).abs().max().item()
    largest = wanted.abs().max().item()
    return difference / (largest if largest > ZERO else 1.0)


def test_the_networks_compute_the_golden_figures_and_gradients_of_exactly_zero(figures, wanted):
    """The published gradients of a region in no picture are none, and of biases that a norm cancels rounding noise."""
    names = wanted.keys() - {"settings", "generator_keys", "discriminator_keys"}
    assert figures.keys() == names
    assert {key: found for key in names if (found := deviation(figures[key], wanted[key])) >= TOLERANCE} == {}
    golden = wanted["g_grads"].items()
    absent = [key for key, size in golden if size is None and "fc_mu" in key]
    cancelled = [key for key, size in golden if size is not None and size[0] < ZERO and "ace_s" not in key]
    assert len(absent) == 96 and len(cancelled) == 18
    assert all(figures["g_grads"][key].count_nonzero() == 0 for key in absent + cancelled)


def narrow(upsamplings: int = 5) -> tuple[StyleEncoder, SeanGenerator]:
    encoder, generator = StyleEncoder(5, 3), SeanGenerator(4, 5, 2, 6, upsamplings)
    return oracle.scramble(encoder, 0), oracle.scramble(generator, 1)


same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize(("upsampling", "dtype"), [("normal", torch.float32), ("more", torch.float64)])
def test_a_generator_goes_out_and_comes_back(upsampling, dtype):
    encoder, generator = (net.to(dtype) for net in narrow({"normal": 5, "more": 6}[upsampling]))
    state = export_generator(encoder, generator)
    dead = [key for key in state if "Spade.param_free_norm" in key or ("up_3" in key and "blending" in key)]
    assert len(dead) == 18 * 3 + 3 * 2
    assert all(state[key].count_nonzero() == (state[key].numel() if "var" in key else 0) for key in dead)
    before, random_state = {key: tensor.clone() for key, tensor in state.items()}, torch.get_rng_state()
    back = load_generator(state, upsampling)
    assert torch.equal(torch.get_rng_state(), random_state)
    for net, one in zip((encoder, generator), back, strict=True):
        same(net.state_dict(), one.state_dict())
        assert all(parameter.requires_grad for parameter in one.parameters())
        assert one.training
    assert back[1].upsamplings == generator.upsamplings
    exported = export_generator(*back)
    with torch.no_grad():
        for net in back:
            for tensor in (*net.parameters(), *net.buffers()):
                tensor += 1
    same(state, before)  # nothing shares memory
    same(exported, before)


def test_a_discriminator_goes_out_and_comes_back():
    net = oracle.scramble(MultiScaleDiscriminator(6, 4, 4, 3), 0)
    state = export_discriminator(net)
    back = load_discriminator(state)
    same(back.state_dict(), net.state_dict())
    same(export_discriminator(back), state)


def test_a_weight_that_does_not_fit_is_named():
    state = export_generator(*narrow())
    whole = "state dict of SEAN's latest_net_"
    missing = {key: tensor for key, tensor in state.items() if "fc_mu3" not in key}
    for wrong, words in (
        (missing, rf"{whole}G.pth has .*: G_middle_0.ace_0.fc_mu3.bias is only here"),
        (state | {"up_0.conv_0.bias": torch.zeros(7)}, rf"{whole}G.* up_0.conv_0.bias is \[7\] there and \[16\] here"),
        (state | {"fc.weight": torch.zeros(7)}, r"no state dict of .*G.pth: it has no convolution 'fc.weight'"),
    ):
        with pytest.raises(UserError, match=words):
            load_generator(wrong)
    judge = export_discriminator(MultiScaleDiscriminator(6, 4))
    del judge["discriminator_1.model1.0.0.weight_u"]
    with pytest.raises(UserError, match=rf"{whole}D.pth has .*: discriminator_1.model1.0.0.weight_u is only here"):
        load_discriminator(judge)
    for load, other in ((load_generator, judge), (load_discriminator, state)):
        with pytest.raises(UserError, match="this is no state dict of SEAN's latest_net_"):
            load(other)
    with pytest.raises(UserError, match="unknown upsampling 'most'; known: normal, more"):
        load_generator(state, "most")


def test_what_the_published_networks_are_not_is_not_exported():
    encoder, generator = narrow()
    with pytest.raises(UserError, match=r"upsamplings=3, and the published one has 5 \(normal\) or 6 \(more\)"):
        export_generator(encoder, SeanGenerator(4, 5, 2, 6, 3))
    with pytest.raises(UserError, match="normalise=True"):
        export_generator(StyleEncoder(5, 3, normalise=False), generator)
