"""samples/hydra_train.py: every rank gets the arguments that were typed, and a folder of its own."""

import sys

import pytest
import yaml

from tests.support.launchers import ROOT, TORCHRUN, Command, start

pytest.importorskip("hydra", reason="hydra-core is not installed")
TYPED = [
    "trainer.max_steps=2",
    "+trainer.accelerator=cpu",
    "+trainer.enable_progress_bar=false",
    "+trainer.logger=false",
    *("settings.width=4", "settings.size=16", "settings.batch_size=4", "+settings.faces=12", "+settings.held_out=4"),
    "strategy={generator:zero3,discriminator:ddp}",
]
PROGRAM = str(ROOT / "samples" / "hydra_train.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "own"),
    [((), ["hydra.job.chdir=true"]), ((*TORCHRUN, "--nproc-per-node", "2", "--standalone"), [])],
)
def test_ranks_get_what_was_typed_and_folders_that_do_not_clash(launcher, own, tmp_path):
    """Also where Hydra changes the folder, from which the other ranks could not be started again."""
    start([Command([*launcher, PROGRAM, *TYPED, *own], sys.executable)], tmp_path)
    for rank in range(2):
        said = tmp_path / "outputs" / "first" / f"rank-{rank}"
        assert yaml.safe_load((said / ".hydra" / "overrides.yaml").read_text()) == TYPED
        hydra = yaml.safe_load((said / ".hydra" / "hydra.yaml").read_text())["hydra"]
        assert hydra["overrides"]["hydra"] == [*own, "hydra.mode=RUN"]
        assert hydra["job"]["name"] == "hydra_train"
    assert len(list((tmp_path / "outputs").iterdir())) == 1
