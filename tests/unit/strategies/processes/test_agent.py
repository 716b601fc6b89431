"""The agent starts ranks, names what failed, starts them again, and hands signals on. The ranks here need no torch."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gan.files.errors import UserError
from strategies.processes import agent
from strategies.processes.agent import SAME_STEP, History, Launch
from strategies.processes.board import NEVER
from strategies.processes.failure import ERROR, FOLLOWS, LOST, REFUSED, Failure, failed
from strategies.processes.lost_ranks import Survivor
from strategies.processes.rendezvous import Rendezvous
from tests.support import commands
from tests.support.commands import alive, until

pytestmark = pytest.mark.usefixtures("here")
PATH = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}

BEGINNING = """
import json, os, signal, struct, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def begin(step):
    entry = struct.pack("qqq?127s", 0, 0, step + 1, False, b"")
    os.pwrite(os.open(os.environ["GAN_BOARD"], os.O_WRONLY), entry, len(entry) * int(os.environ["LOCAL_RANK"]))

def fail(kind, text, status=1):
    failure = json.dumps({"rank": rank, "process": os.getpid(), "host": "host", "why": text, "kind": kind,
                          "at": time.time()})
    said = {"failure": failure, "message": {"message": text, "extraInfo": {"timestamp": "1"}}}
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(said))
    sys.exit(status)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

open(f"began-{attempt}-{rank}", "w").write(" ".join(
    os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GAN_AGENT")))
"""


def started(code, ranks=2, restarts=3, rendezvous=None, advice=lambda name: ""):
    Path("rank.py").write_text(BEGINNING + textwrap.dedent(code))
    command = [sys.executable, "-S", "rank.py"]
    agent.run(Launch(command, ranks, rendezvous or Rendezvous(), restarts, advice))


def attempts():
    return {int(path.name.split("-")[1]) for path in Path().glob("began-*")}


def test_a_killed_rank_is_named_and_all_start_again_at_their_places(capfd):
    before = dict(os.environ)
    started(
        """
        begin(7)
        if attempt == 0:
            die() if rank == 1 else time.sleep(60)
        """
    )
    assert dict(os.environ) == before
    said = capfd.readouterr().err
    assert attempts() == {0, 1}
    assert "rank 1 (process " in said
    assert "was ended by signal 9 (Killed): from outside, or out of memory? (step 7)" in said
    assert "restart 1 of 3: all ranks start again" in said
    places = [Path(f"began-1-{rank}").read_text().split(" ", 5) for rank in range(2)]
    assert [place[:5] for place in places] == [[str(rank), str(rank), "2", "2", "0"] for rank in range(2)]
    (name,) = {place[5] for place in places}
    assert name.startswith("agent ") and not Path(name.split()[-1]).exists()


@pytest.mark.parametrize(
    ("end", "restarts", "words"),
    [
        # The control: without restarts it is an error that says how to go on.
        ("die()", 0, r"^rank 0 .*by signal 9 .*\(before the first step\)\ntype agent "),
        # torch's agent ends the other rank before that has said anything.
        ("fail('refused', 'no such picture', 2)", 3, r"^no such picture$"),
    ],
)
def test_a_failure_that_would_come_again_ends_the_run(end, restarts, words):
    with pytest.raises(UserError, match=words):
        advice = lambda name: "" if restarts else f"type {name}"  # noqa: E731
        started(f"{end} if rank == 0 else time.sleep(60)", restarts=restarts, advice=advice)
    assert attempts() == {0}


def send_when_ready(number, later):
    def send():
        until(lambda: len(list(Path().glob("ready-*"))) == 2)
        time.sleep(later)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


HEARING = """
def save(*_): time.sleep(0.3); open(f"saved-{rank}", "w").close(); sys.exit(0)
def nothing(*_): pass
"""
READY = 'begin(3); open(f"ready-{rank}", "w").close(); time.sleep(60)'


SLOW, DEAF = [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], "the ranks do not end by themselves, so they are killed: "


@pytest.mark.parametrize(
    ("number", "moments", "hearing", "saved", "said"),
    [
        (signal.SIGTERM, [0], "save", 2, ""),
        *(pytest.param(number, [0], "save", 2, "", marks=pytest.mark.slow) for number in SLOW),
        # Programs around a command, such as timeout, send it to the command and then to all of its group.
        (signal.SIGTERM, [0, 0.1], "save", 2, ""),
        (signal.SIGTERM, [0, 0.6], "nothing", 0, f"{DEAF}rank 0 begins step 3, rank 1 begins step 3"),
        # A failure is not tried again then.
        (signal.SIGTERM, [0], "lambda *_: die()", 0, "was ended by signal 9 (Killed): from outside, or out of memory?"),
    ],
)
def test_a_signal_is_handed_on_and_the_ranks_end_by_themselves_or_are_killed_after_a_second_one(
    number, moments, hearing, saved, said, monkeypatch, capfd
):
    monkeypatch.setattr(agent, "AGAIN", 60 if saved else 0.2)
    monkeypatch.setattr(agent, "GRACE", {number: 0.1})
    handler = signal.getsignal(number)
    for moment in moments:
        send_when_ready(number, moment)
    with contextlib.nullcontext() if saved else pytest.raises(KeyboardInterrupt):
        started(f"{HEARING}signal.signal({int(number)}, {hearing}); {READY}")
    assert len(list(Path().glob("saved-*"))) == saved and attempts() == {0}
    assert signal.getsignal(number) == handler
    assert said in capfd.readouterr().err


def test_an_interrupt_while_it_waits_for_another_host_ends_it(tmp_path):
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        started("", rendezvous=Rendezvous(f"file:{tmp_path}/meet", (2, 2)))
    assert attempts() == set()


@pytest.fixture
def by_hand(monkeypatch):
    """The first host's address and its rendezvous, by the variables of a person who starts each host."""

    def numbered(where):
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"), (*where.split(":"), "0"), strict=True):
            monkeypatch.setenv(name, value)
        return Rendezvous("", (2, 2))

    return numbered


@pytest.mark.promise("a host waits for others", "it says for whom, until when, and what to type there")
@pytest.mark.parametrize("numbered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_host_that_waits_says_for_whom_and_what_to_type_there_and_ends_in_time(numbered, by_hand, monkeypatch, capfd):
    monkeypatch.setattr(agent, "JOIN", 1)
    where = address()
    with pytest.raises(UserError, match=f"^the rendezvous {where}: 2 hosts have not met there within .* the same com"):
        started("", rendezvous=by_hand(where) if numbered else Rendezvous(where, (2, 2)))
    said = capfd.readouterr().err
    assert f"this host ({socket.gethostname()}, 127.0.0.1) waits at the rendezvous {where} for 2 hosts, until " in said
    variables = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={where.split(':')[1]} NODE_RANK=N " if numbered else ""
    assert f"on each of the others type\n  {variables}python -S rank.py\n" in said
    assert attempts() == set()


def test_a_rendezvous_that_another_program_has_is_named_and_a_host_does_not_wait_there_without_end(by_hand):
    """That program may take a connection, and never answer as torch's store does."""
    with socket.create_server(("", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^the rendezvous {where}: another program listens there alr"):
            started("", rendezvous=by_hand(where))
        waits = commands.run(*agent_of(where, (2, 2), before="agent.JOIN = agent.LATE = 1"), env=PATH, limit=60)
    assert waits.returncode == 2
    assert f"error: the rendezvous {where}: 2 hosts have not met there within" in waits.stderr


def agent_of(where, nodes, restarts=1, before=""):
    """What Python is given to be the agent of a host with one rank."""
    code = (
        "import sys\nfrom strategies.processes import agent\nfrom strategies.processes.rendezvous import Rendezvous\n"
        f"where = Rendezvous({where!r}, {nodes})\n{before}\n"
        f"agent.run(agent.Launch([sys.executable, '-S', 'rank.py'], 1, where, {restarts}, lambda name: ''))"
    )
    return "-c", code


@contextlib.contextmanager
def two_hosts(code, nodes, restarts=1, **variables):
    """Two hosts whose ranks run this code. The first one keeps the rendezvous. Whatever happens, they end."""
    Path("rank.py").write_text(BEGINNING + code)
    where, hosts = address(), []
    try:
        hosts.append(subprocess.Popen([sys.executable, *agent_of(where, nodes, restarts)], env=PATH | variables))
        assert until(lambda: not socket.socket().connect_ex(("127.0.0.1", int(where.split(":")[1]))), 60)
        hosts.append(subprocess.Popen([sys.executable, *agent_of(where, nodes, restarts)], env=PATH))
        yield where, *hosts
    finally:
        for each in hosts:
            each.kill()


def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


ALONE = """
size = os.environ["WORLD_SIZE"]
open(f"there-{size}-{rank}", "w").close()
while size == "2":
    time.sleep(0.05)
    if os.path.exists("lost"):
        fail("follows", "rank 1 is gone", 2)
"""


@pytest.mark.slow
def test_the_ranks_go_on_with_fewer_hosts_if_that_is_allowed():
    with two_hosts(ALONE, (1, 2)) as (_, first, second):
        assert until(lambda: len(list(Path().glob("there-2-*"))) == 2, 60)
        second.kill()
        Path("lost").touch()
        assert first.wait(120) == 0
        assert Path("there-1-0").exists()


KEPT = """
open(f"there-{rank}", "w").close()
while not (os.path.exists("there-0") and os.path.exists("there-1")):
    time.sleep(0.05)
if "KEEPS" in os.environ:
    die()
time.sleep(60)  # as NCCL does
"""


@pytest.mark.slow
def test_without_a_restart_nobody_waits_for_the_host_that_kept_the_rendezvous(capfd):
    with two_hosts(KEPT, (2, 2), restarts=0, KEEPS="") as (where, *hosts):
        assert until(lambda: len(list(Path().glob("there-*"))) == 2, 60)
        assert [each.wait(30) for each in hosts] == [1, 1]
    assert f"the rendezvous {where}: the host that keeps it has ended" in capfd.readouterr().err


# ---- whether to try again ----


failure = partial(Failure, 1, 4711, "host", "ended with ValueError: no")


@pytest.mark.parametrize(
    ("failures", "again"),
    [
        ([(ERROR, NEVER)], [False]),  # a mistake in the first step
        ([(ERROR, 0)], [False]),
        ([(ERROR, 1)], [True]),
        ([(LOST, NEVER), (LOST, 0), (FOLLOWS, 0)], [True] * 3),
        ([(REFUSED, 9)], [False]),
        ([(FOLLOWS, 9)], [True]),
        ([(LOST, step) for step in (4, 4, 5, 4, 4, 4)], [True] * 5 + [False]),  # the third in a row at one step
        ([(ERROR, step) for step in (4, 5, 4, 4)], [True] * 3 + [False]),  # the same error twice in a row there
        ([(ERROR, step) for step in range(1, 12)], [True] * 10 + [False]),  # ten restarts are allowed
    ],
)
def test_a_mistake_is_not_tried_again_but_a_kill_is_unless_it_comes_again_and_again(failures, again):
    history = History(10)
    assert [history.again(failure(kind), step) for kind, step in failures] == again and SAME_STEP == 3
    assert "This was the second time that this error came there" in history.last or failures[-1] != (ERROR, 4)
    history.ended = True
    assert not history.again(failure(LOST), 9)


def test_another_error_at_the_same_step_is_tried_again():
    history, other = History(10), replace(failure(ERROR), why="ended with OSError: a full disk")
    found = [history.again(each, 4) for each in (failure(ERROR), other, failure(ERROR))]
    assert found == [True, True, False] and "third failure there" in history.last


@pytest.mark.parametrize(("error", "untrue"), [("RanksDiffer", True), ("UserError", False)])
def test_weights_that_a_trial_has_found_wrong_are_nothing_to_go_on_from(error, untrue):
    history = History(3)
    assert not history.again(failure(REFUSED, error=error), 5) and history.untrue == untrue


@pytest.mark.parametrize(("kind", "again"), [(REFUSED, False), (LOST, True)])
def test_a_mistake_that_another_rank_has_found_is_not_tried_again_either(kind, again):
    """A rank that follows may end before the rank that has found the mistake."""
    survivor = Survivor(1)
    obituary = replace(survivor.lifeline.obituary, rank=0, why="gamma is wrong", kind=kind)
    follows = failed(1, survivor._follows(obituary))
    assert "gamma is wrong" in follows.why and History(3).again(follows, 9) is again


ENDS = """
import signal, sys, time
from strategies.processes.agent import end_with_launcher
def save(*_):
    open("saved", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
end_with_launcher(int(sys.argv[1]))
open("ready", "w").close()
time.sleep(120)
"""
PARENT = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_ends_when_its_launcher_is_killed(hosts):
    """The ranks of the only host save. The ranks of one host among others are lost, and the others go on."""
    words = [sys.executable, "-c", PARENT, sys.executable, "-c", ENDS, str(hosts)]
    parent = subprocess.Popen(words, env=PATH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    until(Path("ready").exists)
    parent.stderr.close()  # nobody reads any more what the rank says
    parent.kill()
    parent.wait()
    assert until(lambda: not alive(child))
    assert Path("saved").exists() == (hosts == 1)
