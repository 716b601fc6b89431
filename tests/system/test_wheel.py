"""What a wheel has, beside the modules."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gan", "nets", "datasets", "strategies")
pytest.importorskip("setuptools", minversion="77")


def test_it_says_of_each_package_that_it_has_types(tmp_path):
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "import setuptools.build_meta as build; build.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{name}/py.typed" for name in PACKAGES} <= set(names) and "gan/phase.py" in names
    assert {f"gan/app/editing/edit.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert {f"gan/app/page/{name}" for name in ("look.css", "page.css", "page.js")} <= set(names)  # of gan.compare
