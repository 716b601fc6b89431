"""`python -m gan.verify` finds every built-in run exact, as a person's own CI would ask it. `make matrix` runs this."""

import pytest

from gan import verify as command
from gan.app.run import options
from gan.runs import RUNS

# A small size, by the names of settings.
SMALL = {"size": 32, "faces": 16, "held_out": 8, "batch_size": 4, "width": 8, "hidden": 8, "style": 8, "blocks": 1}
SMALL |= {"pool": 4, "latent": 4, "base_steps": 2, "start": 2}
SMALL |= {"segment": 512, "clips": 16, "bands": 8, "seconds": 0.2}


def small(run):
    """The command line for a small size of a run; None for one that needs files."""
    settings = options.run_settings(options.parse(["--run", run])[0])
    chosen = {name: value for name, value in SMALL.items() if name in settings}
    return None if "data" in settings else [part for key, each in chosen.items() for part in (f"--{key}", str(each))]


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in RUNS if small(run) is not None])
def test_every_run_is_exact(run, capsys):
    status = command.main(["--run", run, *small(run), "--strategy", "ddp,zero3", "--devices", "2", "--steps", "5"])
    assert status == 0, capsys.readouterr().out
