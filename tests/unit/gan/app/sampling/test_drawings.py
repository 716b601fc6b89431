"""What is drawn from seeds by a run or a published file, as the command and `gan.open` draw it."""

import base64
import inspect
import re
import shutil
from copy import copy
from io import BytesIO
from pathlib import Path
from typing import get_args

import av
import numpy as np
import pytest
import torch
from PIL import Image

import gan
from gan import sample
from gan.app.sampling import sheet
from gan.app.sampling.drawer import MOST, Drawer, parse_numbers, parse_numbers_once
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.grids import LINE, MARGIN, TITLE, picture
from gan.app.sampling.paintings import Paintings
from gan.app.sampling.shown import Shown
from gan.files.errors import UserError
from gan.games.from_noise import noise_of
from nets.biggan import BigDiscriminator, BigGenerator
from nets.r3 import R3Generator
from tests.support import drawers, opening
from tests.support.drawers import generator, publish


@pytest.mark.parametrize("name", ["stylegan-faces", "wgan-gp-faces", "r3 file"])
def test_a_seed_gives_the_same_picture_whatever_the_batch(name, tmp_path):
    torch.manual_seed(0)
    if name.endswith("faces"):
        drawer = Drawer.of_run(opening.untrained(name, batch_size=4, **drawers.SMALL))
    else:
        drawer = Drawer.of_networks(drawers.publish(tmp_path / "r3.pkl", G=R3Generator(5, (8, 4), classes=3)), "cpu")
    drawer.net.double()
    seeds = [7, 3, *range(MOST + 2)]
    together = drawer.pictures(seeds)
    assert together.shape == (len(seeds), drawer.channels, *drawer.size)
    for row in (0, 1, 9, len(seeds) - 1):
        torch.testing.assert_close(drawer.pictures([seeds[row]]), together[row : row + 1])
    assert not torch.allclose(together[0], together[1])


class Mirror(torch.nn.Module):
    """Its pictures are its latents."""

    latent = 4

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, z):
        return self.one * z.view(-1, 1, 2, 2)


def test_noise_between_two_seeds_is_as_long_as_theirs():
    drawer = Drawer(Mirror(), "mirror", latent_of=lambda seed, length: torch.eye(length)[seed])
    halfway = drawer.between((0, 1), [0.5]).flatten()
    torch.testing.assert_close(halfway, torch.tensor([0.5, 0.5, 0, 0]).sqrt())


# ---- BigGAN's files ----

SHARED = dict(size=(64, 64), latent=25, classes=3, shared=4, hierarchical=True, attention=[16], channels=4)


@pytest.mark.parametrize("rule", [dict(latent=6), dict(latent=6, classes=3), SHARED])
def test_a_published_file_of_biggan_draws_alone(rule, tmp_path):
    torch.manual_seed(0)
    net = BigGenerator(width=2, **rule).eval()
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, tmp_path / "G_ema.pth")
    drawer = gan.open(tmp_path / "G_ema.pth", device="cpu").drawer
    labels = torch.eye(3)[[1, 2]] if net.classes else None
    wanted = net(torch.stack([noise_of(seed, net.latent) for seed in (1, 2)]), labels)
    assert torch.equal(drawer.pictures([1, 2]), wanted) and drawer.channels == net.channels


BY_NAME = r"has not the weights of .* or BigGAN, or VQGAN's autoencoder .'blocks.0.0.bn1.gain.weight'"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (BigDiscriminator(width=2).state_dict(), BY_NAME),
        ({"Zencoder.model.1.weight": torch.zeros(1)}, "other networks are for gan.fit --from$"),
    ],
)
def test_what_is_no_generator_is_refused(state, words, tmp_path):
    torch.save(state, tmp_path / "latest_net_G.pth")
    with pytest.raises(UserError, match=words):
        gan.open(tmp_path / "latest_net_G.pth", device="cpu")


def test_standing_statistics_are_means_over_batches_and_change_nothing_else(tmp_path, capsys):
    torch.save(BigGenerator(width=2, latent=6, classes=3).state_dict(), tmp_path / "G_ema.pth")
    drawer = gan.open(tmp_path / "G_ema.pth", device="cpu").drawer
    drawer.net.double()
    norm, seen = drawer.net.output_layer[0], []
    norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    before = {name: value.clone() for name, value in drawer.net.state_dict().items()}
    drawer.stand(3)
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(norm.stored_mean, torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0))
    torch.testing.assert_close(norm.stored_var, torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0))
    moved = {name for name, value in drawer.net.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[2] for name in moved} == {"stored_mean", "stored_var"}
    assert not any(module.training for module in drawer.net.modules())
    drawers.publish(tmp_path / "r3.pkl", G=R3Generator(5, (8, 4)))
    typed = ["--seeds", "0", "--standing", "2", "-o", str(tmp_path / "a.png")]
    assert [sample.main([str(tmp_path / name), *typed]) for name in ("G_ema.pth", "r3.pkl")] == [0, 2]
    assert "r3.pkl has no standing statistics, which BigGAN's networks have" in capsys.readouterr().err


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of published files, and their networks: with transparency, with classes."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    nets = dict(style=generator(), clear=generator(channels=4), both=generator(classes=2))
    nets["r3"] = R3Generator(5, (8, 4), classes=3)
    for name in ("style", "both"):
        nets[name].mapping.w_avg.normal_()
    for name, net in nets.items():
        publish(folder / f"{name}.pkl", G_ema=net)
    return folder, nets


@pytest.fixture
def files(written, here):
    """The networks, whose files are in the current folder."""
    shutil.copytree(written[0], here, dirs_exist_ok=True)
    return written[1]


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def draw(*words):
    assert sample.main([*map(str, words), "--device", "cpu"]) == 0


def test_a_grid_has_the_picture_that_the_published_code_draws_of_each_seed(files, tmp_path):
    how = ("--truncation", "0.5", "--cutoff", "3")
    draw("both.pkl", "--seeds", "3,7-8", *how, "--singles")
    name = "both-seeds-3_7-8-truncation-0.5-cutoff-3"
    z = torch.from_numpy(np.random.RandomState(7).randn(1, 5)).float()
    with torch.no_grad():
        wanted = np.asarray(picture(files["both"](z, torch.eye(2)[[1]], psi=0.5, cutoff=3)[0]))
    grid = pixels(f"{name}.png")
    assert grid.shape == (64 + LINE, 192, 3) and np.array_equal(grid[:64:4, 64:128:4], wanted)
    assert all((grid[64:, left : left + 64] < 99).any() for left in (0, 64, 128))  # each seed is written
    assert np.array_equal(pixels(f"{name}/seed0007.png"), wanted)
    draw("both.pkl", "--seeds", 3, 7, 8, *how, "-o", "same.png")
    assert np.array_equal(pixels("same.png"), grid)


def test_classes_are_drawn_in_turn_or_by_their_number(files):
    draw("r3.pkl", "--seeds", 1, "-o", "one.png")
    draw("r3.pkl", "--seeds", 1, "--class", 1, "-o", "same.png")
    draw("r3.pkl", "--seeds", 1, "--class", 2, "-o", "other.png")
    one, same, other = (pixels(f"{name}.png") for name in ("one", "same", "other"))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_a_class_may_be_called_by_its_name(files):
    opened = gan.open("r3.pkl", "cpu")
    opened.drawer.class_names = ("cat", "dog", "2")
    same = [opened.sample([4], label=label)[0].tobytes() for label in ("dog", 1, "1")]
    assert same == same[:1] * 3
    named, plain = opened.sample([4, 6]), opened.sample([4, 6], label="dog")
    assert named.titles == ["4 dog", "6 cat"] and not plain.titles and [*named.singles] == ["seed0004", "seed0006"]
    assert named.image.size == plain.image.size and named.image.tobytes() != plain.image.tobytes()
    with pytest.raises(UserError, match="there is no class 'cow'; type label= and a number from 0 to 2, or a name"):
        opened.sample([4], label="cow")
    assert copy(opened).title == opened.title and not hasattr(opened, "_repr_html_")  # whose names are no actions


def test_in_a_mix_each_layer_has_the_style_of_the_row_or_of_the_column(files):
    opened = gan.open("style.pkl", "cpu")
    rows, column = opened.sample("0,1"), opened.sample("5")
    for layers, wanted in (([], [*rows]), ("0-5", [*column, *column])):
        assert [each.tobytes() for each in opened.mix("0,1", 5, layers)] == [each.tobytes() for each in wanted]
    draw("style.pkl", "mix", "--rows", 1, "--columns", 5, 0, "--layers", 1, 3, "--truncation", "0.5", "--singles")
    w = opened.drawer.w_of([1], truncation=0.5)
    w[:, [1, 3]] = opened.drawer.w_of([5], truncation=0.5)[:, [1, 3]]
    name = "style-mix-rows-1-columns-5_0-layers-1_3-truncation-0.5"
    assert np.array_equal(pixels(f"{name}/1-with-5.png"), np.asarray(picture(opened.drawer.from_w(w)[0])))
    assert pixels(f"{name}.png").shape[0] == TITLE + MARGIN + 2 * (128 + MARGIN)


@pytest.mark.parametrize(("name", "how"), [("style", {"truncation": 0.5}), ("r3", {}), ("clear", {})])
def test_an_interpolation_passes_through_its_seeds(files, name, how):
    opened = gan.open(f"{name}.pkl", "cpu")
    walk = opened.interpolate([3, 5, 9], frames=4, **how)
    frames = [np.asarray(frame, int) for frame in walk]
    for place, seed in ((0, 3), (3, 5), (6, 9)):
        (wanted,) = opened.drawer.pictures([seed], truncation=how.get("truncation", 1.0))
        assert np.abs(frames[place] - np.asarray(picture(wanted, transparent=True), int)).max() <= 1
    assert len({frame.tobytes() for frame in frames}) == len(walk) == 2 * 3 + 1 and "lambda" not in repr(walk)
    shown = base64.b64decode(re.search('data:image/gif;base64,([^"]*)', walk._repr_html_())[1])
    assert Image.open(BytesIO(shown)).n_frames == 7 and opened.sample("3")._repr_html_() is None


def test_a_video_has_all_frames_as_gif_and_as_mp4(files, capsys):
    draw("style.pkl", "interpolate", "--between", 3, 5, 3, "--frames", 4, "--fps", 10)
    draw("style.pkl", "interpolate", "--between", 3, 5, 3, "--frames", 4, "-o", "walk.gif", "--singles")
    with av.open("style-interpolate-3-5-3.mp4") as file:
        frames = [frame.to_image() for frame in file.decode(video=0)]
        stream = file.streams.video[0]
        assert (stream.average_rate, stream.codec_context.colorspace) == (10, sheet.BT_601)
    with Image.open("walk.gif") as moving:
        assert (len(frames), moving.n_frames) == (6, 6)  # in a loop, seed 3 comes once
        assert frames[0].size == moving.size == (256, 256)
        for number in (0, 3):
            moving.seek(number)
            gif, mp4 = (np.asarray(each.convert("RGB"), int) for each in (moving, frames[number]))
            single = np.kron(pixels(f"walk/00{number}.png").astype(int), np.ones((16, 16, 1), int))
            assert np.abs(gif - single).mean() < 8 and np.abs(mp4 - single).mean() < 8
    said = capsys.readouterr().out.split()
    assert said == ["style.pkl", "style-interpolate-3-5-3.mp4", "style.pkl", "walk.gif", "walk"]


def test_without_pyav_a_video_is_a_gif_and_one_sentence(files, capsys, monkeypatch):
    monkeypatch.setattr(sheet, "find_spec", lambda name: None)
    draw("style.pkl", "interpolate", "--between", 3, 5, "--frames", 2)
    assert capsys.readouterr().out.splitlines() == ["style.pkl", sheet.NO_MP4, "  style-interpolate-3-5.gif"]
    assert sample.main(["style.pkl", "interpolate", "-o", "walk.mp4", "--device", "cpu"]) == 2
    assert "pip install av, or write a GIF: type a name such as walk.gif" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("r3.pkl --truncation 0.5", "R3Generator has no styles to truncate or to mix; take a run of StyleGAN2"),
        ("style.pkl --truncation 70", "--truncation 70 is far from all that was trained; type e.g. --truncation 0.7"),
        ("style.pkl --inputs a.png", "it draws from seeds, and translates no pictures; leave --inputs out"),
        ("style.pkl --seed 7", "type --seeds and a list, such as --seeds 7"),
        ("style.pkl --cutoff 2", "a cutoff is for truncation; type --truncation too"),
        ("r3.pkl files --count 1 -o a.npz", "written to a folder or a .zip; type a name such as a.zip"),
        ("r3.pkl --class 3", "there is no class '3'; type --class and a number from 0 to 2"),
        ("style.pkl --class 0", "the network has no classes; leave --class out"),
        ("style.pkl classes", "the network has no classes; type python -m gan.sample style.pkl draw"),
        ("style.pkl --seeds 8-3", "--seeds '8-3' is no list"),
        ("style.pkl mix --layers 4-6", "there is no layer 6; type --layers and some of 0 to 5"),
        ("r3.pkl interpolate --between 3", "--between takes two seeds or more and got 1"),
        ("r3.pkl interpolate -o walk.avi", "type one that ends in .png, .gif or .mp4"),
        ("r3.pkl interpolate --region hair", "r3.pkl: it draws from seeds, where --region does nothing"),
        ("r3.pkl transfer", "r3.pkl: it draws from seeds, so there is no 'transfer'; type draw, mix"),
        ("missing.pkl", "cannot read 'missing.pkl': No such file or directory; give a published file"),
    ],
)
def test_what_cannot_be_drawn_is_said(files, capsys, words, said):
    assert sample.main([*words.split(), "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_seeds_are_listed_as_in_the_published_code():
    assert parse_numbers("0-3, 9,5") == [0, 1, 2, 3, 9, 5] == parse_numbers(["0-3", 9, "5"])
    assert parse_numbers("3,1-3") == [3, 1, 2, 3] and parse_numbers_once("3,1-3") == [3, 1, 2]
    assert parse_numbers(range(3)) == [0, 1, 2] and parse_numbers(7) == [7]
    for text in ("", "a", "1-", "-1", "0-99999", "1;2"):
        with pytest.raises(UserError, match="no list"):
            parse_numbers(text)


def test_the_lines_of_the_guide_for_python_run(files):
    guide = (Path(gan.__file__).parents[1] / "docs/guide/look.md").read_text()
    (program,) = re.findall(r"```py\n([^`]*import gan\n.*?)```", guide, re.DOTALL)
    for typed, here in (("runs/001-stylegan2", "both.pkl"), ("=60", "=2"), ("pi, 60", "pi, 3"), ("4-7", "4-5")):
        program = program.replace(typed, here)
    exec(program, names := {})
    assert names["first"].size == (16, 16) and len(names["others"]) == 2
    assert len(repr(names["opened"].sample([3]))) < 100  # what a prompt of Python shows
    assert names["opened"].sample(range(1, 4)).name == names["opened"].sample("1-3").name == "seeds-1-3"
    assert all(Path(name).stat().st_size > 1000 for name in ("mix.png", "walk.mp4", "eased.gif"))
    assert Image.open("edit.png").size == (16, 16)
    assert names["w"].shape == (2, 6, 6)


@pytest.mark.parametrize("kind", [Shown, Drawings, Paintings])
def test_the_command_has_the_options_of_each_action_with_the_same_defaults(kind):
    for action in sample.OPTIONS[kind.kind]:
        typed = sample.parse(["auto", action])
        own = dict(inspect.signature(getattr(kind, sample.METHODS.get(action, action.replace("-", "_")))).parameters)
        hows = get_args(own.pop("how").annotation)[0].__annotations__.keys() if "how" in own else set()
        options = sample.options_of(kind.kind, action)
        names = {how.get("dest", name[2:].replace("-", "_")): name for name, how in options.items()}
        wanted = {"from_" if name == "from" else name for name in names} - {"singles", "fps", "devices"}
        assert wanted | ({"file"} & own.keys()) == own.keys() - {"self"} | hows
        for name in names.keys() & own.keys():
            if typed[name] is not None:
                assert str(own[name].default) == str(typed[name]), (action, name)
