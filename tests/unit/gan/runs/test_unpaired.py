"""CycleGAN and CUT on two folders: published learning rates, weights and configurations, and what is refused."""

import pytest
import torch
from torch.optim import SGD

from gan.files.errors import UserError
from gan.runs import build
from tests.support import families
from tests.unit.gan.runs.test_pictures import put

SMALL = {"width": 2, "layers": 2, "workers": 0, "size": 16, "seed": 1}


@pytest.fixture
def folders(tmp_path):
    for number in range(4):
        put(tmp_path / "data" / "A" / f"{number}.png", (16, 16), colour=(40 * number, 0, 0))
        put(tmp_path / "data" / "B" / f"{number}.png", (16, 16), colour=(0, 0, 40 * number))
    return tmp_path / "data"


def made(folders, name, **settings):
    return build(name, data=str(folders), held_out=0.25, **{**SMALL, **settings})


@pytest.mark.parametrize(("name", "figures"), [("cyclegan", "pix2pix.pt"), ("cut", "cut.pt")])
def test_rates_of_the_epochs_are_the_published_ones(folders, name, figures):
    wanted = families.load(figures)["lr_per_epoch"]
    run = made(folders, name, batch_size=1)
    batches = 3
    assert run.max_steps == batches * len(wanted)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.game.rate)
    schedule, found = run.game.decay(optimizer), []
    for _ in range(run.max_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert families.difference(found[::batches], wanted) < 1e-9
    assert found[::batches] == found[batches - 1 :: batches]


def test_configurations_are_the_published_ones(folders):
    cut, fast = (made(folders, "cut", config_=name) for name in ("cut", "fastcut"))
    assert (cut.game.nce, cut.game.identity, cut.game.flips, cut.max_steps) == (1, True, False, 3 * 400)
    assert (fast.game.nce, fast.game.identity, fast.game.flips, fast.max_steps) == (10, False, True, 3 * 200)
    both = made(folders, "cut", config_="fastcut", epochs=5, falling_epochs=0, nce=2.0)
    assert (both.game.nce, both.max_steps) == (2, 15)
    assert made(folders, "cyclegan", max_steps=7).max_steps == 7


@pytest.mark.parametrize(("name", "files"), [("cyclegan", ("G_A", "G_B", "D_A", "D_B")), ("cut", ("G", "F", "D"))])
def test_published_weights_are_written_and_read(folders, name, files, tmp_path, capsys):
    game, other = made(folders, name).game, made(folders, name, seed=2).game
    (tmp_path / "theirs").mkdir()
    for file in other.published():
        file.write(tmp_path / "theirs" / file.name)
    assert {file.name for file in other.published()} == {f"latest_net_{which}.pth" for which in files}
    assert {*torch.load(tmp_path / "theirs" / f"latest_net_{files[0]}.pth")} >= {"model.1.weight", "model.1.bias"}
    mine = made(folders, name, from_=str(tmp_path / "theirs")).game
    assert f"weights: latest_net_{files[0]}.pth" in capsys.readouterr().err
    weights = [dict(each.named_parameters()) for each in (game, other, mine)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[2].items())
    assert not all(torch.equal(value, weights[0][key]) for key, value in weights[2].items())


def test_a_released_generator_is_read_alone(folders, tmp_path):
    other = made(folders, "cyclegan", seed=2).game.generators["to_b"]
    torch.save(other.state_dict(), tmp_path / "horse2zebra.pth")
    mine = made(folders, "cyclegan", from_=str(tmp_path / "horse2zebra.pth")).game
    x = torch.randn(1, 3, 16, 16)
    assert torch.equal(mine.generators["to_b"](x), other(x))
    assert not torch.equal(mine.generators["to_a"](x), other(x))


def test_translations_are_those_of_the_generators(folders):
    x = torch.randn(1, 3, 18, 13)
    game = made(folders, "cyclegan").game
    ways = game.translations()
    assert {*ways} == {"AtoB", "BtoA"}
    assert torch.equal(ways["BtoA"].paint(x), game.generators["to_a"](x)) and ways["AtoB"].channels == 3
    game = made(folders, "cut").game
    (way,) = game.translations().values()
    assert torch.equal(way.paint(x), game.generator(x))


def test_what_cannot_be_is_refused(folders):
    with pytest.raises(UserError, match="--config cat is not known; type one of cut, fastcut"):
        made(folders, "cut", config_="cat")
    with pytest.raises(UserError, match="type --blocks 5 or more"):
        made(folders, "cut", blocks=4)
    for number in range(4):
        put(folders / "B" / f"{number}.png", (16, 16), mode="L", colour=40 * number)
    with pytest.raises(UserError, match="pictures of 3 and of 1 channels; type --channels 3"):
        made(folders, "cyclegan")
    assert made(folders, "cyclegan", channels=1).game.translations()["AtoB"].channels == 1
