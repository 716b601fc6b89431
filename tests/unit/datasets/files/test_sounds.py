"""Sounds in files: what is found, how they are decoded and cut, and what is refused."""

import numpy
import pytest
import soundfile
import torch

from datasets.augment import Augment
from datasets.files.sounds import QUIET, Sounds
from gan.files.errors import UserError

RATE, LENGTH = 8000, 512


@pytest.fixture
def folder(tmp_path):
    """A file of each kind, some of them in a folder inside."""
    (tmp_path / "inside").mkdir()
    rng = numpy.random.default_rng(0)
    for number, name in enumerate(("a.wav", "b.flac", "c.ogg", "inside/d.wav", "inside/e.wav", "f.wav")):
        soundfile.write(tmp_path / name, 0.5 * rng.uniform(-1, 1, 4000 + number), RATE)
    return tmp_path


def test_a_sound_is_its_numbers_scaled_to_the_published_peak(folder):
    found = Sounds(folder, RATE, 4000)
    assert found.sample_names == [b"a.wav", b"b.flac", b"c.ogg", b"f.wav", b"inside/d.wav", b"inside/e.wav"]
    assert len(found) == 6 and found.lengths == [4000, 4001, 4002, 4005, 4003, 4004]
    read, _ = soundfile.read(folder / "a.wav", dtype="int16")
    wanted = torch.from_numpy(0.95 * read / numpy.abs(read).max()).float()
    assert torch.equal(found[0]["wave"], wanted)
    assert found[1]["wave"].shape == (4000,)


def test_a_part_follows_its_share_and_its_number_alone(folder):
    found, augment = Sounds(folder, RATE, LENGTH), Augment(seed=3, flip=False)
    whole = Sounds(folder, RATE, 4000)[0]["wave"]
    assert torch.equal(found.load_part(0, 0.0)["wave"], whole[:LENGTH])
    assert torch.equal(found.load_part(0, 1 - 2**-24)["wave"], whole[-LENGTH:])
    one, same, other = (augment.load(found, epoch, 0)["wave"] for epoch in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_it_is_decoded_once_and_again_after_it_has_changed(folder, monkeypatch):
    Sounds(folder, RATE, LENGTH)
    soundfile.write(folder / "a.wav", numpy.linspace(-1, 1, 900), RATE)
    read, decoded = [], Sounds._decode
    monkeypatch.setattr(Sounds, "_decode", lambda self, entry: read.append(entry) or decoded(self, entry))
    assert Sounds(folder, RATE, LENGTH).lengths[0] == 900
    assert read == [0]


def test_a_damaged_file_of_the_cache_is_made_again(folder):
    found, wave = Sounds(folder, RATE, 4000), Sounds(folder, RATE, 4000)[0]["wave"]
    (file,) = found.folder.glob("*-0.npy")
    whole = file.read_bytes()
    for place in (0, len(whole) - 1):  # the head, and a number
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        assert torch.equal(Sounds(folder, RATE, 4000)[0]["wave"], wave) and file.read_bytes() == whole
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x40]))
    found._known[0] = [word for number, word in enumerate(found._known[0]) if number != 2]
    assert not torch.equal(found[0]["wave"], wave), "a listing of before has no checksums, and is taken"


def test_other_rates_and_several_channels_become_one(folder):
    time = numpy.arange(16000) / 16000
    tone = numpy.sin(2 * numpy.pi * 440 * time)
    soundfile.write(folder / "a.wav", numpy.stack([tone, 0.5 * tone], 1), 16000, subtype="FLOAT")
    found = Sounds(folder, RATE, 8000)
    assert found.lengths[0] == 8000
    wanted = 0.95 * torch.sin(2 * torch.pi * 440 * torch.arange(8000) / RATE)
    assert (found[0]["wave"] - wanted)[500:-500].abs().max() < 2e-3


def test_what_is_short_ends_in_silence_and_silence_stays(folder):
    soundfile.write(folder / "a.wav", numpy.full(300, 0.25), RATE)
    soundfile.write(folder / "f.wav", numpy.zeros(600), RATE)
    found = Sounds(folder, RATE, LENGTH, least=256)
    assert found[0]["wave"].tolist() == [pytest.approx(0.95)] * 300 + [0] * 212
    assert not found[3]["wave"].any()


def test_broken_and_too_short_files_are_named_together(folder):
    (folder / "b.flac").write_bytes(b"no sound")
    (folder / "c.ogg").write_bytes(b"")
    soundfile.write(folder / "f.wav", numpy.zeros(10), RATE)
    first = "3 of 6 sounds in .*--skip-broken.*b.flac: Format not recognised"
    with pytest.raises(UserError, match=f"(?s){first}.*c.ogg: it is empty.*f.wav: it is too short: 10 .* 256 are n"):
        Sounds(folder, RATE, LENGTH, least=256)
    found = Sounds(folder, RATE, LENGTH, least=256, skip_broken=True)
    assert len(found) == 3 and len(found.problems) == 3


def test_given_spectrograms_go_with_their_part_which_is_not_scaled(folder, tmp_path):
    mels = tmp_path / "mels"
    (mels / "inside").mkdir(parents=True)
    for name in ("a", "b", "c", "inside/d", "inside/e", "f"):
        numpy.save(mels / f"{name}.npy", numpy.tile(numpy.arange(63, dtype=numpy.float32), (1, 4, 1)))
    numpy.save(mels / "f.npy", numpy.ones((4, 5), numpy.float32))
    found = Sounds(folder, RATE, LENGTH, mels=mels, bands=4, hop=64)
    read, _ = soundfile.read(folder / "a.wav", dtype="float32")
    for where in (0.0, 0.3, 0.999):
        item = found.load_part(0, where)
        first = int(item["mel"][0, 0])
        assert item["mel"].shape == (4, 8) and item["mel"][0].tolist() == list(range(first, first + 8))
        assert torch.equal(item["wave"][:500], torch.from_numpy(read[64 * first :][:500]))
    short = found.load_part(3, 0.9)["mel"]
    assert (short[:, :5] == 1).all() and torch.allclose(short[:, 5:], torch.tensor(QUIET))
    (mels / "b.npy").unlink()
    numpy.save(mels / "c.npy", numpy.ones((5, 40), numpy.float32))
    with pytest.raises(UserError, match=r"(?s)2 of 6 sounds.*b\.npy cannot be used.*c\.npy .*\[5, 40\] and not"):
        Sounds(folder, RATE, LENGTH, mels=mels, bands=4, hop=64)


def test_a_folder_without_sounds_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("nothing")
    with pytest.raises(UserError, match=r"there are no sounds in .*\(1 .txt\); give a folder of wav, flac"):
        Sounds(tmp_path, RATE, LENGTH)
