"""Every launcher and rendezvous gives the same ranks, and the weights of one device, under gan.fit and in a script."""

import shutil
import sys
from importlib.util import find_spec

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.support.launchers import LAUNCH, ROOT, RUN, SCRIPT, TORCHRUN, Command, alone, port, start
from tests.support.parity import BROKEN, EXACT, distance

TWO = ("--nproc-per-node", "2")
MPIRUN = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable)
NEEDS = {"mpirun": shutil.which("mpirun"), "accelerate": find_spec("accelerate")}
slow = pytest.mark.slow


def needs(name):
    return pytest.mark.skipif(not NEEDS[name], reason=f"{name} is not installed")


def by_hand(words, **variables):
    """The commands of two ranks, with the variables that a person would set."""
    here = dict(WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port())
    return [Command(words, variables={**here, "RANK": rank, "LOCAL_RANK": rank, **variables}) for rank in range(2)]


def by_hand_without_address(words, where):
    """The same for ranks that meet in another place."""
    given = dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    return [
        Command([*words, "--init-method", where], variables={**given, "RANK": rank, "LOCAL_RANK": rank})
        for rank in range(2)
    ]


ON_ONE_HOST = {
    "gan.fit": lambda _: [Command([*RUN, "--devices", "2"])],
    "a script": lambda _: [Command(SCRIPT)],
    "spawn": lambda _: [Command([*SCRIPT, "--start-method", "spawn"])],
    "fork": lambda _: [Command([*SCRIPT, "--start-method", "fork"])],
    "torchrun": lambda _: [Command([*TORCHRUN, *TWO, "--master-port", str(port()), *RUN])],
    "torchrun, a script": lambda _: [Command([*TORCHRUN, *TWO, "--master-port", str(port()), *SCRIPT])],
    "torchrun --standalone": lambda _: [Command([*TORCHRUN, *TWO, "--standalone", *RUN])],
    "torchrun --rdzv-endpoint": lambda _: [
        Command([*TORCHRUN, *TWO, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port()}", *SCRIPT])
    ],
    "launch": lambda _: [Command([*LAUNCH, *TWO, "--master-port", str(port()), *RUN])],
    "launch, a script": lambda _: [Command([*LAUNCH, *TWO, "--master-port", str(port()), *SCRIPT])],
    "launch --use-env": lambda _: [Command([*LAUNCH, *TWO, "--use-env", "--master-port", str(port()), *RUN])],
    "accelerate": lambda _: [
        Command(["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *at_port(), *RUN])
    ],
    "accelerate, a script": lambda _: [
        Command(["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *at_port(), *SCRIPT])
    ],
    "mpirun": lambda _: [Command([*MPIRUN, *RUN], program="mpirun")],
    "mpirun, a script": lambda _: [Command([*MPIRUN, *SCRIPT], program="mpirun")],
    "by hand": lambda _: by_hand(RUN),
    "by hand, tcp": lambda _: by_hand_without_address(SCRIPT, f"tcp://127.0.0.1:{port()}"),
    "by hand, a file": lambda folder: by_hand_without_address(SCRIPT, f"file://{folder}/meet"),
}
OFTEN = ("fork", "torchrun", "mpirun")
MARKS = {"mpirun": needs("mpirun"), "accelerate": needs("accelerate")}


def at_port():
    return "--main_process_port", str(port())


def two_nodes(*words):
    return [Command([*TORCHRUN, "--nproc-per-node", "1", *words, *RUN]) for _ in range(2)]


def numbered():
    address = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port()))
    return [
        Command([*TORCHRUN, "--nproc-per-node", "1", *address, "--node-rank", str(node), *SCRIPT, "--devices", "1"])
        for node in range(2)
    ]


ON_TWO = {
    "torchrun --nnodes 1:2": lambda: two_nodes(
        *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port()}")
    ),
    "torchrun --node-rank": lambda: [
        Command([*each.words, "--nodes", "2"], each.program, each.variables) for each in numbered()
    ],
    "by hand": lambda: by_hand([*SCRIPT, "--devices", "1", "--nodes", "2"], LOCAL_RANK=0, LOCAL_WORLD_SIZE=1),
}


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


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            name,
            marks=[
                *([MARKS[name.split(",")[0]]] if name.split(",")[0] in MARKS else []),
                *([] if name in OFTEN else [slow]),
            ],
        )
        for name in ON_ONE_HOST
    ],
)
def test_two_ranks_of_one_host(launcher, one_device, tmp_path):
    check(start(ON_ONE_HOST[launcher](tmp_path), tmp_path), one_device)
    if launcher in ("spawn", "fork"):
        assert distance(torch.load(tmp_path / "handed-over"), one_device) <= EXACT


@pytest.mark.parametrize("launcher", [name if name == "by hand" else pytest.param(name, marks=slow) for name in ON_TWO])
def test_a_rank_on_each_of_two_nodes(launcher, one_device, tmp_path):
    check(start(ON_TWO[launcher](), tmp_path), one_device, local_size=1)


@pytest.mark.parametrize("part", [slice(0, 8), slice(8, 16)])
def test_a_rank_that_is_not_connected_trains_differently(part, one_device, tmp_path):
    """The control: what each of two ranks would learn from its own half of the batches."""
    assert distance(alone(tmp_path / "alone", part), one_device) > BROKEN


@slow
def test_ranks_that_were_started_without_variables_are_not_connected(one_device, tmp_path):
    """The control of the tests of ranks by hand: each process thinks that it is alone."""
    notes = start([Command([*SCRIPT, "--devices", "1"])] * 2, tmp_path)
    assert [(place["rank"], place["world size"]) for place, _ in notes] == [((0, 0, 0), (1, 1))] * 2
    with pytest.raises(AssertionError):
        check(notes, one_device)


@slow
def test_a_notebook_forks_its_ranks(one_device, tmp_path, monkeypatch):
    cell = """
        from tests.support.launched import Noted, play
        from tests.support.parity import distance
        import torch
        game = Noted()
        play(game, 2, start_method="fork")
        torch.save(game.state_dict(), "handed-over")
    """
    for name, value in dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", NOTES=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\n".join(map(str.strip, cell.splitlines())))])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    notes = sorted((torch.load(path) for path in tmp_path.glob("*.pt")), key=lambda note: note[0]["rank"])
    check(notes, one_device)
    assert distance(torch.load(tmp_path / "handed-over"), one_device) <= EXACT
