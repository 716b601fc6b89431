"""HiFi-GAN's networks."""

import pytest
import torch

from gan.files.errors import UserError
from nets.hifigan import HifiGenerator, PeriodJudge, PeriodJudges, ScaleJudges


def count(network) -> float:
    """Millions of numbers in biases and in weights as they are computed: weight norm's lengths are not counted."""
    return sum(p.numel() for name, p in network.named_parameters() if not name.endswith("original0")) / 1e6


def test_the_published_networks_are_the_defaults():
    """13.92 million in the generator, by table 1 of the paper."""
    with torch.device("meta"):
        generator = HifiGenerator()
    assert count(generator) == pytest.approx(13.92, abs=0.01)


@pytest.mark.parametrize("strides", [(8, 8), (4, 2), (3,), (5, 2)])
def test_the_wave_is_as_long_as_the_frames_times_the_strides(strides):
    wave = HifiGenerator(6, 8, strides, (3, 5), (1, 3))(torch.rand(2, 6, 9))
    assert wave.shape == (2, 9 * torch.tensor(strides).prod())
    assert wave.abs().max() <= 1


def test_a_width_that_cannot_be_halved_is_refused():
    with pytest.raises(UserError, match="a width of 12 cannot be halved 3 times; try 8"):
        HifiGenerator(6, 12, (2, 2, 2))


def test_a_fusion_is_the_mean_of_its_blocks():
    fusion = HifiGenerator(6, 8, (4,), (3, 5, 7), (1, 2)).fusions[0]
    x = torch.rand(1, 4, 20)
    torch.testing.assert_close(fusion(x), torch.stack([block(x) for block in fusion.blocks]).mean(0))


@pytest.mark.parametrize("period", [2, 3, 5])
def test_a_judge_of_periods_sees_each_column_by_itself(period):
    judge, wave = PeriodJudge(period, (4, 8)), torch.rand(1, 100)
    other = wave.clone()
    other[0, 10 * period + 1] += 1.0  # in column 1
    before, after = judge(wave), judge(other)
    assert before[-1].shape == (1, 1, before[-1].shape[2], period)
    moved = (before[-1] - after[-1]).abs().amax((0, 1, 2)) > 0
    assert moved.tolist() == [column == 1 for column in range(period)]


def test_there_is_a_judge_for_each_period_and_each_scale():
    wave = torch.rand(3, 210)
    periods, scales = PeriodJudges(widths=(4, 8)), ScaleJudges(3, (4, 8), (4,), groups=4)
    assert [found[0].shape[-1] for found in periods(wave)] == [2, 3, 5, 7, 11]
    assert [found[0].shape[-1] for found in scales(wave)] == [210, 106, 54]
    for found in periods(wave) + scales(wave):
        assert all(len(each) == 3 for each in found)
        assert found[-1].shape[1] == 1


def test_the_first_judge_of_scales_has_spectral_norm_and_all_else_has_weight_norm():
    def norms(network):
        kinds = {type(layer.parametrizations.weight[0]).__name__ for layer in network.modules() if _is_normed(layer)}
        plain = [layer for layer in network.modules() if hasattr(layer, "bias") and not _is_normed(layer)]
        assert not plain
        return kinds

    scales = ScaleJudges(2, (4, 8), (4,), groups=4)
    assert norms(scales.judges[0]) == {"SpectralNorm"}
    assert norms(scales.judges[1]) == norms(PeriodJudges((2,), (4,))) == {"_WeightNorm"}
    assert norms(HifiGenerator(6, 8, (4,), (3,), (1,))) == {"_WeightNorm"}


def _is_normed(layer) -> bool:
    return hasattr(layer, "parametrizations")
