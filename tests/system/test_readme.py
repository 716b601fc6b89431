"""What README.md says is so."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gan import plan as planning
from gan.app.run import options
from gan.app.verifying import options as verifying
from gan.runs import RUNS, build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HOSTS = (ROOT / "samples" / "hosts.md").read_text()
((PROGRAM,), (RUN,)) = (
    re.findall(pattern, README, re.DOTALL)
    for pattern in (r"```python\n(.*?)```", r"(    from gan.runs import Run\n.*?, max_steps\)\n)")
)


@pytest.fixture
def my_gan(tmp_path, monkeypatch):
    """The folder of the game in full, with its run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_gan.py").write_text(PROGRAM + textwrap.dedent(RUN))
    yield tmp_path
    sys.modules.pop("my_gan", None)


def test_the_gan_in_full_runs_as_it_stands(tmp_path):
    (tmp_path / "my_gan.py").write_text(PROGRAM.replace("max_steps=100", "max_steps=3"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "my_gan.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "max_steps=3" in done.stderr + done.stdout


@pytest.mark.parametrize("line", re.findall(r"^    python -m gan\.fit(.*?)(?:  +#.*)?$", README + HOSTS, re.MULTILINE))
def test_the_options_it_shows_exist(line, my_gan):
    arguments = line.strip().strip("`.").split()
    if "--help" in arguments:
        with pytest.raises(SystemExit) as ended:
            options.parse(arguments)
        assert ended.value.code == 0
    else:
        assert options.parse(arguments)[0].run in (*RUNS, f"{my_gan}/my_gan.py:my_run")


def test_its_own_run_is_one(my_gan):
    (line,) = re.findall(r"^    python -m gan\.verify (.*)$", README, re.MULTILINE)
    settings = verifying.parse(line.split())
    assert (settings.strategy, settings.devices) == (["ddp", "zero3"], [2, 4])
    assert build(settings.run, batch_size=8).max_steps == 1000


@pytest.mark.parametrize("line", re.findall(r"^    python -m gan\.plan (.*)$", README, re.MULTILINE))
def test_the_plans_it_shows_can_be_made(line, my_gan):
    settings = planning.parse([f"{ROOT}/{word}" if word.startswith("samples/") else word for word in line.split()])
    assert settings.memory == 80e9


def test_pictures_and_pages_it_links_to_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).is_file(), target
