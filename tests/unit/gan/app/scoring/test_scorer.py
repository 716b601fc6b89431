"""Which scores are possible, and how figures come from rows and sums."""

import math

import pytest
import torch
from torch import nn

from gan.app.scoring import features, pixels, scorer
from gan.app.scoring.outputs import Heard, Made
from gan.app.scoring.scorer import Scorer, choose
from gan.files.errors import UserError

PICTURES = torch.zeros(1, 3, 16, 16)
PAINTED = {"painted": Made(PICTURES, PICTURES, label=torch.zeros(1, 16, 16).long())}
FROM_NOISE = {"from noise": Made(PICTURES, PICTURES, paired=False)}
HEARD = {"sounds": Heard(torch.zeros(2, 4, 5), torch.zeros(2, 4, 5), torch.zeros(2))}
FID = features.Extractor("Inception", nn.Identity(), 2048, fid=True)
STAND_IN = features.Extractor("random convolutions", nn.Identity(), 960)


@pytest.fixture(autouse=True)
def no_networks(tmp_path, monkeypatch):
    """No network is in the cache, and the replacement costs nothing."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(features, "always", lambda: STAND_IN)


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.setattr(features, "inception", lambda path: FID)
    monkeypatch.setattr(pixels, "segmenter", lambda path, labels: nn.Identity())


def test_by_default_there_is_all_that_is_possible_and_what_a_game_has_no_use_for_is_left_out_silently(request):
    found = choose(PAINTED, 8, labels=19)
    assert found.scores == ("ssim", "rmse", "psnr", "features", "precision", "recall")
    assert found.extractor is STAND_IN
    assert found.left_out.keys() == {"fid", "kid", "miou"}
    assert features.INCEPTION in found.left_out["fid"] and "--inception" in found.left_out["kid"]
    assert "--segmenter" in found.left_out["miou"] and "for 19 labels" in found.left_out["miou"]
    found = choose(FROM_NOISE, 8)
    assert (found.scores, found.left_out.keys()) == (("features", "precision", "recall"), {"fid", "kid"})
    assert choose(PAINTED, 1).scores == ("ssim", "rmse", "psnr")  # one picture is no set
    request.getfixturevalue("networks")
    found = choose(PAINTED, 8, labels=19)
    assert found.scores == ("ssim", "rmse", "psnr", "fid", "kid", "precision", "recall", "miou")
    assert found.extractor is FID and not found.left_out


def test_lpips_is_the_mean_of_the_distances_from_the_truth(monkeypatch):
    class Distance(nn.Module):
        def forward(self, one, other):
            return (one - other).abs().mean((1, 2, 3), keepdim=True)

    monkeypatch.setattr(pixels, "load_lpips", lambda file: Distance())
    found = choose(PAINTED, 1, lpips="vgg16.pth")
    assert found.scores == ("ssim", "rmse", "psnr", "lpips")
    made = Made(torch.stack([torch.full((3, 16, 16), value) for value in (0.25, 0.75)]), torch.zeros(2, 3, 16, 16))
    assert found.figures(found.rows(made), {})["lpips"] == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"LPIPS needs VGG-16's weights; bring .* and type --lpips"):
        choose(PAINTED, 1, ("lpips",))
    with pytest.raises(UserError, match="score lpips: it needs a truth"):
        choose(FROM_NOISE, 1, ("lpips",))


@pytest.mark.parametrize(
    ("made", "count", "asked", "message"),
    [
        (PAINTED, 8, ("fid",), rf"score fid: .*{features.INCEPTION}"),
        (PAINTED, 8, ("rmse", "kid"), rf"score kid: .*{features.INCEPTION}"),
        (PAINTED, 8, ("miou",), "score miou: .*--segmenter"),
        (PAINTED, 8, ("transfer",), "score transfer: it needs the drawn truth"),
        (PAINTED, 1, ("fid",), "score fid: it needs two pictures or more"),
        (FROM_NOISE, 8, ("ssim",), "score ssim: it needs a truth"),
        (HEARD, 8, ("ssim",), "score ssim: it needs a truth to compare each picture with"),
        (PAINTED, 8, ("mel",), "score mel: it needs sounds, and the true ones"),
        (FROM_NOISE, 8, ("miou",), "score miou: it needs pictures painted from label maps"),
        (PAINTED, 8, ("features", "fid"), "ask for the one or the other"),
    ],
)
def test_what_is_asked_for_and_not_possible_is_an_error(made, count, asked, message):
    with pytest.raises(UserError, match=message):
        choose(made, count, asked)


def test_a_file_that_is_named_and_not_there_is_an_error_too(tmp_path):
    with pytest.raises(UserError, match=r"score fid: .*mine.pth"):
        choose(PAINTED, 8, inception=tmp_path / "mine.pth")
    with pytest.raises(UserError, match=r"score miou: .*mine.pth"):
        choose(PAINTED, 8, segmenter=tmp_path / "mine.pth")


def test_the_stand_in_is_never_called_fid_or_kid_and_many_pictures_give_that_a_deviation(monkeypatch):
    rows = {"features": torch.rand(4, 6), "features of truth": torch.rand(4, 6)}
    figures = Scorer(("fid", "kid", "features"), extractor=STAND_IN).figures(rows, {})
    assert figures.keys() == {"feature_distance", "kernel_distance"}
    figures = Scorer(("fid", "kid"), extractor=FID).figures(rows, {})
    assert figures.keys() == {"fid", "kid"}
    monkeypatch.setattr(features, "SUBSET_SIZE", 2)
    assert Scorer(("kid",), extractor=FID).figures(rows, {})["kid_deviation"] > 0


def test_figures_by_hand():
    rows = {
        "ssim": torch.tensor([0.5, 1.0, 0.6]).double(),
        "psnr": torch.tensor([10.0, 20.0, 60.0]).double(),
        "transfer": torch.tensor([[1.0, 10.0], [5.0, 30.0], [0.0, 0.0]]).double(),
    }
    sums = {"confusion": torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])}
    figures = Scorer((), labels=3).figures(rows, sums, ("sky", "sea", "land"))
    assert figures["ssim"] == pytest.approx(0.7)
    assert figures["psnr"] == pytest.approx(30)
    assert figures["transfer_error"] == pytest.approx(6 / 40)
    assert figures["accuracy"] == pytest.approx(7 / 8)
    assert figures["miou"] == pytest.approx((3 / 4 + 4 / 5) / 2)
    assert figures["iou"]["sea"] == pytest.approx(4 / 5) and math.isnan(figures["iou"]["land"])


def test_sounds_have_two_scores_which_are_means_over_sounds():
    found = choose(HEARD, 8)
    assert found.scores == ("mel", "spectral") and not found.left_out
    made = Heard(
        torch.tensor([[[1.0, 2.0]], [[0.0, 8.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]), torch.tensor([0.5, 1.0])
    )
    rows = found.rows(made)
    assert rows["mel_error"].tolist() == [1.0, 4.0] and not found.sums(made)
    assert found.figures(rows, {}) == {"mel_error": 2.5, "spectral_error": 0.75}


def test_the_truth_is_segmented_too_where_there_is_one(monkeypatch):
    seen = []
    monkeypatch.setattr(scorer.pixels, "confusion", lambda net, pictures, *_: seen.append(pictures) or torch.eye(2))
    made = Made(PICTURES, PICTURES + 1, label=torch.zeros(1, 16, 16).long())
    sums = Scorer(("miou",), labels=2, segmenter=nn.Identity()).sums(made)
    assert sums.keys() == {"confusion", "confusion of truth"}
    assert seen == [made.pictures, made.truth] or all(map(torch.equal, seen, [made.pictures, made.truth]))


def test_few_pictures_are_remarked_on():
    assert "FID of 64 pictures is far above" in Scorer((), extractor=FID).notes(64)[0]
    assert Scorer((), extractor=FID).notes(5000) == []
    assert "the Fréchet distance of 64" in Scorer((), extractor=STAND_IN).notes(64)[0]
    assert Scorer(("ssim",)).notes(3) == []
