"""The commands on devices that are no CPU and no GPU: see tests/support/rehearsal/device.py."""

import pytest
import torch
from safetensors.torch import load_file

from gan.app.run.folder import RunFolder
from tests.support.parity import EXACT, distance
from tests.support.rehearsal import checks
from tests.support.rehearsal.commands import run, start
from tests.support.rehearsal.device import NO_FLOAT64, possible
from tests.support.saved import tensors

pytestmark = pytest.mark.skipif(not possible(), reason="this torch has no device in Python that holds its own memory")

SMALL = ("--faces", 12, "--held-out", 4, "--batch-size", 4, "--workers", 0, "--log-every", 1)
WGAN = ("wgan-gp-faces", *SMALL, "--size", 16, "--width", 4, "--latent", 4, "--precision", "64-true")
R3GAN = ("r3gan-faces", *WGAN[1:])


@pytest.mark.parametrize(
    "check",
    [
        checks.memory_that_the_cpu_may_not_touch,
        checks.trains_as_a_cpu_does,
        checks.making_draws_from_the_device_that_is_named,
        checks.random_states_are_those_of_this_ranks_device,
        checks.its_memory_is_known,
        pytest.param(checks.what_make_gpu_runs, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_the_device(check, tmp_path):
    run(tmp_path, f"{check.__module__}:{check.__name__}")


STEPS = "--save-every", 1, "--max-steps"


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_training_on_two_devices_is_that_on_one(steps, tmp_path):
    """Three steps with a resume, after which other commands open the run."""
    made = "two/001-wgan-gp-faces"
    run(tmp_path, "gan.fit", *WGAN, *STEPS, steps, "--devices", 1, "--out", "one")
    how = "--strategy", "zero3", "--check", steps == 3  # which takes longer than the training
    said = run(tmp_path, "gan.fit", *WGAN, *STEPS, 2, *how, "--out", "two", ranks=2)
    assert "wgan-gp-faces on 2 REHEARSAL processes, strategy zero3" in said
    if steps == 3:
        run(tmp_path, "gan.fit", "--resume", made, "--strategy", "ddp", "--check", "false", *STEPS, 3, ranks=2)
    one, two = (tensors(RunFolder(tmp_path / out / "001-wgan-gp-faces").checkpoint(steps)) for out in ("one", "two"))
    assert distance(two, one) < EXACT
    if steps == 2:
        return
    run(tmp_path, "gan.export", made, "--to", "networks")
    critic = load_file(tmp_path / "networks" / "critic.safetensors")
    assert all(torch.equal(weight, two[f"/state_dict/critic.{key}"]) for key, weight in critic.items())
    run(tmp_path, "gan.sample", made, "show", "--count", 2, "--device", "rehearsal:1")
    assert "saved in two" in run(tmp_path, "gan.evaluate", made, ranks=2)


@pytest.mark.slow
def test_sean_goes_on_on_a_device_without_float64(tmp_path):
    """As Apple's, of which there is one. It is sampled and scored there too."""
    nothing, made = {NO_FLOAT64: "1"}, "two/001-sean-faces"
    small = ("--faces", 8, "--held-out", 2, "--batch-size", 4, "--size", 16, "--width", 2, "--hidden", 4)
    more = ("--workers", 0, "--max-steps", 1, "--strategy", "zero3", "--out", "two", "--check", "false")
    run(tmp_path, "gan.fit", "sean-faces", *small, *more, ranks=2)
    said = run(tmp_path, "gan.fit", "--resume", made, "--devices", 1, "--max-steps", 2, **nothing)
    assert "step-000002.ckpt" in said
    run(tmp_path, "gan.sample", made, **nothing)
    assert "SSIM" in run(tmp_path, "gan.evaluate", made, "--devices", 1, **nothing)


def test_devices_that_are_not_there_are_refused(tmp_path):
    for words, said in (
        ((*R3GAN, "--devices", 3), "--devices 3: this machine has 2 rehearsal devices; type --devices 2"),
        ((*R3GAN, "--accelerator", "tpu"), "there is no tpu device here; type --accelerator rehearsal"),
    ):
        (ended,) = start(tmp_path, "gan.fit", words, 1, {})
        assert (ended.returncode, said in ended.stdout) == (2, True), ended.stdout


@pytest.mark.slow
def test_a_device_by_the_name_of_googles_is_none_of_lightnings_class(tmp_path):
    words = ("--max-steps", 1, "--accelerator", "tpu", "--devices", 1)
    assert "r3gan-faces on 1 TPU process" in run(tmp_path, "gan.fit", *R3GAN, *words, REHEARSAL_NAME="tpu")


@pytest.mark.slow
def test_two_devices_train_in_mixed_precision(tmp_path):
    run(tmp_path, "gan.fit", *R3GAN, "--strategy", "auto", "--precision", "bf16-mixed", "--max-steps", 2, ranks=2)
