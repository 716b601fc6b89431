"""The codebook that follows its features, and the autoencoder around it."""

import pytest
import torch

from nets.vqgan import APART, Codebook, VqAutoencoder


def features(batch: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 2, 5, generator=generator, dtype=torch.float64)


def filled(size: int = 6, decay: float = 0.9) -> Codebook:
    """Codes that all live."""
    book = Codebook(size, 3, decay).double()
    generator = torch.Generator().manual_seed(1)
    book.counts.fill_(50.0)
    book.sums.copy_(50 * torch.randn(size, 3, generator=generator, dtype=torch.float64))
    return book


def rows_of(found: torch.Tensor) -> torch.Tensor:
    return found.movedim(1, -1).reshape(-1, 3)


def are_near(codes: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """For each code, whether it is one of the features but for the little that new codes are moved."""
    return (codes[:, None] - rows_of(given)).abs().amax(-1).amin(1) < 5 * APART


def test_each_feature_gets_its_nearest_code():
    book, given = filled().eval(), features()
    codes, numbers = book(given)
    nearest = torch.cdist(rows_of(given), book.codes).argmin(1)
    assert torch.equal(numbers.flatten(), nearest)
    torch.testing.assert_close(rows_of(codes), book.codes[nearest])
    assert numbers.unique().numel() > 1


def test_a_code_is_the_moving_average_of_the_features_that_chose_it():
    """Van den Oord et al. 2017, equations 6 to 8, in a loop. What it returns are the codes before that."""
    book, given = filled(), features()
    before = book.codes.clone()
    counts, sums = book.counts.clone(), book.sums.clone()
    codes, numbers = book(given)
    torch.testing.assert_close(rows_of(codes), before[numbers.flatten()])
    for code in range(6):
        chose = rows_of(given)[numbers.flatten() == code]
        count = 0.9 * counts[code] + 0.1 * len(chose)
        total = 0.9 * sums[code] + 0.1 * chose.sum(0)
        torch.testing.assert_close(book.counts[code], count)
        torch.testing.assert_close(book.codes[code], total / count)


def test_in_evaluation_it_does_not_learn():
    book = filled().eval()
    before = {name: value.clone() for name, value in book.state_dict().items()}
    book(features())
    assert all(torch.equal(value, before[name]) for name, value in book.state_dict().items())


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


def test_under_autocast_codes_are_learned_in_full_precision():
    given = features().float()
    plain, mixed = filled().float(), filled().float()
    plain(given)
    with torch.autocast("cpu", torch.bfloat16):
        mixed(given)
    assert torch.equal(plain.sums, mixed.sums)


def test_the_gradient_passes_the_codes_by():
    torch.manual_seed(0)
    net, image = VqAutoencoder((4, 8), code=3, codes=6).double(), torch.rand(2, 3, 8, 8, dtype=torch.float64)
    painted, found, codes = net(image)
    assert found.shape == codes.shape == (2, 3, 4, 4)
    assert painted.shape == image.shape
    assert not codes.requires_grad
    (passed,) = torch.autograd.grad(painted.square().sum(), found, retain_graph=True)
    given = codes.clone().requires_grad_()
    (direct,) = torch.autograd.grad(net.decode(given).square().sum(), given)
    torch.testing.assert_close(passed, direct)


@pytest.mark.parametrize("doublings", [1, 2, 3])
def test_each_width_but_the_first_halves_the_map(doublings):
    net = VqAutoencoder([4] * (doublings + 1), code=3, codes=6).eval()
    image = torch.rand(1, 3, 16, 32)
    assert net.numbers(image).shape == (1, 16 >> doublings, 32 >> doublings)
    assert net(image)[0].shape == image.shape
