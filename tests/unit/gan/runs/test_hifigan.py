"""HiFi-GAN on sounds of a person's own: published configurations, published files there and back, and refusals."""

import json
import re
from pathlib import Path

import numpy
import pytest
import soundfile
import torch

from gan import export, sample
from gan.files.errors import UserError
from nets.hifigan import HifiGenerator
from nets.published.files import published_state
from nets.published.hifigan import CONFIGS, networks
from tests.support import opening
from tests.unit.gan.runs.test_runs import settings_of, small


def test_configurations_have_the_published_sizes():
    """13.92, 0.92 and 1.46 million numbers in the generators, by table 1 of the paper; lengths of weight norm apart."""
    for config, wanted in (("V1", 13.92), ("V2", 0.92), ("V3", 1.46)):
        with torch.device("meta"):
            generator, mel = networks(CONFIGS[config], config)
            default = [p.shape for p in HifiGenerator().parameters()]
        kept = [p.numel() for name, p in generator.named_parameters() if not name.endswith("original0")]
        assert sum(kept) / 1e6 == pytest.approx(wanted, abs=0.01)
        assert (mel.rate, mel.bands, mel.window, mel.hop, mel.top) == (22050, 80, 1024, 256, 8000)
        assert small("hifigan", config_=config).game.whole_mel.top is None
        shapes = [p.shape for p in generator.parameters()]
        assert (shapes == default) == (config == "V1")


def test_a_batch_is_of_segments_and_another_rate_lowers_the_highest_band(capsys):
    run = small("hifigan", hertz=11025)
    assert re.search(r"held out; decoded into \S+\.gan-cache, 1 MB$", capsys.readouterr().err, re.MULTILINE)
    assert next(iter(run.data.train_dataloader()))["wave"].shape == (2, 1024)
    assert run.game.mel.top is None
    assert run.words == "config V1, hertz 11025, segment 1024, width 0.02, rate 0.0002, decay 0.999, batch-size 2"
    assert run.game.show(next(iter(run.data.val_dataloader())))["generated"].samples.shape == (2, 1024)


def test_it_is_fine_tuned_on_spectrograms_of_another_network(tmp_path):
    settings = settings_of("hifigan")
    for sound in Path(settings["data"]).glob("*.wav"):
        numpy.save(tmp_path / f"{sound.stem}.npy", numpy.zeros((80, 12), numpy.float32))
    opening.train(tmp_path / "runs", "hifigan", config_="V3", mels=tmp_path, **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return opening.train(tmp_path_factory.mktemp("runs"), "hifigan", config_="V3", **settings_of("hifigan"))


def test_published_files_are_written_and_read(trained, tmp_path):
    assert export.main([str(trained), "--published", "--card", "--to", str(tmp_path)]) == 0
    drawer = torch.load(tmp_path / "g_00000000", weights_only=True)["generator"]
    both = torch.load(tmp_path / "do_00000000", weights_only=True)
    assert both.keys() == {"mpd", "msd", "optim_g", "optim_d", "steps", "epoch"}
    assert "resblocks.0.convs.0.weight_g" in drawer and "discriminators.0.convs.0.weight_orig" in both["msd"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["resblock"], config["upsample_rates"], config["fmax"]) == ("2", [8, 8, 4], 8000)
    assert (config["segment_size"], config["batch_size"]) == (1024, 2)
    assert config["networks"].keys() == {"generator", "discriminators"}  # of the card, which has the same file
    (tmp_path / "g_00000000").rename(tmp_path / "generator_v3")
    for place in (tmp_path, tmp_path / "generator_v3"):
        game = small("hifigan", from_=str(place), seed=5).game
        assert all(torch.equal(value, drawer[key]) for key, value in published_state(game.generator).items())
        judges = published_state(game.discriminators.msd)
        same = [torch.equal(value, both["msd"][key]) for key, value in judges.items() if key.endswith("weight_orig")]
        assert all(same) == (place == tmp_path) and same
    with pytest.raises(UserError, match="generator_v3 has other networks than are made here"):
        small("hifigan", from_=str(tmp_path), config_="V1")


def test_sounds_and_spectrograms_of_a_folder_become_sounds(trained, tmp_path, capsys):
    inputs, out = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    soundfile.write(inputs / "a.flac", numpy.linspace(-0.5, 0.5, 16000), 44100)
    soundfile.write(inputs / "short.wav", numpy.zeros(100), 22050)
    numpy.save(inputs / "b.npy", numpy.zeros((80, 7), numpy.float32))
    assert sample.main([str(trained), "--inputs", str(inputs), "--out", str(out)]) == 2
    assert "short.wav: it is too short" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["a.wav", "b.wav"]
    assert soundfile.info(out / "a.wav").frames == 8000 // 256 * 256
    assert soundfile.info(out / "b.wav").frames == 7 * 256
    assert sample.main([str(trained), "--inputs", str(inputs / "a.flac"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "a.wav").read_bytes() == (out / "a.wav").read_bytes()
    assert sample.main([str(trained), "--inputs", str(inputs), "--direction", "AtoB"]) == 2
    assert "sounds have no direction" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hop_size": 300}, "hop_size the product of upsample_rates"),
        ({"fmax_for_loss": 8000}, "and fmax_for_loss null"),
        ({"resblock_kernel_sizes": 3}, "is no configuration of HiFi-GAN"),
        ({"upsample_rates": None}, "is no configuration of HiFi-GAN"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["V3"] | change))
    with pytest.raises(UserError, match=message):
        small("hifigan", config_=str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        small("hifigan", config_=str(path))
