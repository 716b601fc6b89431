"""SplitMix64: the published numbers, the same on every device and in every dtype, with the right distributions."""

import math

import pytest
import torch

from gan import splitmix
from gan.splitmix import signed, step_of

GOLDEN = signed(0x9E3779B97F4A7C15)
MAKES = splitmix.normal, splitmix.uniform


def words(start, step, count):
    """Numbers 1 to `count` of each row, as the published generator begins."""
    return splitmix.words(torch.tensor([signed(s) for s in start]), step, slice(0, len(start)), slice(1, count + 1))


def rows_of(n):
    """Starts of rows and a step, as a place gives them."""
    return torch.arange(n) * signed(0xD1B54A32D192ED03) + 12345, step_of(0xA0761D6478BD642F)


# ---- the numbers ----


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_the_numbers_of_the_published_generator(seed, expected):
    assert [number % 2**64 for number in words([seed], GOLDEN, len(expected))[0].tolist()] == expected


def test_a_device_computes_what_the_cpu_does():
    start, step = rows_of(5)
    part = slice(1, 4), slice(3, 100)
    assert torch.equal(splitmix._words_on_device(start, step, *part), splitmix._words_on_cpu(start, step, *part))


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_blocks_change_nothing(make, columns, monkeypatch):
    start, step = rows_of(6)
    whole = make(start, step, columns, torch.float32)
    assert whole.shape == (6, columns) and whole.is_contiguous()
    numbers = splitmix.integers(start, step, columns, torch.int64, 0, 1000)
    for size in (1, 3, 10, 40):
        monkeypatch.setattr(splitmix, "BLOCK", size)
        assert torch.equal(make(start, step, columns, torch.float32), whole)
        assert torch.equal(splitmix.integers(start, step, columns, torch.int64, 0, 1000), numbers)
    for row in range(6):
        assert torch.equal(make(start[row : row + 1], step, columns, torch.float32)[0], whole[row])


def test_nothing_is_drawn_for_no_rows_or_columns():
    start, step = rows_of(3)
    assert splitmix.normal(start, step, 0, torch.float32).shape == (3, 0)
    assert splitmix.uniform(start[:0], step, 4, torch.float32).shape == (0, 4)


def test_a_step_is_odd_and_its_bits_change_often():
    for bits in (0, 1, 2**63, 0xFFFFFFFFFFFFFFFF, 0xA0761D6478BD642E):
        step = step_of(bits) % 2**64
        assert step % 2 == 1 and (step ^ step >> 1).bit_count() >= 24


# ---- dtypes ----


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-6), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_every_dtype_draws_the_same_up_to_rounding(dtype, near):
    start, step = rows_of(50)
    for make in MAKES:
        exact, found = make(start, step, 200, torch.float64), make(start, step, 200, dtype)
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() < near


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype):
    start, step = rows_of(2)
    expected = [make(start, step, 9, dtype) for make in MAKES]
    torch.set_default_dtype(torch.float64)
    try:
        found = [make(start, step, 9, dtype) for make in MAKES]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_reach_0_and_never_1(dtype, monkeypatch):
    extremes = torch.tensor([[-1, 2**63 - 1, -(2**63), 0]])  # halves of all ones, and of zeros
    monkeypatch.setattr(splitmix, "words", lambda start, step, rows, some: extremes.clone())
    drawn = splitmix.uniform(torch.zeros(1, dtype=torch.int64), 1, 8, dtype)
    assert drawn.min() == 0 and 0.99 < drawn.max() < 1


def test_the_rarest_normal_numbers_are_finite(monkeypatch):
    extremes = torch.tensor([[0, -1, 2**63 - 1, -(2**63), 2**31 - 1, -(2**31)]])
    monkeypatch.setattr(splitmix, "words", lambda start, step, rows, some: extremes.clone())
    for dtype in (torch.float64, torch.float32):
        drawn = splitmix.normal(torch.zeros(1, dtype=torch.int64), 1, 12, dtype)
        assert drawn.isfinite().all()
        assert drawn.abs().max().item() == pytest.approx(math.sqrt(64 * math.log(2)), rel=1e-6)


# ---- distributions; limits are five standard deviations ----


def near(found, expected, deviation, count):
    return abs(float(found) - expected) < 5 * deviation / math.sqrt(count)


def test_moments_of_normal_numbers():
    x = splitmix.normal(*rows_of(500), 2000, torch.float64)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert near((x**power).mean(), moment, math.sqrt(variance), x.numel())
    for limit in (1, 2, 3):  # how many are further out
        share = math.erfc(limit / math.sqrt(2))
        assert near((x.abs() > limit).double().mean(), share, math.sqrt(share), x.numel())


def test_uniform_numbers_fill_all_parts_alike():
    x = splitmix.uniform(*rows_of(500), 2000, torch.float32)
    counts = torch.histc(x, 100, 0, 1).double()
    chi_squared = ((counts - x.numel() / 100) ** 2 / (x.numel() / 100)).sum().item()
    assert abs(chi_squared - 99) < 5 * math.sqrt(2 * 99)


def test_integers_are_equally_likely():
    drawn = splitmix.integers(*rows_of(100), 6000, torch.int64, -1, 5)
    counts = drawn.flatten().add(1).bincount()
    assert len(counts) == 6
    assert all(near(count / drawn.numel(), 1 / 6, math.sqrt(5) / 6, drawn.numel()) for count in counts)


def test_every_bit_is_set_half_of_the_time_and_changes_by_itself():
    start, step = rows_of(400)
    numbers = splitmix.words(start, step, slice(0, 400), slice(0, 500)).flatten()
    bits = (numbers.unsqueeze(1) >> torch.arange(64)) & 1
    assert ((bits.double().mean(0) - 0.5).abs() < 5 * 0.5 / math.sqrt(len(numbers))).all()
    signs = bits.double() * 2 - 1
    together = (signs.T @ signs / len(numbers)).fill_diagonal_(0)
    assert together.abs().max() < 6 / math.sqrt(len(numbers))


@pytest.mark.parametrize("make", MAKES)
def test_rows_and_columns_do_not_depend_on_each_other(make):
    x = make(*rows_of(300), 4000, torch.float64)
    x = (x - x.mean()) / x.std()
    rows = (x @ x.T / x.shape[1]).fill_diagonal_(0)
    columns = (x[:, :300].T @ x[:, :300] / x.shape[0]).fill_diagonal_(0)
    halves = (x[:, :2000] * x[:, 2000:]).mean()  # the two draws of one radius
    assert rows.abs().max() < 6 / math.sqrt(x.shape[1])
    assert columns.abs().max() < 6 / math.sqrt(x.shape[0])
    assert near(halves, 0, 1, x.numel() // 2)
    squares = (x[:, :2000] ** 2 - 1) * (x[:, 2000:] ** 2 - 1)
    assert near(squares.mean(), 0, 2, x.numel() // 2)


def test_the_control_rows_that_start_together_are_found():
    start, step = torch.zeros(2, dtype=torch.int64), step_of(5)
    x = splitmix.normal(start, step, 4000, torch.float64)
    assert (x[0] * x[1]).mean() > 0.9
