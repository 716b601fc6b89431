"""Every launcher and rendezvous gives the same ranks, and the weights of one device, under gan.fit and in a script."""

import shutil
import sys
from importlib.util import find_spec

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.support.launchers import LAUNCH, ROOT, RUN, SCRIPT, TORCHRUN, Command, alone, start
from tests.support.parity import BROKEN, EXACT, distance
from tests.support.worlds import free_port

MPIRUN = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable)
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port")
FOUND = {"mpirun": shutil.which("mpirun"), "accelerate": find_spec("accelerate")}
slow = pytest.mark.slow


def by_hand(*words, **variables):
    """The commands of two ranks, with the variables that a person would set for each."""
    return [Command(list(words), variables=dict(RANK=r, WORLD_SIZE=2, LOCAL_RANK=r, **variables)) for r in range(2)]


def torchrun(*words, module=TORCHRUN):
    return Command([*module, "--nproc-per-node", *words])


# What is typed, from a folder and a free port.
ON_ONE_HOST = {
    "gan.fit": lambda folder, port: [Command([*RUN, "--devices", "2"])],
    "script": lambda folder, port: [Command(SCRIPT)],
    "spawn": lambda folder, port: [Command([*SCRIPT, "--start-method", "spawn"])],
    "fork": lambda folder, port: [Command([*SCRIPT, "--start-method", "fork"])],
    "torchrun": lambda folder, port: [torchrun("2", "--master-port", port, *RUN)],
    "torchrun script": lambda folder, port: [torchrun("2", "--master-port", port, *SCRIPT)],
    "torchrun --standalone": lambda folder, port: [torchrun("2", "--standalone", *RUN)],
    "torchrun --rdzv-endpoint": lambda folder, port: [torchrun("2", *c10d(port), *SCRIPT)],
    "launch": lambda folder, port: [torchrun("2", "--master-port", port, *RUN, module=LAUNCH)],
    "launch script": lambda folder, port: [torchrun("2", "--master-port", port, *SCRIPT, module=LAUNCH)],
    "launch --use-env": lambda folder, port: [torchrun("2", "--use-env", "--master-port", port, *RUN, module=LAUNCH)],
    "accelerate": lambda folder, port: [Command([*ACCELERATE, port, *RUN])],
    "accelerate script": lambda folder, port: [Command([*ACCELERATE, port, *SCRIPT])],
    "mpirun": lambda folder, port: [Command([*MPIRUN, *RUN], program="mpirun")],
    "mpirun script": lambda folder, port: [Command([*MPIRUN, *SCRIPT], program="mpirun")],
    "by hand": lambda folder, port: by_hand(*RUN, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
    "by hand, tcp": lambda folder, port: by_hand(
        *SCRIPT, "--init-method", f"tcp://127.0.0.1:{port}", LOCAL_WORLD_SIZE=2
    ),
    "by hand, file": lambda folder, port: by_hand(
        *SCRIPT, "--init-method", f"file://{folder}/meet", LOCAL_WORLD_SIZE=2
    ),
}
ONE_OF_TWO = ["--devices", "1", "--num-nodes", "2"]
OF_TWO = [*SCRIPT, "--devices", "1", "--nodes", "2"]  # a Trainer of one's own must be told
ON_TWO = {
    "gan.fit --num-nodes": lambda port: [
        Command([*RUN, *ONE_OF_TWO], variables=dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=node))
        for node in "10"
    ],
    "torchrun --nnodes 1:2": lambda port: [torchrun("1", "--nnodes", "1:2", *c10d(port), *RUN)] * 2,
    "torchrun --node-rank": lambda port: [
        torchrun(
            "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank", node, *OF_TWO
        )
        for node in "01"
    ],
    "by hand, two nodes": lambda port: [
        Command(each.words, variables={**each.variables, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1})
        for each in by_hand(*OF_TWO, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ],
}


def c10d(port):
    return "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"


def marked(name):
    """The launcher, with the marks of its test. Other tests of `make test` start ranks by torchrun too."""
    program = name.split()[0]
    missing = pytest.mark.skipif(not FOUND.get(program, True), reason=f"{program} is not installed")
    return pytest.param(name, marks=[missing, slow])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("one") / "device")


def check(notes, one_device, local_size=2):
    """Both ranks are there, each in its place, with the weights of one device."""
    assert [place for place, _ in notes] == [
        {
            "rank": (rank,) * 3,
            "local rank": (rank % local_size,) * 2,
            "world size": (2, 2),
            "local size": local_size,
            "node": rank // local_size,
            "step": 5,
        }
        for rank in range(2)
    ]
    for _, weights in notes:
        assert distance(weights, one_device) <= EXACT


@pytest.mark.parametrize("launcher", [*map(marked, ON_ONE_HOST)])
def test_two_ranks_of_one_host(launcher, one_device, tmp_path):
    check(start(ON_ONE_HOST[launcher](tmp_path, str(free_port())), tmp_path), one_device)
    if launcher in ("spawn", "fork"):
        assert distance(torch.load(tmp_path / "handed-over"), one_device) <= EXACT


@pytest.mark.parametrize("launcher", [*map(marked, ON_TWO)])
def test_a_rank_on_each_of_two_nodes(launcher, one_device, tmp_path):
    check(start(ON_TWO[launcher](str(free_port())), tmp_path), one_device, local_size=1)
    assert len(list(tmp_path.glob("runs/*"))) == ("gan.fit" in launcher or "1:2" in launcher)


@pytest.mark.slow
@pytest.mark.parametrize("part", [slice(0, 8), slice(8, 16)])
def test_a_rank_that_is_not_connected_trains_differently(part, one_device, tmp_path):
    """The control: what each of two ranks would learn from its own half of the batches."""
    assert distance(alone(tmp_path / "alone", part), one_device) > BROKEN


@slow
@pytest.mark.parametrize("settings", ["", "policy='dp'"])
def test_a_notebook_forks_its_ranks(settings, one_device, tmp_path, monkeypatch):
    cell = f"""
        from tests.support.launched import Noted, play
        from tests.support.parity import distance
        import torch
        game = Noted()
        torch.randn(512, 512).exp().sum()
        play(game, 2, {settings})
        torch.save(game.state_dict(), "handed-over")
    """
    for name, value in dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="2", NOTES=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\n".join(map(str.strip, cell.splitlines())))])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    notes = sorted((torch.load(path) for path in tmp_path.glob("*.pt")), key=lambda note: note[0]["rank"])
    check(notes, one_device)
    assert distance(torch.load(tmp_path / "handed-over"), one_device) <= EXACT
