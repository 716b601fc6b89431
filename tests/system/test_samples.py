"""Programs of samples/: people.py draws pictures to train on, from a font; hydra_train.py trains under Hydra."""

import runpy
import sys

import pytest
import yaml
from PIL import Image, ImageFont

from tests.support.launchers import ROOT, TORCHRUN, Command, start


@pytest.fixture
def program():
    return runpy.run_path(str(ROOT / "samples" / "people.py"))


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


TYPED = [
    "trainer.max_steps=2",
    *("+trainer.accelerator=cpu", "+trainer.enable_progress_bar=false", "+trainer.logger=false"),
    *("settings.width=4", "settings.size=16", "settings.batch_size=4", "+settings.faces=12", "+settings.held_out=4"),
    "strategy={generator:zero3,discriminator:ddp}",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "own"),
    [((), ["hydra.job.chdir=true"]), ((*TORCHRUN, "--nproc-per-node", "2", "--standalone"), [])],
)
def test_ranks_get_what_was_typed_and_folders_that_do_not_clash(launcher, own, tmp_path):
    """Every rank has a folder of its own; also where Hydra changes the folder, from which the others are started."""
    pytest.importorskip("hydra", reason="hydra-core is not installed")
    start([Command([*launcher, str(ROOT / "samples" / "hydra_train.py"), *TYPED, *own], sys.executable)], tmp_path)
    for rank in range(2):
        said = tmp_path / "outputs" / "first" / f"rank-{rank}"
        assert yaml.safe_load((said / ".hydra" / "overrides.yaml").read_text()) == TYPED
        hydra = yaml.safe_load((said / ".hydra" / "hydra.yaml").read_text())["hydra"]
        assert hydra["overrides"]["hydra"] == [*own, "hydra.mode=RUN"]
        assert hydra["job"]["name"] == "hydra_train"
    assert len(list((tmp_path / "outputs").iterdir())) == 1
