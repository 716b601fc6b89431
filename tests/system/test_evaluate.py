"""The command: every held-out sample scored once, the same figures at any number of ranks, a table and JSON."""

import json
import shutil
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed import is_initialized
from torch.utils.data import default_collate
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large as first_known

from datasets.augment import to_tensors
from gan import evaluate as command
from gan.app.fitting import card
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import open_run
from gan.app.scoring import features, scorer, scoring
from tests.support import opening
from tests.support.parity import often


class Coarse(nn.Module):
    """A few features of a picture, for tests that need no network."""

    def forward(self, pictures):
        return nn.functional.avg_pool2d(pictures.float(), 16).flatten(1)


def quick():
    """A replacement network that costs nothing."""
    return features.Extractor("coarse", Coarse(), 12)


@pytest.fixture(autouse=True)
def no_networks(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(scorer.features, "always", quick)


@pytest.fixture(scope="session")
def segmenter(tmp_path_factory):
    """Random weights of a segmentation network for the 19 labels of faces."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("segmenter") / "deeplab.pth"
    torch.save(first_known(weights=None, weights_backbone=None, num_classes=19).state_dict(), path)
    return path


def opened(run, held_out=5):
    """Five held-out faces, and a generator whose noise can be seen."""
    found = open_run(str(run), held_out=held_out)
    opening.set_grain(found.run.game, 0.5)
    return found


def figures(run, segmenter, batch_size, **settings):
    """The scores that this rank, or all ranks together, compute."""
    with pytest.MonkeyPatch.context() as patch:  # other tests have the same ranks later
        patch.setattr(features, "always", quick)
        result = scoring.evaluate(opened(run), segmenter=segmenter, batch_size=batch_size, **settings)
    return result and (result["scores"], result["computed"]["ranks"])


@pytest.fixture(scope="module")
def alone(sean_run, segmenter):
    """The figures of one device, by its size of a batch."""
    return cache(lambda size: figures(sean_run, segmenter, size)[0])


@pytest.mark.parametrize("batch_size", often([3, 1, 8], [3]))  # 3 and 2 pictures; one by one; 5 and none
def test_two_ranks_get_the_figures_of_one(batch_size, alone, sean_run, segmenter, ranks):
    assert not is_initialized()
    (together, size), others = ranks(2).run(figures, sean_run, segmenter, batch_size)
    assert size == 2 and others is None
    assert repr(together) == repr(alone(batch_size))  # to the last bit, and NaN is NaN


def flat(scores):
    for title, values in scores.items():
        for name, value in values.items():
            if not isinstance(value, dict):
                yield f"{title} {name}", value


def test_batches_of_any_size_get_the_same_figures_by_the_place_of_each_sample(alone):
    other = dict(flat(alone(3)))
    for name, value in flat(alone(5)):  # all of them in one
        assert other[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_the_error_of_transfers_is_the_one_that_validation_logs(sean_run):
    found = opened(sean_run)
    game, data = found.run.game, found.run.data.val
    batch = default_collate([to_tensors(data[number]) for number in range(5)])
    logged = {}
    game.log = lambda name, value, **_: logged.update({name: float(value)})
    opening.set_grain(game, 0.0)  # validation's noise is another
    with torch.no_grad():
        game.validation_step(batch)
    scores = scoring.evaluate(found, scores=("transfer",))["scores"]
    assert scores["transfer"]["transfer_error"] == pytest.approx(logged["val/transfer_error"], rel=1e-4)


def test_the_command_prints_a_table_and_saves_json(sean_run, segmenter, tmp_path, capsys):
    run = shutil.copytree(sean_run, tmp_path / sean_run.name)
    assert command.main([str(run), "--devices", "1", "--segmenter", str(segmenter), "--ignore-labels", "0"]) == 0
    out = capsys.readouterr().out
    path = run / "evaluation-step-000002.json"
    assert f"{run.name}, step 2: 4 of 4 held-out samples" in out and f"saved in {path}" in out
    assert "SSIM, data range 1 " in out and "SSIM, data range 2 (as published; flatters)" in out
    assert "distances, precision and recall are by coarse, against held-out pictures\n" in out
    assert max(len(line) for line in out.splitlines() if line.startswith("  ")) < 100  # a terminal's line
    assert f"without fid and kid: FID and KID need the Inception weights, and there is no {tmp_path}" in out
    assert "note: the Fréchet distance of 4 pictures" in out
    saved = json.loads(path.read_text())
    assert saved["scores"].keys() == {"reconstruction", "transfer", "one region"}
    assert f"{saved['scores']['transfer']['transfer_error']:.5g}" in out
    assert saved["step"] == 2 and saved["checkpoint"] == "step-000002.ckpt" and saved["settings"]["size"] == 32
    assert saved["about"]["kernel"] == {"subsets": 1, "subset_size": 4, "seed": 0, "degree": 3}
    assert saved["about"]["ssim"]["kernel_size"] == 11
    assert saved["about"]["segmenter"] == {"file": str(segmenter), "network": "DeepLabV3", "ignored_labels": [0]}
    assert saved["versions"]["torch"] == torch.__version__
    command.save({"scores": {}}, path)
    command.save({"scores": {"transfer": {}}}, path)
    before = [json.loads(path.with_stem(f"{path.stem}-{number}").read_text()) for number in (1, 2)]
    assert before == [saved, {"scores": {}}] and json.loads(path.read_text()) == {"scores": {"transfer": {}}}


def test_from_noise_it_compares_as_score_every_does_or_with_held_out_samples(tmp_path, capsys):
    small = dict(size=16, width=4, latent=4, faces=12, held_out=5)
    run = opening.train(tmp_path, "r3gan-faces", score_every=1, **small)
    for more in ((), ("--against", "held-out"), ("--count", "20")):
        assert command.main([str(run), "--devices", "1", *more]) == 0
    told = capsys.readouterr().out
    assert "12 made, against 12 that it trains on, all of them" in told and "5 of 5 held-out samples" in told
    (path,) = run.glob("evaluation-*-1.json")
    first, second, third = (json.loads(each.read_text()) for each in RunFolder(run).evaluations(int(path.stem[-8:-2])))
    training = json.loads((run / "scores.json").read_text())
    for name in ("feature_distance", "kernel_distance", "precision", "recall"):
        value = first["scores"]["from noise"][name]
        assert training["scores"][f"score/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert training["how"]["true"] == first["true"] == third["true"] != second["true"] == "5 held-out samples"
    assert [each["pictures"] for each in (first, second, third)] == [12, 5, 20]
    names = {each.name: each.value for each in card.scores(RunFolder(run), open_run(str(run)).run, first["step"])}
    for against, found in (("training", third), ("held-out", second)):
        value = found["scores"]["from noise"]["feature_distance"]
        assert names[f"Fréchet distance (not FID), against {against} pictures"] == f"{value:.4g}"
        assert f"distances, precision and recall are by coarse, against {against} pictures" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ignore-labels", "19"), "--ignore-labels 19: the labels are 0 to 18"),
        (("--against", "train"), "--against train is for games that draw from noise"),
        (("--data", "elsewhere"), "run sean-faces do not fit together"),  # its faces are drawn
    ],
)
def test_a_mistake_is_told_in_one_line(options, message, sean_run, capsys):
    assert command.main([str(sean_run), "--devices", "1", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert not list(sean_run.glob("evaluation*"))


@pytest.mark.slow
def test_a_mistake_in_another_process_is_told_in_one_line(sean_run, capfd):
    options = ["--devices", "2", "--accelerator", "cpu", "--segmenter", "nothing.pth"]
    assert command.main([str(sean_run), *options]) == 2
    err = capfd.readouterr().err
    assert "error: score miou: there is no file nothing.pth; bring" in err
    assert err.count("nothing.pth") == 1 and "Traceback" not in err


def test_a_count_takes_so_many_and_where_nothing_is_held_out_of_what_it_trains_on(sean_run, capsys):
    found = opened(sean_run)
    few = scoring.evaluate(found, scores=("rmse",), count=2)
    assert (few["pictures"], few["held_out"]) == (2, 5)
    assert few["scores"] == scoring.evaluate(found, scores=("rmse",), count=2)["scores"]
    assert scoring.evaluate(found, scores=("rmse",), count=50)["pictures"] == 5
    assert "nothing is held out" not in capsys.readouterr().out
    found.run.data.val = None
    scored = scoring.evaluate(found, scores=("rmse",), count=6)
    assert (scored["pictures"], scored["held_out"]) == (6, 0)
    assert capsys.readouterr().out == "nothing is held out: these are samples that it trains on\n"
