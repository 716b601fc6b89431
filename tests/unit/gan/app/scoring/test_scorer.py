"""What is scored of each game, which scores are possible, how figures come from rows and sums, and their file."""

import json
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from datasets.augment import to_tensors
from datasets.files.sides import UnpairedSides
from gan import noise
from gan.app.scoring import features, pixels, scorer, scoring
from gan.app.scoring.outputs import Heard, Made, _translated, makes
from gan.app.scoring.scorer import Scorer, choose
from gan.evaluate import save
from gan.files.errors import UserError
from gan.runs import build
from strategies.world import World
from tests.support.posix import not_on_windows

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
        (PAINTED, 8, ("rmse", "kid"), rf"score kid: .*{features.INCEPTION}"),
        (PAINTED, 8, ("miou",), "score miou: .*--segmenter"),
        (PAINTED, 8, ("transfer",), "score transfer: it needs the drawn truth"),
        (PAINTED, 1, ("fid",), "score fid: it needs two pictures or more"),
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
    mels = torch.tensor([[[1.0, 2.0]], [[0.0, 8.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
    made = Heard(*mels, torch.tensor([0.5, 1.0]))
    rows = found.rows(made)
    assert rows["mel_error"].tolist() == [1.0, 4.0] and not found.sums(made)
    assert found.figures(rows, {}) == {"mel_error": 2.5, "spectral_error": 0.75}


def test_the_truth_is_segmented_too_where_there_is_one(monkeypatch):
    seen = []
    monkeypatch.setattr(scorer.pixels, "confusion", lambda net, pictures, *_: seen.append(pictures) or torch.eye(2))
    made = Made(PICTURES, PICTURES + 1, label=torch.zeros(1, 16, 16).long())
    sums = Scorer(("miou",), labels=2, segmenter=nn.Identity()).sums(made)
    assert sums.keys() == {"confusion", "confusion of truth"}
    assert all(map(torch.equal, seen, [made.pictures, made.truth]))


def test_few_pictures_are_remarked_on():
    assert "FID of 64 pictures is far above" in Scorer((), extractor=FID).notes(64)[0]
    assert Scorer((), extractor=FID).notes(5000) == []
    assert "the Fréchet distance of 64" in Scorer((), extractor=STAND_IN).notes(64)[0]
    assert Scorer(("ssim",)).notes(3) == []


SMALL = dict(size=32, batch_size=2, faces=4, held_out=4, width=4)
NUMBERS = torch.tensor([1, 2])


@torch.no_grad()
def made_of(name, drop=(), **settings):
    """A game, a batch of its held-out samples, and what is scored of them."""
    run = build(name, **SMALL, **settings)
    batch = default_collate([to_tensors(run.data.val[number]) for number in NUMBERS.tolist()])
    batch = {key: value for key, value in batch.items() if key not in drop}
    with noise.at(noise.Place(("test",), 1, 2, 4)):
        return run.game, batch, makes(run.game.eval(), batch, NUMBERS)


def test_sean_paints_pictures_again_and_transfers():
    game, batch, made = made_of("sean-faces", hidden=8, style=8)
    own, transfer = made["reconstruction"], made["transfer"]
    assert own.paired and own.known is None
    assert torch.equal(own.truth, batch["image"]) and torch.equal(own.label, batch["label"])
    with noise.at(noise.Place(("test",), 1, 2, 4)), torch.no_grad():
        mask = game.mask(batch["label"])
        assert torch.equal(own.pictures, game.generator(mask, game.encoder(batch["image"], mask)))
    assert torch.equal(transfer.truth, batch["truth"])
    for row in range(2):
        theirs = set(batch["style_label"][row].unique().tolist())
        expected = [[label in theirs for label in line] for line in batch["label"][row].tolist()]
        assert transfer.known[row].bool().tolist() == expected
    assert not transfer.known.bool().all()  # else this showed nothing


@pytest.mark.parametrize(
    ("name", "settings", "sides"),
    [("cyclegan-faces", dict(blocks=1), {"a to b": "b", "b to a": "a"}), ("cut-faces", {}, {"a to b": "b"})],
)
def test_cyclegan_translates_both_ways_and_cut_one(name, settings, sides):
    for drop, truth, paired in ((), "truth_", True), (("truth_a", "truth_b"), "", False):
        _, batch, made = made_of(name, drop, **settings)
        assert list(made) == list(sides)
        for way, side in sides.items():
            assert torch.equal(made[way].truth, batch[truth + side]) and made[way].paired == paired


@pytest.mark.parametrize("name", ["r3gan-faces", "biggan-faces", "wgan-gp-faces", "stylegan-faces", "dmd2-faces"])
def test_games_from_noise_make_the_pictures_of_their_samples_numbers(name):
    game, batch, made = made_of(name, latent=8)
    (drawn,) = made.values()
    assert not drawn.paired and drawn.label is None
    with torch.no_grad():
        torch.testing.assert_close(drawn.pictures[1:], game.numbered(torch.tensor([2]), like=batch["image"]))


def test_byol_makes_no_pictures_and_its_score_is_in_metrics():
    with pytest.raises(UserError, match=r"what Byol makes is not known here; its scores .* in the run's metrics\.csv"):
        made_of("byol-faces")


def scored_classes(count, batch_size=8, ranks=1):
    """The classes of the samples that each rank scores, of three folders of 40 pictures."""
    samples = [{"class": number // 40} for number in range(120)]
    worlds = [World(ranks, rank) for rank in range(ranks)]
    turns = [list(scoring.turns_of(samples, count, batch_size, world, 0)) for world in worlds]
    return [
        kind
        for together in zip(*turns, strict=True)
        for _, batch, spare in together
        if not spare
        for kind in batch["class"].tolist()
    ]


def test_a_few_samples_of_class_folders_are_of_all_classes_and_always_the_same():
    few = scored_classes(30)
    assert sorted(Counter(few)) == [0, 1, 2] and min(Counter(few).values()) > 5
    assert Counter(scored_classes(120)) == {0: 40, 1: 40, 2: 40}
    assert few == scored_classes(30, batch_size=4) == scored_classes(30, ranks=3) == scored_classes(120)[:30]


class Side(list):
    size, channels = (8, 8), 3

    def __init__(self, count):
        super().__init__({"image": torch.rand(3, 8, 8) * 2 - 1} for _ in range(count))
        self.pictures = self


class Means(nn.Module):
    def forward(self, pictures):
        return pictures.double().mean((2, 3))


def test_of_two_sides_of_unequal_size_each_picture_is_scored_once(monkeypatch):
    torch.manual_seed(0)
    sides, both = {"a": Side(20), "b": Side(5)}, {"a to b": "ab", "b to a": "ba"}
    scorer = Scorer(("features",), extractor=features.Extractor("means", Means(), 3))

    def makes(_, batch, numbers) -> dict[str, Made]:
        return {title: _translated(batch[one] * 0.9, batch, one, other) for title, (one, other) in both.items()}

    monkeypatch.setattr(scoring, "makes", makes)
    turns = scoring.turns_of(UnpairedSides(*sides.values()), 20, 3, World(), 0)
    found = scoring.Scoring(None, scorer, lambda batch: batch, World()).rows(turns, 20)
    for title, names in both.items():
        for name, strength, kind in zip(names, (0.9, 1.0), ("features", "features of truth"), strict=True):
            pictures = torch.stack([each["image"] for each in sides[name]]) * strength
            wanted = scorer.extractor.network(features.as_bytes(pictures))
            assert torch.equal(found[title][0][kind].sort(0).values, wanted.sort(0).values), (title, name)


def test_what_json_has_no_number_for_is_text(tmp_path):
    save({"a": {"b": float("inf"), 1: [2.5, None]}}, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": {"b": "inf", "1": [2.5, None]}}


@pytest.mark.promise("the scores of `gan.evaluate` cannot be written", "they are printed first, and one line says why")
@not_on_windows
def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file" / "a.json"):
        with pytest.raises(UserError, match=f"cannot write '{path}': .* directory; the scores are in the table"):
            save({}, path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
