"""The place of a process, as each launcher says it."""

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.processes.cluster import LaunchedEnvironment, environment, launched_in
from strategies.processes.launchers import LAUNCHERS, Launched, launched
from strategies.processes.starting import Scripts
from tests.support.parity import trainer
from tests.support.posix import only_on_linux

ELASTIC = dict(TORCHELASTIC_RUN_ID="none", RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
ELASTIC |= dict(GROUP_RANK="1", ROLE_RANK="3", MASTER_ADDR="one", MASTER_PORT="29500")
MPI = dict(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_SIZE="4")
MPI |= dict(OMPI_COMM_WORLD_LOCAL_SIZE="2", OMPI_COMM_WORLD_NODE_RANK="1", PMIX_NAMESPACE="3735355393")
SLURM = dict(SLURM_STEP_ID="0", SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NTASKS="4", SLURM_NODEID="1")
SLURM |= dict(SLURM_JOB_ID="71", SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_NTASKS_PER_NODE="2", SLURM_NODELIST="a[1-2]")
BY_HAND = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="one", MASTER_PORT="7")
ALL = {"torchrun": ELASTIC, "mpi": MPI, "slurm": SLURM, "environment": BY_HAND}
LIGHTNINGS = dict(LOCAL_RANK="1", WORLD_SIZE="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="7")


@pytest.fixture
def started(monkeypatch):
    """Sets the variables of a launcher, and no others."""
    for name in list(os.environ):
        if name in LIGHTNINGS or name.startswith(("SLURM_", "OMPI_", "PMIX_")):
            monkeypatch.delenv(name)

    def start(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return start


INSIDE = {"torchrun": {**SLURM, **ELASTIC}, "mpi": {**SLURM, **MPI}, "environment": {**SLURM, **BY_HAND}}


@pytest.mark.parametrize(("by", "variables"), [*ALL.items(), *INSIDE.items()])
def test_each_launcher_says_the_same_place_in_its_own_words_and_the_nearest_counts(by, variables):
    assert launched(variables) == Launched(by, rank=3, local_rank=1, world_size=4, local_size=2, node_rank=1)
    assert launched(variables).nodes == 2


@pytest.mark.parametrize(
    "variables",
    [
        {},
        LIGHTNINGS,
        dict(RANK="0", WORLD_SIZE="1"),
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # the script of sbatch
    ],
)
def test_a_process_that_nobody_placed_starts_the_ranks_itself(variables):
    assert launched(variables) is None


IS_NO_NUMBER = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "MASTER_PORT")
VARIABLE, HOST_BY_HOST = "^the environment variable ", "ranks must be numbered host by host"


@pytest.mark.promise(
    "garbage in the variables of a launcher; a main port that is taken", "one line with the variable and its value"
)
@pytest.mark.parametrize(
    ("by", "change", "words"),
    [
        ("environment", dict(WORLD_SIZE="four"), f"{VARIABLE}WORLD_SIZE is 'four', which is no number"),
        ("environment", dict(LOCAL_RANK="0"), f"rank 3 of 4 has number 0 of 2 on its host, number 1; {HOST_BY_HOST}"),
        ("environment", dict(WORLD_SIZE="5"), f"{HOST_BY_HOST}, with as many on each: start N on each host"),
        ("environment", dict(LOCAL_RANK=None), "RANK=3 and WORLD_SIZE=4 say .*; also set LOCAL_RANK "),
        ("environment", dict(LOCAL_WORLD_SIZE=None), "RANK=3 and WORLD_SIZE=4 say .*; also set LOCAL_WORLD_SIZE "),
        ("environment", dict(RANK="4"), f"{VARIABLE}RANK is '4', and WORLD_SIZE is '4': the last rank has number 3"),
        ("environment", dict(LOCAL_RANK="2"), f"{VARIABLE}LOCAL_RANK is '2', and LOCAL_WORLD_SIZE is '2': the last"),
        ("environment", dict(LOCAL_WORLD_SIZE="0"), f"{VARIABLE}LOCAL_WORLD_SIZE is '0', and must be 1 or more"),
        ("torchrun", dict(RANK=None), f"{VARIABLE}RANK is not set, though others of its launcher are"),
        ("torchrun", dict(MASTER_PORT="70000"), f"{VARIABLE}MASTER_PORT is '70000', and ports have numbers from 1 to"),
        ("mpi", dict(OMPI_COMM_WORLD_RANK="2"), r"host by host, .*: type mpirun --map-by ppr:N:node"),
        ("slurm", dict(SLURM_NODEID="2"), VARIABLE + r"SLURM_STEP_TASKS_PER_NODE is '2\(x2\)', which says no tasks o"),
        # What Lightning would read, where nobody has started ranks.
        *(("nobody", {name: "x"}, f"{VARIABLE}{name} is 'x', which is no number from 0 on$") for name in IS_NO_NUMBER),
    ],
)
def test_what_a_launcher_cannot_have_meant_is_named_with_its_value(by, change, words):
    variables = {name: value for name, value in {**ALL.get(by, {}), **change}.items() if value is not None}
    with pytest.raises(UserError, match=words):
        launched(variables)


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        ("torchrun", TorchElasticEnvironment),
        ("slurm", SLURMEnvironment),
        ("mpi", LaunchedEnvironment),
        ("another", KubeflowEnvironment),  # a row is enough for a launcher that Lightning knows
    ],
)
def test_lightning_is_told_the_same(by, kind, started, monkeypatch):
    if by == "another":
        monkeypatch.setitem(LAUNCHERS, "mpi", replace(LAUNCHERS["mpi"], lightning=kind.__name__))
    started(ALL.get(by, MPI))
    for found in (LightningEnvironment(), SLURMEnvironment(auto_requeue=False)):
        told = environment(found)
        assert type(told) is kind and environment(told) is told and launched_in(told) == launched()
        assert told.creates_processes_externally and launched_in(LightningEnvironment()) is None
        if by != "another":  # which reads variables of its own
            assert (told.global_rank(), told.local_rank(), told.world_size(), told.node_rank()) == (3, 1, 4, 1)


def test_a_count_of_restarts_is_a_number(started):
    for count in ("2", "often"):
        started({**ELASTIC, "TORCHELASTIC_RESTART_COUNT": count})
        with nullcontext() if count == "2" else pytest.raises(UserError, match="COUNT is 'often', which is no number"):
            assert launched().restarts == 2


def test_an_environment_of_a_persons_own_stays(started):
    started({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"})
    assert type(environment(SLURMEnvironment())) is LightningEnvironment  # the script of sbatch is no srun
    started(BY_HAND)
    own = KubeflowEnvironment()
    assert environment(own) is own and environment(None) is None
    assert PhaseStrategy("ddp", cluster_environment=own).cluster_environment is own


@only_on_linux
def test_it_needs_no_variables_but_its_own(started):
    """Kubeflow sets no LOCAL_RANK, and has one rank on each host."""
    started({name: value for name, value in BY_HAND.items() if not name.startswith("LOCAL")})
    strategy = PhaseStrategy("ddp", cluster_environment=KubeflowEnvironment())
    made = trainer(strategy, 1, 1, num_nodes=4)
    assert (made.global_rank, made.world_size, made.node_rank) == (3, 4, 3)
    with pytest.raises(UserError, match="also set LOCAL_RANK"):
        trainer(PhaseStrategy("ddp"), 1, 1, num_nodes=4)


def meeting():
    """Where ranks meet whose launcher Lightning does not know."""
    told = LaunchedEnvironment(launched())
    return told.main_address, told.main_port


def test_ranks_of_one_mpirun_meet_at_one_port_and_those_of_another_elsewhere(started, monkeypatch):
    started({**MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    address, port = meeting()
    assert address == "127.0.0.1" and 10_000 <= port < 30_000
    started({"PMIX_NAMESPACE": "3735355394"})
    assert meeting() == (address, meeting()[1]) != (address, port)
    started({"MASTER_ADDR": "one", "MASTER_PORT": "7"})
    assert meeting() == ("one", 7)
    other = {**MPI, "MASTER_ADDR": "other", "MASTER_PORT": "8"}  # a launcher may say it by other words
    monkeypatch.setitem(LAUNCHERS, "mpi", replace(LAUNCHERS["mpi"], meant=lambda _: other))
    assert meeting() == ("other", 8)


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("mpi", "MASTER_.* is not set; .*: type mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"),
        ("environment", r"MASTER_ADDR is not set; .* a free port of it: set both"),
    ],
)
def test_ranks_of_several_hosts_are_asked_where_they_meet_when_they_need_it(by, words, started):
    started({name: value for name, value in ALL[by].items() if not name.startswith("MASTER_")})
    with pytest.raises(UserError, match=f"one of 4 ranks and {words}"):
        meeting()
    started({"MASTER_ADDR": "one"})
    with pytest.raises(UserError, match="MASTER_PORT is not set"):
        meeting()


@only_on_linux
def test_a_trainer_for_other_ranks_than_were_started_is_refused(started):
    started(BY_HAND)
    words = r"RANK and WORLD_SIZE announce 2 ranks here, 4 on all hosts, and the Trainer is for 1 on each of 1; type "
    with pytest.raises(UserError, match=words + r"Trainer\(devices=2, num_nodes=2\)"):
        trainer(PhaseStrategy("ddp"), 1, 1)
    made = trainer(PhaseStrategy("ddp"), 2, 1, num_nodes=2)
    assert (made.global_rank, made.local_rank, made.node_rank, made.world_size) == (3, 1, 1, 4)
    spawning = trainer(PhaseStrategy(start_method="spawn"), 2, 1, num_nodes=2)  # nobody spawns more ranks here
    assert isinstance(spawning.strategy.launcher, Scripts)
