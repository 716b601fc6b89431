"""Two sides of pictures: what a path holds, in pairs or without; and the runs pix2pix, cyclegan and cut on them."""

import os
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim import SGD

from gan.files.errors import UserError
from gan.games.pix2pix import down_by_epochs, half_then_down
from gan.runs.run import made_to
from gan.runs.sides import OnSides, unet_depth
from nets.discriminator import PixelGan
from nets.resnet import ResnetGenerator, UNet
from tests.support import families
from tests.unit.gan.runs.test_pictures import put
from tests.unit.gan.runs.test_runs import small

GRAY = 40  # of all pictures of A; those of B are the brighter, the later their name


def found(path, paired=True, **settings):
    how = {name: settings.pop(name, False) for name in ("backwards", "side_by_side")} | {"paired": paired}
    return OnSides(data=str(path), workers=0, **settings).find(**how)


def fill(root, a, b, count=8, size=(12, 8)):
    for number in range(count):
        put(root / a / f"{number}.png", size, colour=(GRAY,) * 3)
        put(root / b / f"{number}.jpg", size, colour=(100 + 10 * number,) * 3)


def brightness(data):
    return [[round(item[side].double().mean().item()) for side in "ab"] for item in data]


PAIRS = [[GRAY, 100 + 10 * number] for number in range(8)]


@pytest.mark.parametrize(
    "folders",
    ["A B", "set/A set/B", "images targets", "apples pears", "trainA trainB", "A/train B/train", "train/a train/b"],
)
def test_two_folders_are_found_and_pairs_have_the_same_name(tmp_path, folders, capsys):
    fill(tmp_path, *folders.split())
    data = found(tmp_path, held_out=0.0)
    assert brightness(data.train) == PAIRS and data.val is None and data.train.half is None
    names = [os.fsdecode(name).rpartition("/")[2] for name in data.train.sample_names]
    assert names == [f"{number}.{kind}" for kind in ("png", "jpg") for number in range(8)]
    assert folders != "apples pears" or data.train.kinds == ("apples", "pears")
    assert (data.size, data.channels) == ((8, 12), (3, 3))
    said = capsys.readouterr().err
    assert "8 pairs to train on and 0 held out; scaled and cropped to 12x8, RGB" in said
    assert folders != "A B" or ": A to B, 8 pairs" in said


def test_halves_of_a_picture_are_a_pair(tmp_path, capsys):
    for split, count in (("train", 8), ("val", 3), ("test", 2)):
        for number in range(count):
            whole = Image.new("RGB", (24, 8), (GRAY,) * 3)
            whole.paste((100 + 10 * number,) * 3, (12, 0, 24, 8))
            (tmp_path / split).mkdir(exist_ok=True)
            whole.save(tmp_path / split / f"{number}.png")
    data = found(tmp_path, side_by_side=True)
    assert brightness(data.train) == PAIRS and brightness(data.val) == PAIRS[:3]
    assert data.size == (8, 12)
    said = capsys.readouterr().err
    assert "halves of each picture, left to right, 8 pairs to train on and 3 held out" in said
    assert "; 2 pictures of test are not used; " in said
    back = found(tmp_path, backwards=True, side_by_side=True).train
    assert brightness(back) == [pair[::-1] for pair in PAIRS] and (data.train.half, back.half) == (0, 1)
    assert back.kinds == ("right halves", "left halves")


def test_pictures_that_do_not_look_like_pairs_are_halved_only_if_that_is_typed(tmp_path):
    for number, width in enumerate((20, 34, 32)):
        put(tmp_path / f"{number}.png", (width, 16))
    with pytest.raises(UserError, match="not say which pictures are of which of two kinds; give two folders such"):
        found(tmp_path, paired=False)
    with pytest.raises(UserError, match=r"^1 of 3 training .* such as .*0\.png; .* type --side-by-side true, else "):
        found(tmp_path, held_out=0.0)
    assert len(found(tmp_path, held_out=0.0, side_by_side=True).train) == 3
    with made_to("look"):  # a run that was trained on them
        assert len(found(tmp_path, held_out=0.0).train) == 3
    (tmp_path / "0.png").unlink()
    assert len(found(tmp_path, held_out=0.0).train) == 2


def test_side_by_side_is_refused_where_there_are_two_folders(tmp_path):
    fill(tmp_path, "A", "B")
    with pytest.raises(UserError, match=f"^{tmp_path} has folders of A and of B; leave --side-by-side out$"):
        found(tmp_path, side_by_side=True)
    with made_to("resume"):
        assert len(found(tmp_path, held_out=0.0, side_by_side=True).train) == 8


def test_halves_are_those_of_the_picture_as_the_camera_was_held(tmp_path):
    whole, turned = Image.new("RGB", (24, 8), (GRAY,) * 3), Image.Exif()
    whole.paste((100,) * 3, (12, 0, 24, 8))
    turned[0x0112] = 6
    for number in range(2):
        whole.transpose(Image.Transpose.ROTATE_90).save(tmp_path / f"{number}.png", exif=turned)
    assert brightness(found(tmp_path, held_out=0.0, side_by_side=True).train) == [[GRAY, 100]] * 2


def test_what_has_no_partner_is_named_and_so_are_two_files_of_one_name(tmp_path):
    fill(tmp_path, "A", "B")
    put(tmp_path / "B" / "3.png")
    with pytest.raises(UserError, match=r"3\.jpg and .*3\.png have the same name; remove one"):
        found(tmp_path)
    assert len(found(tmp_path, paired=False, held_out=0.0).train.b) == 9
    (tmp_path / "B" / "3.png").rename(tmp_path / "A" / "more.png")
    with pytest.raises(UserError, match=r"1 pictures in .* have no partner(?s:.*)more of A"):
        found(tmp_path)
    assert len(found(tmp_path, skip_broken=True, held_out=0.0).train) == 8
    assert len(found(tmp_path, paired=False, held_out=0.0).train) == 9
    for each in (tmp_path / "A").iterdir():
        each.rename(each.with_stem(f"other {each.stem}"))
    with pytest.raises(UserError, match=r"no picture in .* has a partner of the same name; without pairs, train"):
        found(tmp_path, skip_broken=True)


def test_other_folders_are_left_out_and_said_and_a_broken_picture_takes_its_partner_with_it(tmp_path, capsys):
    fill(tmp_path, "A", "B")
    put(tmp_path / "both" / "1.png")
    (tmp_path / "A" / "3.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"3\.png"):
        found(tmp_path)
    data = found(tmp_path, skip_broken=True, held_out=0.0)
    assert brightness(data.train) == [pair for number, pair in enumerate(PAIRS) if number != 3]
    said = capsys.readouterr().err
    assert "; 1 pictures in other folders left out; scaled and cropped" in said
    assert f"\n1 broken or tiny left out:\n  {tmp_path / 'A' / '3.png'}: it is none of" in said


def test_unpaired_pictures_meet_at_random_and_the_same_ones_on_any_number_of_ranks(tmp_path):
    fill(tmp_path, "trainA", "trainB")
    for name in ("trainA/more", "testA/0", "testA/1", "testB/0"):
        put(tmp_path / f"{name}.png", (12, 8), colour=(GRAY,) * 3)
    data = found(tmp_path, paired=False)
    assert len(data.train) == 9 and len(data.val) == 2
    loader = data.data(3).train_dataloader()
    loader.sampler.shuffle = False

    def epoch(number):
        loader.sampler.set_epoch(number)
        return torch.cat([batch["b"].mean((1, 2, 3)) for batch in loader])

    one, other = epoch(0), epoch(1)
    assert not torch.equal(one, other) and not torch.equal(one, one.sort().values)
    again = [data.train.load_augmented(loader.dataset.augment, 0, index)["b"].double().mean() for index in range(9)]
    assert torch.allclose(torch.stack(again).float() / 127.5 - 1, one, atol=1e-5)


def test_parts_of_large_pictures_are_of_one_scale_and_at_one_place_in_both_of_a_pair(tmp_path, capsys):
    """A pixel's red is its column and its green its row, so a part says where it was."""
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate([(128, 64)] * 4 + [(64, 192)] * 4):
        columns, rows = np.meshgrid(np.arange(width), np.arange(height))
        whole = Image.fromarray(np.stack([columns, rows, rng.integers(0, 9, rows.shape)], 2).astype(np.uint8))
        for side, scale in (("A", 1), ("B", 2)):
            (tmp_path / side).mkdir(exist_ok=True)
            size = scale * width, scale * height
            whole.resize(size, Image.Resampling.NEAREST).save(tmp_path / side / f"{number}.png")
    data = found(tmp_path, held_out=0.3, load_size=64, size=32)
    assert "scaled to 64 pixels on the shorter side; trained on random parts of 32x32" in capsys.readouterr().err
    assert {tuple(shape) for shape in data.train.a.pictures.shapes.tolist()} <= {(64, 128), (192, 64)}
    batches = data.data(1).train_dataloader()
    places = []
    for epoch in range(6):
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            a, b = (((batch[side] + 1) * 127.5).round() for side in "ab")
            assert a.shape == (1, 3, 32, 32) and (a - b)[:, :2].abs().max() <= 1
            across, down = (row.flatten().sort().values for row in a[0, :2])
            assert across[-1] - across[0] == 31 and down[-1] - down[0] == 31, "pixels of the picture, not enlarged"
            places.append((int(across[0]), int(down[0])))
    assert len(set(places)) > 20 and max(x for x, _ in places) > 64 and max(y for _, y in places) > 96
    held = data.val[0]["a"].double()
    assert held.shape == (3, 32, 32) and held[:2, 0, 0].tolist() in ([48, 16], [16, 80]), "the middle"
    paired, alone = (found(tmp_path, each, load_size=64, size=32).train for each in (True, False))
    augment = data.data(1).train_dataloader().dataset.augment
    assert torch.equal(augment.load(paired, 3, 1)["a"], augment.load(alone, 3, 1)["a"])
    again = found(tmp_path, load_size=64, size=32).train.a.pictures
    again._rows[:] = -1  # as where the disk has no room
    assert all(torch.equal(again[row]["image"], paired.a.pictures[row]["image"]) for row in range(len(again)))


def test_parts_that_do_not_fit_or_pairs_of_two_shapes_are_refused(tmp_path):
    fill(tmp_path, "A", "B", size=(24, 12))
    with pytest.raises(UserError, match="parts of 24x8 do not fit into pictures of --load-size 16; type a smaller"):
        found(tmp_path, load_size=16, size="24x8")
    with pytest.raises(UserError, match="takes no parts of pictures, so --load-size does nothing; leave one out"):
        found(tmp_path, load_size=16, size=8, crop=False)
    put(tmp_path / "B" / "3.jpg", (20, 20))
    with pytest.raises(UserError, match=r"1 pairs in .* are pictures of two shapes(?s:.*)3.png and B/3.jpg"):
        found(tmp_path, load_size=12, size=8, held_out=0.0)
    assert len(found(tmp_path, paired=False, load_size=12, size=8, held_out=0.0).train) == 8
    assert len(found(tmp_path, fit="stretch", load_size=12, size=8, held_out=0.0).train) == 8


def test_what_is_no_two_sides_is_refused(tmp_path):
    put(tmp_path / "flat" / "1.png", (8, 8))
    with pytest.raises(UserError, match=r"^[^:]*1\.png is not wide enough to be two pictures"):
        found(tmp_path / "flat")
    fill(tmp_path / "half", "testA", "testB")
    with pytest.raises(UserError, match="no pictures to train on of the side A"):
        found(tmp_path / "half")


# ---- pix2pix ----


@pytest.mark.parametrize(
    ("size", "name", "depth"),
    [
        *(((512, 512), "unet", 9), ((64, 96), "unet", 5), ((8, 8), "unet", 3), ((256, 512), "unet_128", 7)),
        *(((100, 300), "unet", "304x96"), ((64, 64), "unet_256", "256x256"), ((9, 9), "unet", "8x8")),
    ],
)
def test_a_u_net_halves_as_often_as_the_size_allows_or_its_name_says_or_a_size_that_fits_is_named(size, name, depth):
    if isinstance(depth, int):
        assert unet_depth(size, name) == depth
    else:
        with pytest.raises(UserError, match=rf"type --size {depth}, or another --network"):
            unet_depth(size, name)


def test_networks_losses_and_directions_are_typed():
    game = small("pix2pix").game
    assert isinstance(game.generator, UNet) and game.generator.depth == 4
    typed = dict(network="resnet_6blocks", judge="pixel", loss="wgangp", norm="instance", direction="BtoA")
    run = small("pix2pix", channels=1, held_out=0.0, **typed)
    assert isinstance(run.game.generator, ResnetGenerator) and isinstance(run.game.discriminator, PixelGan)
    assert run.game.loss == "wgangp" and {*run.game.translations()} == {"BtoA"}
    batch = next(iter(run.data.train_dataloader()))
    assert batch["a"].shape == (2, 1, 16, 16) and batch["a"].mean() > batch["b"].mean()  # B is brighter
    assert not run.scores  # nothing is held out


def test_the_length_is_the_published_one_or_typed():
    whole = partial(small, "pix2pix", held_out=0.0)
    run = whole(max_steps=None, batch_size=1)
    assert run.max_steps == 200 * 16
    assert run.game.decay.keywords["lr_lambda"].func is down_by_epochs
    run = whole(max_steps=None, batch_size=4, epochs=3, falling_epochs=1)
    assert run.max_steps == 4 * 4 and run.batch_size == 4
    run = whole(max_steps=7)
    assert run.max_steps == 7 and run.game.decay.keywords["lr_lambda"].func is half_then_down


# ---- cyclegan and cut ----


@pytest.mark.parametrize(("name", "figures"), [("cyclegan", "pix2pix.pt"), ("cut", "cut.pt")])
def test_rates_of_the_epochs_are_the_published_ones(name, figures):
    wanted = families.load(figures)["lr_per_epoch"]
    run = small(name, batch_size=8, max_steps=None, held_out=0.0)
    batches = 2
    assert run.max_steps == batches * len(wanted)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.game.rate)
    schedule, found = run.game.decay(optimizer), []
    for _ in range(run.max_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert families.difference(found[::batches], wanted) < 1e-9
    assert found[::batches] == found[batches - 1 :: batches]


def test_configurations_are_the_published_ones():
    whole = partial(small, "cut", max_steps=None, batch_size=8, held_out=0.0)
    cut, fast = (whole(config_=name) for name in ("cut", "fastcut"))
    assert (cut.game.nce, cut.game.identity, cut.game.flips, cut.max_steps) == (1, True, False, 2 * 400)
    assert (fast.game.nce, fast.game.identity, fast.game.flips, fast.max_steps) == (10, False, True, 2 * 200)
    both = whole(config_="fastcut", epochs=5, falling_epochs=0, nce=2.0)
    assert (both.game.nce, both.max_steps) == (2, 10)


@pytest.mark.parametrize(("name", "files"), [("cyclegan", "G_A G_B D_A D_B"), ("cut", "G F D"), ("pix2pix", "G D")])
def test_published_weights_are_written_and_read(name, files, tmp_path, capsys):
    game, other = small(name).game, small(name, seed=2).game
    for file in other.published():
        file.write(tmp_path / file.name)
    assert [file.name for file in other.published()] == [f"latest_net_{which}.pth" for which in files.split()]
    mine = small(name, from_=str(tmp_path)).game
    assert f"weights: latest_net_{files.split()[0]}.pth" in capsys.readouterr().err
    weights = [dict(each.named_parameters()) for each in (game, other, mine)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[2].items())
    assert not all(torch.equal(value, weights[0][key]) for key, value in weights[2].items())


@pytest.mark.parametrize("file", ["horse2zebra.pth", "latest_net_G.pth"])
def test_a_released_generator_is_read_alone(file, tmp_path):
    other = small("cyclegan", seed=2).game.generators["to_b"]
    torch.save(other.state_dict(), tmp_path / file)
    mine = small("cyclegan", from_=str(tmp_path / file if "2" in file else tmp_path)).game
    x = torch.randn(1, 3, 16, 16)
    assert torch.equal(mine.generators["to_b"](x), other(x))
    assert not torch.equal(mine.generators["to_a"](x), other(x))


def test_translations_are_those_of_the_generators():
    x = torch.randn(1, 3, 18, 13)
    game = small("cyclegan").game
    ways = game.translations()
    assert {*ways} == {"AtoB", "BtoA"}
    assert torch.equal(ways["BtoA"].paint(x), game.generators["to_a"](x)) and ways["AtoB"].channels == 3
    game = small("cut").game
    (way,) = game.translations().values()
    assert torch.equal(way.paint(x), game.generator(x))


def test_both_ways_need_as_many_channels(tmp_path):
    for number in range(4):
        put(tmp_path / "A" / f"{number}.png", (16, 16))
        put(tmp_path / "B" / f"{number}.png", (16, 16), mode="L")
    with pytest.raises(UserError, match="pictures of 3 and of 1 channels; type --channels 3"):
        small("cyclegan", data=str(tmp_path))
    assert small("cyclegan", data=str(tmp_path), channels=1).game.translations()["AtoB"].channels == 1
