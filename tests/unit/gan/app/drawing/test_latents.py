"""Latent files: they come back to the bit, and what is no such file is refused."""

from pathlib import Path

import pytest
import torch

from gan.app.drawing.latents import Latent, noise_maps
from gan.files.errors import UserError
from nets.stylegan import StyleGenerator


def generator(style=6, size=16):
    return StyleGenerator(size, latent=5, style=style, mapping=2, base=64, most=8).eval()


@pytest.fixture
def latent():
    torch.manual_seed(0)
    maps = {name: torch.randn_like(each) for name, each in noise_maps(generator()).items()}
    return Latent(torch.randn(6, 6), maps, ("001-faces, step 7", "me.pkl"))


def test_a_latent_comes_back_to_the_bit(latent, tmp_path):
    latent.save(tmp_path / "new" / "me.pt")
    again = Latent.load(tmp_path / "new" / "me.pt", generator())
    assert torch.equal(again.w, latent.w)
    assert again.maps.keys() == latent.maps.keys() and again.found_in == latent.found_in
    assert all(torch.equal(again.maps[name], latent.maps[name]) for name in latent.maps)


def test_a_file_from_before_sources_were_kept_is_read(latent, tmp_path):
    Latent(latent.w, latent.maps).save(tmp_path / "me.pt")
    saved = torch.load(tmp_path / "me.pt")
    del saved["found_in"]
    torch.save(saved, tmp_path / "me.pt")
    assert Latent.load(tmp_path / "me.pt", generator()).found_in == ()


def test_every_damaged_byte_is_found(latent, tmp_path):
    path = tmp_path / "me.pt"
    latent.save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            again = Latent.load(path, generator())
        except UserError as error:
            assert "me.pt' is damaged" in str(error) or "me.pt' cannot be read" in str(error)
        else:  # a byte that nobody reads
            assert torch.equal(again.w, latent.w)
            assert all(torch.equal(again.maps[name], latent.maps[name]) for name in latent.maps)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    saved = torch.load(path)
    saved["w"][0, 0] += 1
    torch.save(saved, path)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (cut, "cannot be read as a latent file"),
        (flip, "me.pt' is damaged: it holds no latent; make one with"),
        (lambda path: path.write_text("no"), "cannot be read as a latent file"),
        (lambda path: torch.save({"codes": torch.zeros(1)}, path), "it holds no latent; make one with"),
        (lambda path: torch.save([torch.zeros(1)], path), "it holds no latent; make one with"),
        (lambda path: torch.save({"w": 1, "maps": [], "source": 2, "crc32": 3}, path), "it holds no latent"),
        (lambda path: torch.save({"w": Path("x")}, path), "holds more than tensors and plain values"),
        (Path.unlink, "cannot be read as a latent file .No such file"),
    ],
)
def test_damaged_and_foreign_files_are_refused(latent, tmp_path, deed, said):
    path = tmp_path / "me.pt"
    latent.save(path)
    deed(path)
    with pytest.raises(UserError, match=said):
        Latent.load(path, generator())


@pytest.mark.parametrize("other", [generator(style=7), generator(size=32)])
def test_a_latent_of_another_network_is_refused(latent, tmp_path, other):
    latent.save(tmp_path / "me.pt")
    with pytest.raises(UserError, match="has styles of length 6 for 6 layers, and this network has"):
        Latent.load(tmp_path / "me.pt", other)
