"""A run on two hosts, each with its own network, name and launcher: it equals one device, until the cable is cut."""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gan.app.run.folder import RunFolder
from strategies.processes import lifeline
from tests.support import commands, crashes, namespaces
from tests.support.commands import until
from tests.support.namespaces import ADDRESSES, two_hosts
from tests.support.parity import BROKEN, EXACT, distance
from tests.support.saved import tensors
from tests.support.worlds import ROOT

pytestmark = pytest.mark.alone
STEPS = 5
LIMIT = 30  # seconds in which both sides have ended
IMPORTS = 120  # seconds until ranks train, on a machine that is busy


def alone(folder, batch):
    """What one device makes of batches of this size."""
    settings = "--max-steps", str(STEPS), "--strategy", "single", "--check", "false", "--batch-size", str(batch)
    ended = crashes.train(folder, 1, *settings)
    assert ended.statuses == [0], ended.said
    return tensors(crashes.newest(folder))


def start(hosts, number, folder):
    """torchrun on one of the hosts, as a person types it there. It and its rank are forks, which import nothing."""
    launcher = "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"
    meeting = "--master-addr", ADDRESSES[0], "--master-port", "29500"
    settings = "--max-steps", "100000", "--save-every", str(STEPS), "--strategy", "ddp", "--batch-size", "12"
    command = (*launcher, *meeting, "-m", "--", "gan.fit", *crashes.ARGUMENTS.split(), *settings)
    environment = {**os.environ, "PYTHONPATH": ROOT, namespaces.VARIABLE: hosts.names[number]}
    with open(folder / f"said-{number}.txt", "w") as said:
        return commands.Typed(command, cwd=folder, env=environment, stdout=said, stderr=said)


def told(folder):
    """What each of them has said so far."""
    return [(folder / f"said-{number}.txt").read_text() for number in range(2)]


@pytest.mark.promise("the network to a host is cut")
@pytest.mark.slow
def test_two_hosts_train_as_one_device_and_when_the_cable_is_cut_each_names_the_other(tmp_path):
    checkpoint = RunFolder(tmp_path / "runs" / "001-wgan-gp-faces").checkpoint(STEPS)

    said = partial(told, tmp_path)
    with two_hosts() as hosts, ThreadPoolExecutor() as threads:
        launchers = [start(hosts, number, tmp_path) for number in range(2)]
        ends = [threads.submit(ended, launcher) for launcher in launchers]
        assert until(lambda: checkpoint.exists() or any(end.done() for end in ends), IMPORTS), said()
        assert checkpoint.exists(), said()
        both = tensors(checkpoint)
        cut = time.monotonic()
        hosts.cut()
        # Meanwhile one device trains.
        assert distance(both, alone(tmp_path / "alone", 12)) <= EXACT
        assert distance(both, alone(tmp_path / "half", 6)) > BROKEN  # the control: as each host would by itself
        seconds = max(end.result() for end in ends) - cut
    assert [launcher.returncode for launcher in launchers] == [1, 1], said()  # torchrun's own
    for number, text in enumerate(said()):
        (error,) = re.findall(r"^error: .*", text, re.MULTILINE)
        assert re.match(
            rf"error: rank {1 - number} \(process \d+ on {hosts.names[1 - number]}\) has not been heard of for "
            rf"{lifeline.SILENCE} seconds: is its host switched off, or the network down\?; .*rank {number} "
            r"(begins|plays|has ended)",
            error,
        ), text
        assert "go on from the last whole checkpoint with\n  python -m gan.fit --resume runs/001-wgan" in text
    assert seconds < LIMIT


@pytest.mark.promise("the network to a host is cut")
@pytest.mark.slow
def test_when_the_cable_is_joined_again_the_run_goes_on_by_itself(tmp_path):
    steps, folder = 3 * STEPS, RunFolder(tmp_path / "runs" / "001-wgan-gp-faces")
    settings = f"--save-every {STEPS} --strategy zero3 --devices 1 --nodes 2 --rendezvous {ADDRESSES[0]}:29400"
    arguments = crashes.ARGUMENTS.replace("--resume auto", "").split()
    command = sys.executable, "-m", "gan.fit", *arguments, *settings.split(), "--max-steps", "100000"

    said = partial(told, tmp_path)

    def start(number):
        with open(tmp_path / f"said-{number}.txt", "w") as file:
            environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
            return hosts.start(number, command, cwd=tmp_path, env=environment, stdout=file, stderr=file)

    with two_hosts() as hosts, ThreadPoolExecutor() as threads:
        agents = [start(number) for number in range(2)]
        ends = [threads.submit(ended, agent) for agent in agents]
        assert until(lambda: folder.checkpoint(STEPS).exists(), IMPORTS), said()
        hosts.cut()
        stopped = max(folder.steps())
        assert until(lambda: all("has not been heard of for" in text for text in said()), LIMIT), said()
        hosts.restore()
        assert until(lambda: max(folder.steps()) >= stopped + steps, IMPORTS), said()
        agents[1].terminate()  # all ranks end after the same step
        assert all(end.result() for end in ends)
    assert [agent.returncode for agent in agents] == [0, 0], said()
    for number, text in enumerate(said()):
        assert f"error: rank {1 - number} (process " in text and "restart 1 of 3: all ranks start again" in text
    newest = max(folder.steps())
    assert f", from {folder.path.relative_to(tmp_path)}/checkpoints/step-" in said()[0]
    settings = "--max-steps", str(newest), "--strategy", "single", "--check", "false"
    one = crashes.train(tmp_path / "alone", 1, *settings)
    assert one.statuses == [0], one.said
    assert distance(tensors(folder.checkpoint(newest)), tensors(crashes.newest(tmp_path / "alone"))) <= EXACT


def ended(launcher):
    """The time at which it has ended."""
    launcher.wait(IMPORTS + 60)
    return time.monotonic()
