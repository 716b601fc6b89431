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
from pathlib import Path

import pytest

from gan.files.errors import UserError
from strategies.processes import agent
from strategies.processes.agent import SAME_STEP, History, Launch
from strategies.processes.board import NEVER
from strategies.processes.failure import ERROR, FOLLOWS, LOST, REFUSED, Failure, failed
from strategies.processes.lost_ranks import Survivor
from strategies.processes.rendezvous import Rendezvous
from tests.support.commands import alive, until

pytestmark = pytest.mark.usefixtures("here")

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


def send_when_ready(number, later=0.0):
    def send():
        until(lambda: len(list(Path().glob("ready-*"))) == 2)
        time.sleep(later)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


SAVES = 'def wish(*_): time.sleep(0.3); open(f"saved-{rank}", "w").close(); sys.exit(0)\n'
READY = 'begin(3); open(f"ready-{rank}", "w").close(); time.sleep(60)'


OTHERS = [pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS])
def test_a_signal_to_end_is_handed_on_and_the_ranks_end_by_themselves(number):
    handler = signal.getsignal(number)
    send_when_ready(number)
    started(f"{SAVES}signal.signal({int(number)}, wish); {READY}")
    assert len(list(Path().glob("saved-*"))) == 2 and attempts() == {0}
    assert signal.getsignal(number) == handler


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_ranks_that_do_not_hear_are_killed_after_a_second_signal(number, monkeypatch, capfd):
    monkeypatch.setattr(agent, "AGAIN", 0.2)
    monkeypatch.setattr(agent, "GRACE", {number: 0.5})
    send_when_ready(number)
    send_when_ready(number, 0.6)
    with pytest.raises(KeyboardInterrupt):
        started(f"signal.signal({int(number)}, lambda *_: None); {READY}")
    places = "rank 0 begins step 3, rank 1 begins step 3"
    assert f"the ranks do not end by themselves, so they are killed: {places}" in capfd.readouterr().err


def test_one_signal_that_comes_twice_leaves_the_ranks_time_to_save(monkeypatch):
    """Programs around a command, such as timeout, send it to the command and then to all of its group."""
    monkeypatch.setattr(agent, "GRACE", {signal.SIGTERM: 0.1})
    send_when_ready(signal.SIGTERM)
    send_when_ready(signal.SIGTERM)
    started(f"{SAVES}signal.signal(signal.SIGTERM, wish); {READY}")
    assert len(list(Path().glob("saved-*"))) == 2


def test_after_a_signal_a_failure_is_not_tried_again(capfd):
    send_when_ready(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        started(f"signal.signal(signal.SIGTERM, lambda *_: die()); {READY}")
    assert attempts() == {0}
    assert "was ended by signal 9 (Killed): from outside, or out of memory? (step 3)" in capfd.readouterr().err


def test_an_interrupt_while_it_waits_for_another_host_ends_it(tmp_path):
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        started("", rendezvous=Rendezvous(f"file:{tmp_path}/meet", (2, 2)))
    assert attempts() == set()


def numbered_by(monkeypatch, address):
    """The variables of a person who starts the first host by hand."""
    for name, value in zip(("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"), (*address.split(":"), "0"), strict=True):
        monkeypatch.setenv(name, value)


@pytest.mark.promise("a host waits for others", "it says for whom, until when, and what to type there")
@pytest.mark.parametrize("numbered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_host_that_waits_says_for_whom_and_what_to_type_there_and_ends_in_time(numbered, monkeypatch, capfd):
    monkeypatch.setattr(agent, "JOIN", 1)
    where = address()
    if numbered:
        numbered_by(monkeypatch, where)
    with pytest.raises(UserError, match=f"^the rendezvous {where}: 2 hosts have not met there within .* the same com"):
        started("", rendezvous=Rendezvous("" if numbered else where, (2, 2)))
    said = capfd.readouterr().err
    assert f"this host ({socket.gethostname()}, 127.0.0.1) waits at the rendezvous {where} for 2 hosts, until " in said
    port = where.split(":")[1]
    variables = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} NODE_RANK=N " if numbered else ""
    assert f"on each of the others type\n  {variables}python -S rank.py\n" in said
    assert attempts() == set()


def test_a_port_that_another_program_has_is_named(monkeypatch):
    with socket.create_server(("", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        numbered_by(monkeypatch, where)
        with pytest.raises(UserError, match=f"^the rendezvous {where}: another program listens there alr"):
            started("", rendezvous=Rendezvous("", (2, 2)))


@pytest.mark.parametrize("numbered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_host_at_whose_rendezvous_another_program_listens_does_not_wait_without_end(numbered):
    """It may take a connection, and never answer as torch's store does."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        number = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "1"} if numbered else {}
        where = "" if numbered else f"127.0.0.1:{port}"
        waits = host(where, (2, 2), before="agent.JOIN = agent.LATE = 1", stderr=subprocess.PIPE, text=True, **number)
        said = waits.communicate(timeout=60)[1]
    assert waits.returncode == 2
    assert f"error: the rendezvous 127.0.0.1:{port}: 2 hosts have not met there within" in said


def host(where, nodes, restarts=1, before="", stderr=None, text=None, **variables):
    """A process that is the agent of a host with one rank."""
    code = (
        "import sys\nfrom strategies.processes import agent\nfrom strategies.processes.rendezvous import Rendezvous\n"
        f"where = Rendezvous({where!r}, {nodes})\n{before}\n"
        f"agent.run(agent.Launch([sys.executable, '-S', 'rank.py'], 1, where, {restarts}, lambda name: ''))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), **variables}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=stderr, text=text)


@contextlib.contextmanager
def hosts_with(code, folder):
    """Hosts whose ranks run this code. Whatever happens, they end."""
    (folder / "rank.py").write_text(BEGINNING + code)
    hosts = []
    try:
        yield hosts
    finally:
        for each in hosts:
            each.kill()


def served(meeting):
    return not socket.socket().connect_ex(("127.0.0.1", int(meeting.split(":")[1])))


def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


AGAIN = """
first = not os.path.exists(f"there-{rank}")
open(f"there-{rank}", "w").close()
while first:
    time.sleep(0.05)
    if rank == 1 and os.path.exists("there-0"):
        die()
"""


ALONE = """
size = os.environ["WORLD_SIZE"]
open(f"there-{size}-{rank}", "w").close()
while size == "2":
    time.sleep(0.05)
    if os.path.exists("lost"):
        fail("follows", "rank 1 is gone", 2)
"""


@pytest.mark.slow
def test_the_ranks_go_on_with_fewer_hosts_if_that_is_allowed(tmp_path):
    meeting = address()
    with hosts_with(ALONE, tmp_path) as hosts:
        hosts.append(host(meeting, (1, 2)))
        assert until(lambda: served(meeting), 60)
        hosts.append(host(meeting, (1, 2)))
        assert until(lambda: len(list(tmp_path.glob("there-2-*"))) == 2, 60)
        hosts[1].kill()  # the host that does not serve the rendezvous
        (tmp_path / "lost").touch()
        assert hosts[0].wait(120) == 0
        assert (tmp_path / "there-1-0").exists()


KEPT = """
open(f"there-{rank}", "w").close()
while not (os.path.exists("there-0") and os.path.exists("there-1")):
    time.sleep(0.05)
if "KEEPS" in os.environ:
    die()
time.sleep(60)  # as NCCL does
"""


@pytest.mark.slow
def test_without_a_restart_nobody_waits_for_the_host_that_kept_the_rendezvous(tmp_path, capfd):
    meeting = address()
    with hosts_with(KEPT, tmp_path) as hosts:
        hosts.append(host(meeting, (2, 2), restarts=0, KEEPS=""))
        assert until(lambda: served(meeting), 60)
        hosts.append(host(meeting, (2, 2), restarts=0))
        assert [each.wait(30) for each in hosts] == [1, 1]
    assert f"the rendezvous {meeting}: the host that keeps it has ended" in capfd.readouterr().err


# ---- whether to try again ----


def failure(kind=ERROR, **more):
    return Failure(1, 4711, "host", "ended with ValueError: no", kind, **more)


@pytest.mark.parametrize(
    ("failures", "again"),
    [
        ([(ERROR, NEVER)], [False]),  # a mistake in the first step
        ([(ERROR, 0)], [False]),
        ([(ERROR, 1)], [True]),
        ([(LOST, NEVER), (LOST, 0), (FOLLOWS, 0)], [True] * 3),
        ([(REFUSED, 9)], [False]),
        ([(FOLLOWS, 9)], [True]),
        ([(ERROR, step) for step in (4, 4, 5, 4, 4, 4)], [True] * 5 + [False]),  # the third in a row at one step
        ([(ERROR, step) for step in range(1, 12)], [True] * 10 + [False]),  # ten restarts are allowed
    ],
)
def test_a_mistake_is_not_tried_again_but_a_kill_is_unless_it_comes_again_and_again(failures, again):
    history = History(10)
    assert [history.again(failure(kind), step) for kind, step in failures] == again and SAME_STEP == 3
    history.ended = True
    assert not history.again(failure(LOST), 9)


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


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_ends_when_its_launcher_is_killed(hosts, tmp_path):
    """The ranks of the only host save. The ranks of one host among others are lost, and the others go on."""
    (tmp_path / "rank.py").write_text(
        "import signal, sys, time\nfrom strategies.processes.agent import end_with_launcher\n"
        "def save(*_):\n    open('saved', 'w').close()\n    sys.exit()\n"
        f"signal.signal(signal.SIGTERM, save)\nend_with_launcher({hosts})\n"
        "open('ready', 'w').close()\ntime.sleep(120)\n"
    )
    parent = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, 'rank.py']); print(p.pid, flush=True); p.wait()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment, **pipes)
    child = int(process.stdout.readline())
    until((tmp_path / "ready").exists)
    process.stderr.close()  # nobody reads any more what the rank says
    process.kill()
    process.wait()
    assert until(lambda: not alive(child))
    assert (tmp_path / "saved").exists() == (hosts == 1)
