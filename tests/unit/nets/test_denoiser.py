"""Denoisers and the head that judges by their inner features."""

import pytest
import torch

from nets.denoiser import Denoiser, ExactDenoiser, Head, OneStep

WIDTHS = (4, 8, 8)


def known(count: int = 5, size: int = 4) -> ExactDenoiser:
    generator = torch.Generator().manual_seed(0)
    return ExactDenoiser(torch.rand(count, 3, size, size, generator=generator, dtype=torch.float64) * 2 - 1)


def test_the_exact_denoiser_holds_the_score_of_the_noised_pictures():
    """Tweedie: D(x) = x + sigma^2 grad log p(x; sigma), p a mixture of one Gaussian a picture."""
    teacher = known()
    sigma = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
    noisy = (torch.randn(3, 3, 4, 4, dtype=torch.float64) * sigma.view(-1, 1, 1, 1)).requires_grad_()
    apart = (noisy[:, None] - teacher.pictures).flatten(2).square().sum(2)
    density = torch.logsumexp(-apart / (2 * sigma[:, None] ** 2), 1)
    (score,) = torch.autograd.grad(density.sum(), noisy)
    torch.testing.assert_close(teacher(noisy, sigma), noisy + sigma.view(-1, 1, 1, 1) ** 2 * score)


def test_the_exact_denoiser_knows_the_nearest_in_little_noise_and_the_mean_in_much():
    teacher = known()
    pictures = teacher.pictures.detach()
    near = pictures.flip(0) + 0.01 * torch.randn_like(pictures)
    torch.testing.assert_close(teacher(near, torch.full((5,), 0.01, dtype=torch.float64)), pictures.flip(0))
    assert torch.equal(teacher.nearest(near), pictures.flip(0))
    far = teacher(torch.randn_like(pictures), torch.full((5,), 1e4, dtype=torch.float64))
    torch.testing.assert_close(far, pictures.mean(0).expand_as(far), rtol=0, atol=1e-3)


def test_the_exact_denoiser_is_a_frozen_player_that_can_be_sharded():
    teacher = known()
    assert [name for name, _ in teacher.named_parameters()] == ["pictures"] == list(teacher.state_dict())
    assert not teacher.pictures.requires_grad


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
    net = Denoiser(WIDTHS, 8, spread=0.5)
    noisy, sigma = torch.randn(3, 3, 16, 16), torch.tensor([0.01, 0.5, 50.0])
    keep = torch.tensor([0.25 / (0.25 + s**2) for s in (0.01, 0.5, 50.0)]).view(-1, 1, 1, 1)
    torch.testing.assert_close(net(noisy, sigma), keep * noisy)


def test_every_weight_learns_once_the_last_layers_are_off_zero():
    torch.manual_seed(0)
    net, head = Denoiser(WIDTHS, 8), Head(8)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    noisy, sigma = torch.randn(3, 3, 16, 16), torch.tensor([0.1, 1.0, 3.0])
    features = net.features(noisy, sigma)
    assert features.shape == (3, 8, 4, 4)
    scores = head(features)
    assert scores.shape == (3,)
    (net(noisy, sigma).square().sum() + scores.square().sum()).backward()
    for part in (net, head):
        assert all(parameter.grad.abs().sum() > 0 for parameter in part.parameters())


def test_the_size_of_the_noise_counts():
    torch.manual_seed(0)
    net = Denoiser(WIDTHS, 8)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 3, 16, 16)
    scaled = [net.features((s**2 + 0.25) ** 0.5 * x, torch.tensor([s])) for s in (0.1, 5.0)]
    assert not torch.allclose(*scaled, atol=1e-2)  # the picture that the layers see is the same, the embedding is not


def test_samples_keep_to_themselves():
    torch.manual_seed(0)
    net, head = Denoiser(WIDTHS, 8), Head(8)
    torch.nn.init.normal_(net.paint.weight)
    x, sigma = torch.randn(4, 3, 16, 16), torch.rand(4) + 0.1
    torch.testing.assert_close(net(x, sigma)[1:2], net(x[1:2], sigma[1:2]), rtol=1e-4, atol=1e-5)
    scores = [head(net.features(part, size)) for part, size in ((x, sigma), (x[1:2], sigma[1:2]))]
    torch.testing.assert_close(scores[0][1:2], scores[1], rtol=1e-4, atol=1e-5)


def test_a_denoiser_learns_to_denoise():
    torch.manual_seed(0)
    net = Denoiser((8, 8), 8)
    clean = torch.zeros(8, 3, 8, 8) + torch.tensor([-0.7, 0.1, 0.6]).view(1, 3, 1, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    errors = []
    for _ in range(60):
        sigma = torch.rand(8) + 0.3
        noisy = clean + sigma.view(-1, 1, 1, 1) * torch.randn_like(clean)
        error = (net(noisy, sigma) - clean).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.2 * errors[0]


def test_a_denoiser_draws_in_one_step():
    denoiser = Denoiser((4, 4), embedding=4)
    drawer, z = OneStep(denoiser, 8, 10.0), torch.randn(2, 3 * 64)
    assert drawer.latent == 3 * 64
    torch.testing.assert_close(drawer(z), denoiser(10 * z.view(2, 3, 8, 8), torch.full((2,), 10.0)))
