"""The command as it is typed: what it writes and prints, and its answers to mistakes."""

import re

import numpy as np
import pytest
from PIL import Image

from gan import sample as sample
from gan.app.sampling.sheet import save_video
from gan.files.errors import UserError
from gan.sample import ACTIONS, OPTIONS
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.r3 import R3Generator
from tests.support import opening


@pytest.fixture
def here(shared_copy, monkeypatch):
    monkeypatch.chdir(shared_copy.parent.parent)
    return shared_copy


def test_without_words_the_newest_run_is_reconstructed(here, capsys):
    assert sample.main([]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [f"runs/{here.name}, step 2", f"  runs/{here.name}/samples/reconstruct.png"]
    with Image.open(here / "samples" / "reconstruct.png") as sheet:
        assert sheet.height > 4 * 128


def test_where_to_write_may_be_said(here, tmp_path, capsys):
    path = tmp_path / "new" / "mine.png"
    assert sample.main(["auto", "transfer", "--from", "1", "--to", "0", "--singles", "-o", str(path)]) == 0
    assert path.is_file() and (tmp_path / "new" / "mine" / "0-in-1.png").is_file()
    assert capsys.readouterr().out.splitlines()[-2:] == [f"  {path}", f"  {tmp_path}/new/mine"]
    assert sample.main(["auto", "show", "--count", "2", "--file", str(path)]) == 0
    with Image.open(path) as sheet:
        assert 2 * 128 < sheet.height < 3 * 128


def test_raw_weights_draw_others_than_the_average_into_a_file_of_their_own(tmp_path, capsys):
    run = opening.train(tmp_path, "r3gan-faces", size=16, width=4, latent=4, faces=8, held_out=4)
    for more in ([], ["--weights", "ema"], ["--weights", "raw"]):
        assert sample.main([str(run), "--seeds", "0-3", *more]) == 0
    averaged, raw = (np.asarray(Image.open(run / "samples" / f"{name}.png")) for name in ("seeds-0-3", "seeds-0-3-raw"))
    assert averaged.shape == raw.shape and (averaged != raw).any()
    write(tmp_path / "nets.pkl", {"G_ema": published(R3Generator(4, (8, 8)))})
    assert sample.main([str(tmp_path / "nets.pkl"), "--weights", "raw"]) == 2
    assert "where --weights does nothing; leave --weights out" in capsys.readouterr().err


def test_a_mask_is_not_written_over_by_what_is_painted_of_it(here, tmp_path, capsys):
    mask = tmp_path / "mine.png"
    assert sample.main(["auto", "save-labels", "--picture", "1", "-o", str(mask)]) == 0
    assert re.search(r"^  0 #[0-9a-f]{6} background$", capsys.readouterr().out, re.MULTILINE)
    before = mask.read_bytes()
    assert sample.main(["auto", "repaint", "--picture", "1", "--label", str(mask), "-o", str(mask)]) == 2
    assert "is read and would be written over; type -o and another name" in capsys.readouterr().err
    assert mask.read_bytes() == before
    assert sample.main(["auto", "save-labels", "--picture", "0", "-o", str(mask)]) == 0  # what it wrote before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["auto", "transfre"], "paints in styles, so there is no 'transfre'; type show, translate, reconstruct, tr"),
        (["transfer", "--from", "1"], "say which run comes first: python -m gan.sample auto transfer --from 1"),
        (["--run", "biggan", "show"], "which run comes first: python -m gan.sample auto show --run biggan"),
        (["--seed", "1", "auto", "show"], "the run and the action come first"),
        (["auto", "interpolate", "--between", "1"], "--between takes two styles and got 1; type --between 3 5"),
        (["auto", "interpolate", "--between", "mean", "1"], "'mean' has styles and no shapes; say with --on which"),
        (["auto", "repaint"], "repaint needs the edited label map: type --label mine.png; a label map to edit is"),
        (["auto", "repaint", "--label", "no.png"], "there is no file 'no.png'"),
        (["auto", "-o", "grid.jpg"], "pictures are written as PNG; type a name such as grid.png"),
        (["auto", "-o", "."], "'.' is a folder; type a name such as picture.png"),
        (["auto", "-o", "runs/001-sean-faces/settings.yaml/a.png"], "choose another file with -o"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_words(words, message, here, capsys):
    assert sample.main(words) == 2
    *_, said = capsys.readouterr().err.splitlines()  # the styles' mean may be computed first
    assert said.startswith("error: ") and message in said


@pytest.mark.parametrize("words", [["auto", "show", "--region", "hair"], ["auto", "interpolate", "--frames", "1"]])
def test_options_that_an_action_has_not_are_refused(words, here, capsys):
    with pytest.raises(SystemExit) as end:
        sample.main(words)
    assert end.value.code == 2
    assert words[2].strip("-") in capsys.readouterr().err


def test_a_game_with_styles_draws_from_no_seeds(here, capsys):
    """One without styles: tests/unit/gan/app/sampling/test_paintings.py."""
    for action in ("draw", "project"):
        assert sample.main(["auto", action]) == 2
        said = capsys.readouterr().err
        assert f"its game paints in styles, so there is no '{action}'; type show, translate, reconstruct" in said
    assert "finds a picture's styles without a search: save-styles --picture me.jpg:labels.png -o" in said


def test_what_goes_from_one_style_to_another_may_be_a_video(here, tmp_path):
    path = tmp_path / "hair.gif"
    words = ["auto", "interpolate", "--between", "1", "2", "--on", "0", "3", "--frames", "5", "--fps", "10"]
    assert sample.main([*words, "-o", str(path), "--singles"]) == 0
    with Image.open(path) as moving, Image.open(tmp_path / "hair" / "3-004.png") as last:
        assert (moving.n_frames, moving.size, moving.info["duration"]) == (5, (512, 256), 100)
        moving.seek(4)
        own = moving.convert("RGB").crop((256, 0, 512, 256)).resize(last.size, Image.Resampling.BOX)
        difference = np.abs(np.asarray(own, int) - np.asarray(last, int))
        assert difference.mean() < 8


def test_a_gif_lasts_as_long_as_its_frames(tmp_path):
    frames = [Image.new("RGB", (256, 256), (20 * number,) * 3) for number in range(7)]
    save_video(iter(frames), tmp_path / "x.gif", 30)
    lengths = []
    with Image.open(tmp_path / "x.gif") as moving:
        for number in range(moving.n_frames):
            moving.seek(number)
            lengths.append(moving.info["duration"])
    assert len(lengths) == 7 and sum(lengths) == 230 and set(lengths) == {30, 40}
    with pytest.raises(UserError, match="at most 50 frames a second; type --fps 50"):
        save_video(iter(frames), tmp_path / "x.gif", 60)


def test_every_example_in_the_help_is_read(capsys):
    found = re.findall(r"^  python -m gan.sample( .*?)?(?:  .*)?$", sample.EXAMPLES, re.MULTILINE)
    assert len(found) > 12
    for words in found:
        argv = words.split()
        if "--help" not in argv:
            assert sample.parse(argv).action == (argv[1] if len(argv) > 1 and argv[1] in ACTIONS else None)


@pytest.mark.parametrize("action", [None, *ACTIONS])
def test_help_names_the_actions_and_explains_each_option(action, capsys):
    with pytest.raises(SystemExit):
        sample.main(["auto", *([action] if action else []), "--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in ACTIONS)
    options = said.partition("options:")[2].partition("actions:")[0]
    actions = [action] if action else ["show", "draw", "reconstruct", "translate"]
    names = [name for kind in OPTIONS for each in actions for name in sample.options_of(kind, each)]
    for name in (*names, "--run", "--data", "--out", "--file", "--standing", "--device"):
        assert re.search(rf"^  (-o, )?{name}( \S+)*?(  +|\n {{10,}})\w", options, re.MULTILINE), name
    assert all(len(line) < 120 for line in said.splitlines())
