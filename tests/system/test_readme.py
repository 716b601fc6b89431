"""What README.md says is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gan.fit import options
from gan.runs import RUNS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_gan_in_full_runs_as_it_stands(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_gan.py").write_text(program.replace("max_steps=100", "max_steps=3"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "my_gan.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "max_steps=3" in done.stderr + done.stdout


@pytest.mark.parametrize("line", re.findall(r"^    python -m gan\.fit(.*?)(?:  +#.*)?$", README, re.MULTILINE))
def test_the_options_it_shows_exist(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = line.strip().strip("`.").split()
    if "--help" in arguments:
        with pytest.raises(SystemExit) as ended:
            options.parse(arguments)
        assert ended.value.code == 0
    else:
        assert options.parse(arguments)[0].run in RUNS


def test_pictures_and_pages_it_links_to_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).is_file(), target
