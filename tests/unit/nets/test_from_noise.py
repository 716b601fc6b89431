"""Networks from noise or from codes."""

import pytest
import torch
from torch import nn

from nets.biggan import BigDiscriminator, BigGenerator
from nets.denoiser import Denoiser, ExactDenoiser, Head, OneStep
from nets.norm import SyncBatchNorm
from nets.r3 import R3Block, R3Discriminator, R3Generator
from nets.vqgan import APART, Codebook, VqAutoencoder
from nets.wgan import DownBlock, WganCritic, WganGenerator

NARROW, WIDE = (8, 8, 4), (64, 64, 64, 32)


@pytest.mark.parametrize(("size", "channels", "classes"), [((16, 16), 1, 0), ((13, 10), 4, 3)])
@pytest.mark.parametrize("kind", ["r3", "biggan"])
def test_any_size_channels_and_labels(kind, size, channels, classes):
    torch.manual_seed(0)
    rule = dict(classes=classes, channels=channels)
    if kind == "r3":
        generator, discriminator = R3Generator(5, NARROW, size=size, **rule), R3Discriminator(NARROW, **rule)
    else:
        rule |= dict(size=size, width=2)
        generator, discriminator = BigGenerator(latent=5, **rule), BigDiscriminator(**rule)
    label = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]) if classes else None
    image = generator(torch.randn(2, 5), label)
    assert image.shape == (2, channels, *size) and discriminator(image, label).shape == (2,)
    assert not classes or not torch.equal(discriminator(image, label), discriminator(image, label.flip(0)))


@pytest.mark.parametrize("kinds", [(R3Generator, R3Discriminator), (WganGenerator, WganCritic)])
def test_every_weight_learns_once_the_last_layers_are_off_zero(kinds):
    torch.manual_seed(0)
    pair = kinds[0](5, NARROW), kinds[1](NARROW)
    for net, x, shape in zip(pair, (torch.randn(3, 5), torch.randn(3, 3, 16, 16)), ((3, 3, 16, 16), (3,)), strict=True):
        for module in net.modules():
            if isinstance(module, R3Block):
                torch.nn.init.normal_(module.LinearLayer3.Layer.weight)
        found = net(x)
        assert found.shape == shape
        found.square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def test_the_first_pictures_and_scores_of_a_wgan_have_a_sensible_size():
    torch.manual_seed(0)
    images = WganGenerator(32, WIDE)(torch.randn(64, 32))
    assert 0.2 < images.std() < 0.9 and images.abs().max() <= 1
    scores = WganCritic(WIDE)(torch.randn(64, 3, 32, 32))
    assert 0.01 < scores.std() < 5


# ---- wgan ----


def test_the_critic_has_no_norm_and_samples_keep_to_themselves():
    torch.manual_seed(0)
    net = WganCritic(NARROW)
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]))
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    assert not any(isinstance(module, kinds) for module in net.modules())


def test_every_batch_norm_of_the_generator_is_one_over_all_ranks_and_no_bias_stands_before_one():
    net = WganGenerator(5, NARROW)
    norms = {name: m for name, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
    assert len(norms) == 5 and all(isinstance(norm, SyncBatchNorm) for norm in norms.values())
    biases = {name for name, _ in net.named_parameters() if name.endswith("bias")}
    assert biases == {f"{name}.bias" for name in norms} | {"start.bias", "paint.bias"}


def test_the_first_block_of_the_critic_sees_negative_pixels():
    torch.manual_seed(0)
    image = -torch.rand(1, 3, 8, 8)
    branches = []
    for first in (True, False):
        block = DownBlock(3, 4, first)
        nn.init.zeros_(block.shortcut.weight)
        branches.append(block(image))
    assert branches[0].abs().sum() > 0
    assert torch.equal(branches[1], torch.zeros(1, 4, 4, 4))


# ---- vqgan ----


def features() -> torch.Tensor:
    return torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def filled() -> Codebook:
    book = Codebook(6, 3, decay=0.9).double()
    book.counts.fill_(50.0)
    book.sums.copy_(50 * torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return book


def rows_of(found: torch.Tensor) -> torch.Tensor:
    return found.movedim(1, -1).reshape(-1, 3)


def are_near(codes: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """For each code, whether it is one of the features but for the little that new codes are moved."""
    return (codes[:, None] - rows_of(given)).abs().amax(-1).amin(1) < 5 * APART


def test_each_feature_gets_its_nearest_code_and_in_evaluation_none_learns():
    book, given = filled().eval(), features()
    before = {name: value.clone() for name, value in book.state_dict().items()}
    codes, _, numbers = book(given)
    nearest = torch.cdist(rows_of(given), book.codes).argmin(1)
    assert torch.equal(numbers.flatten(), nearest)
    torch.testing.assert_close(rows_of(codes), book.codes[nearest])
    assert numbers.unique().numel() > 1
    assert all(torch.equal(value, before[name]) for name, value in book.state_dict().items())


def test_a_code_is_the_moving_average_of_the_features_that_chose_it():
    """Van den Oord et al. 2017, equations 6 to 8, in a loop. What it returns are the codes before that."""
    book, given = filled(), features()
    before = book.codes.clone()
    counts, sums = book.counts.clone(), book.sums.clone()
    codes, _, numbers = book(given)
    torch.testing.assert_close(rows_of(codes), before[numbers.flatten()])
    for code in range(6):
        chose = rows_of(given)[numbers.flatten() == code]
        count = 0.9 * counts[code] + 0.1 * len(chose)
        total = 0.9 * sums[code] + 0.1 * chose.sum(0)
        torch.testing.assert_close(book.counts[code], count)
        torch.testing.assert_close(book.codes[code], total / count)
    plain, mixed = filled().float(), filled().float()
    plain(given.float())
    with torch.autocast("cpu", torch.bfloat16):
        mixed(given.float())
    assert torch.equal(plain.sums, mixed.sums)  # in full precision


def test_a_new_codebook_begins_with_features_of_its_first_batch():
    """Each of the four samples offers one, which two codes take. No two codes are equal."""
    book = Codebook(8, 3).double()
    book(features())
    assert are_near(book.codes, features()).all()
    apart = (book.codes[:, None] - book.codes).abs().amax(-1)
    assert (apart < 10 * APART).sum() == 8 + 8  # each is near to itself and to one other
    assert (apart + torch.eye(8)).min() > 0


def test_a_dead_code_takes_a_feature_of_the_batch_and_a_living_one_does_not():
    book = filled()
    book.counts[2] = 1e-3
    book.sums[2] = 0.1  # a code far away: nobody chooses it
    before = book.codes.clone()
    book(features())
    assert are_near(book.codes, features())[2]
    assert not are_near(before, features()).any()
    assert ((book.codes - before).abs().amax(1) < 0.5).tolist() == [code != 2 for code in range(6)]
    assert book.counts[2] == 1


def test_the_gradient_passes_the_codes_by():
    torch.manual_seed(0)
    net = narrow().double().eval()
    found = torch.rand(2, 3, 4, 4, dtype=torch.float64).requires_grad_()
    codes, loss, _ = net.quantize(found)
    assert loss.requires_grad
    (passed,) = torch.autograd.grad(net.decode(codes).square().sum(), found)
    given = codes.detach().requires_grad_()
    (direct,) = torch.autograd.grad(net.decode(given).square().sum(), given)
    torch.testing.assert_close(passed, direct)


def narrow(doublings: int = 1, **rule) -> VqAutoencoder:
    return VqAutoencoder(3, 4, [1] * (doublings + 1), 1, (1,), 3, 3, 6, groups=2, learning="ema", **rule)


@pytest.mark.parametrize("doublings", [1, 2, 3])
def test_each_width_but_the_first_halves_the_map(doublings):
    net = narrow(doublings).double().eval()
    image = torch.rand(1, 3, 16, 32, dtype=torch.float64)
    assert net.numbers(image).shape == (1, 16 >> doublings, 32 >> doublings)
    assert net(image)[0].shape == image.shape
    assert net(image[..., 1:, :-3])[0].shape == (1, 3, 15, 29)  # of any size
    torch.testing.assert_close(net.draw(net.numbers(image)), net(image)[0])


# ---- denoiser ----


def test_the_exact_denoiser_holds_the_score_of_the_noised_pictures():
    """Tweedie: D(x) = x + sigma^2 grad log p(x; sigma), p a mixture of one Gaussian a picture."""
    teacher = ExactDenoiser(torch.rand(5, 3, 4, 4, dtype=torch.float64) * 2 - 1)
    sigma = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
    noisy = (torch.randn(3, 3, 4, 4, dtype=torch.float64) * sigma.view(-1, 1, 1, 1)).requires_grad_()
    apart = (noisy[:, None] - teacher.pictures).flatten(2).square().sum(2)
    density = torch.logsumexp(-apart / (2 * sigma[:, None] ** 2), 1)
    (score,) = torch.autograd.grad(density.sum(), noisy)
    torch.testing.assert_close(teacher(noisy, sigma), noisy + sigma.view(-1, 1, 1, 1) ** 2 * score)
    assert [name for name, _ in teacher.named_parameters()] == ["pictures"] == list(teacher.state_dict())
    assert not teacher.pictures.requires_grad  # a frozen player that can be sharded


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_the_exact_denoiser_is_exact_under_autocast(half):
    """Logits in the hundreds, whose differences decide: half precision would choose other pictures."""
    generator = torch.Generator().manual_seed(0)
    teacher = ExactDenoiser(torch.rand(50, 3, 16, 16, generator=generator) * 2 - 1)
    noisy, sigma = teacher.pictures[:8].detach() + torch.randn(8, 3, 16, 16, generator=generator), torch.full((8,), 5.0)
    wanted = teacher(noisy, sigma)
    with torch.autocast("cpu", half):
        assert torch.equal(teacher(noisy, sigma), wanted)
        logits = noisy.flatten(1) @ teacher.pictures.flatten(1).T / 25
    assert not torch.allclose(logits.float(), noisy.flatten(1) @ teacher.pictures.flatten(1).T / 25, rtol=0, atol=1e-6)


def test_a_denoiser_starts_as_the_best_one_of_gaussian_pictures():
    """Its last layer is zero, so what is left is EDM's skip: spread^2 / (spread^2 + sigma^2)."""
    net = Denoiser((4, 8, 8), 8, spread=0.5)
    noisy, sigma = torch.randn(3, 3, 16, 16), torch.tensor([0.01, 0.5, 50.0])
    keep = torch.tensor([0.25 / (0.25 + s**2) for s in (0.01, 0.5, 50.0)]).view(-1, 1, 1, 1)
    torch.testing.assert_close(net(noisy, sigma), keep * noisy)


def test_every_weight_of_a_denoiser_learns_and_samples_keep_to_themselves():
    torch.manual_seed(0)
    net, head = Denoiser((4, 8, 8), 8), Head(8)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    noisy, sigma = torch.randn(3, 3, 16, 16), torch.tensor([0.1, 1.0, 3.0])
    clean, features = net(noisy, sigma), net.features(noisy, sigma)
    scores = head(features)
    assert features.shape == (3, 8, 4, 4) and scores.shape == (3,)
    alone = noisy[1:2], sigma[1:2]
    torch.testing.assert_close(clean[1:2], net(*alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores[1:2], head(net.features(*alone)), rtol=1e-4, atol=1e-5)
    (clean.square().sum() + scores.square().sum()).backward()
    assert all(parameter.grad.abs().sum() > 0 for part in (net, head) for parameter in part.parameters())


def test_a_denoiser_draws_in_one_step():
    denoiser = Denoiser((4, 4), embedding=4)
    drawer, z = OneStep(denoiser, 8, 10.0), torch.randn(2, 3 * 64)
    assert drawer.latent == 3 * 64
    torch.testing.assert_close(drawer(z), denoiser(10 * z.view(2, 3, 8, 8), torch.full((2,), 10.0)))
