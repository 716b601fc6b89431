"""Networks from noise or from codes."""

import torch

from nets.denoiser import ExactDenoiser
from nets.vqgan import APART, Codebook, VqAutoencoder

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
