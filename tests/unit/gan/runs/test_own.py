"""Runs of a person's own: in a file, in a package, in a module that is installed. Mistakes are in ../answers.txt."""

import os
import sys
from pathlib import Path

import pytest

from gan import verify as verify
from gan.app.run import options, settings_file
from gan.files.errors import UserError
from gan.runs import build, find, full_name, short_name
from tests.support.posix import not_on_windows
from tests.unit.gan.app.run.test_options import saved

GAME = (Path(__file__).parents[1] / "mistakes" / "my_paint.py").read_text()


@pytest.fixture
def package(here):
    """my_package/games.py, which imports from the file beside it."""
    (here / "my_package").mkdir()
    (here / "my_package" / "__init__.py").write_text("")
    (here / "my_package" / "sizes.py").write_text("WIDTH = 9")
    (here / "my_package" / "games.py").write_text("from .sizes import WIDTH\n" + GAME.replace("= 4", "= WIDTH"))


@pytest.mark.parametrize("name", ["my_package.games:paint", "my_package/games.py:paint", "./my_package.games:paint"])
def test_a_function_in_a_package_is_found_from_another_folder_too(name, here, package, monkeypatch):
    full = full_name(name)
    assert full_name(full) == full and short_name(full) == "paint"
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert build(full).game == 9


def test_an_installed_module_keeps_its_name(here, package, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert full_name("my_package.games:paint") == "my_package.games:paint"
    assert build("my_package.games:paint").game == 9


def test_it_need_not_say_what_it_returns(here):
    (here / "my_paint.py").write_text(GAME.replace(" -> Run", ""))
    assert options.parse(["my_paint.py:paint", "--width", "6"])[0].width == 6
    assert build("my_paint.py:paint", width=5).game == 5
    with pytest.raises(UserError, match=r"my_paint.py:fails returned a int; return gan.runs.Run"):
        build("my_paint.py:fails")
    (here / "mine.py").write_text("import not_there")
    with pytest.raises(ModuleNotFoundError, match="not_there"):  # Python's own error
        find("mine.py:paint")


def test_a_saved_run_whose_function_has_changed_says_what_to_type(here):
    (here / "one.py").write_text(GAME)
    run = saved(here, "--run", "one.py:paint")
    (here / "one.py").write_text(GAME.replace("def paint(", "def daub("))
    del sys.modules["one"]
    with pytest.raises(UserError, match=r"no function 'paint'; its runs: daub.* type --run .*one.py:NAME"):
        options.parse(["--resume", str(run.path)])
    settings, _ = options.parse(["--resume", str(run.path), "--run", "one.py:daub"])
    assert (settings.run, settings.width) == (f"{here}/one.py:daub", 4)
    (here / "one.py").write_text(GAME.replace("width: int = 4, ", ""))
    del sys.modules["one"]
    with pytest.raises(UserError, match=r"settings.yaml' .*'width' .*; take it out of the file, or back into paint"):
        options.load(run.settings)


def test_a_setting_that_no_file_of_settings_can_hold_is_refused(here):
    text = GAME.replace("from gan.runs", "from datetime import timedelta\nfrom gan.runs")
    (here / "mine.py").write_text(text.replace('name: str = "x"', "long: timedelta = timedelta(1)"))
    settings, _ = options.parse(["--run", "mine.py:paint"])
    for refuses in (
        lambda: settings_file.dump(settings, settings.run),
        lambda: verify.parse(["--run", "mine.py:paint"]),
    ):
        with pytest.raises(UserError, match=r"mine.py:paint has a setting that cannot be written to settings.yaml"):
            refuses()


@not_on_windows
def test_a_file_that_is_none_is_refused(here):
    os.mkfifo(here / "my_pipe.py")
    with pytest.raises(UserError, match=rf"^cannot read {here}/my_pipe.py: it is a named pipe, and no file; type --r"):
        find("my_pipe.py:paint")
