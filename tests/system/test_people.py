"""samples/people.py: pictures to train on, from a font."""

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageFont

PROGRAM = Path(__file__).parents[2] / "samples/people.py"


@pytest.fixture
def program():
    return runpy.run_path(str(PROGRAM))


def test_a_machine_without_the_font_is_told_what_to_install(monkeypatch, tmp_path, program):
    monkeypatch.setattr(sys, "argv", ["people.py", str(tmp_path / "people"), "--font", str(tmp_path / "none.ttf")])
    with pytest.raises(SystemExit, match=r"there is no .*none.ttf; .* sudo apt install fonts-noto-color-emoji"):
        program["main"]()
    assert not (tmp_path / "people").exists()


def test_a_font_that_knows_only_the_parts_gives_no_picture(program):
    font = ImageFont.load_default(109)
    assert program["draw"](font, "a").size == (136, 128)
    assert program["draw"](font, "a nurse") is None


@pytest.mark.slow
def test_each_person_is_one_picture(monkeypatch, tmp_path, program, capsys):
    if not program["FONT"].is_file():
        pytest.skip("fonts-noto-color-emoji is not installed")
    monkeypatch.setattr(sys, "argv", ["people.py", str(tmp_path)])
    program["main"]()
    found = list(tmp_path.glob("*.png"))
    assert len(found) == int(capsys.readouterr().out.split()[0]) > 500
    with Image.open(tmp_path / "1f469-1f3fd-200d-1f393.png") as student:  # a woman, a skin tone, a graduate's cap
        assert student.mode == "RGBA"
        assert len(student.getcolors(10**6)) > 50
