"""Many files of `gan.sample RUN files`, which ranks draw together."""

import zipfile

import pytest
import torch

import gan
from gan.app.drawing import opened
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.stylegan import StyleGenerator


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    net = StyleGenerator(8, latent=5, style=6, mapping=1, base=32, most=4).eval()
    write(tmp_path / "style.pkl", {"G_ema": published(net)})
    return tmp_path / "style.pkl"


def drawn(file, to, count, together):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "TOGETHER", together)
        gan.open(file, "cpu").files(to, count, truncation=0.7)


def contents(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.parametrize("count", [5, 8])  # in the last turn the second rank has none, or as many as the first one
def test_two_ranks_write_the_pictures_of_one(count, file, tmp_path, ranks):
    drawn(file, tmp_path / "one.zip", count, 64)
    ranks(2).run(drawn, file, tmp_path / "two.zip", count, 2)
    found = contents(tmp_path / "two.zip")
    assert list(found) == [f"seed{number:06d}.png" for number in range(count)] and len({*found.values()}) == count
    assert found == contents(tmp_path / "one.zip")
