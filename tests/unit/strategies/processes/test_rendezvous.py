import socket

import pytest

from gan.files.errors import UserError
from strategies.processes.rendezvous import Rendezvous

NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_one_host_meets_nobody_even_if_the_environment_names_others(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "other.example")
    monkeypatch.setenv("NODE_RANK", "1")
    alone = Rendezvous()
    alone.check()
    found = alone.parameters(60)
    assert (found.backend, found.endpoint, found.max_nodes, found.local_addr) == ("c10d", "localhost:0", 1, "127.0.0.1")
    assert alone.fixed() is None


def test_two_launches_on_one_host_do_not_meet():
    assert Rendezvous().parameters(60).run_id != Rendezvous().parameters(60).run_id


@pytest.mark.parametrize(
    ("where", "endpoint"), [("127.0.0.1:1234", "127.0.0.1:1234"), ("127.0.0.1", "127.0.0.1:29400")]
)
def test_hosts_meet_at_an_address(where, endpoint):
    found = Rendezvous(where, (2, 4)).parameters(60)
    assert (found.backend, found.endpoint, found.min_nodes, found.max_nodes) == ("c10d", endpoint, 2, 4)
    assert found.local_addr == "127.0.0.1"  # the address on the way there, not what this host's name means
    assert found.get_as_int("join_timeout") == 60


def test_the_host_of_the_address_serves_it_unless_another_process_does():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert Rendezvous(f"127.0.0.1:{taken}", (2, 2)).parameters(60).get_as_bool("is_host") is False
    assert Rendezvous(f"127.0.0.1:{taken}", (2, 2)).parameters(60).get_as_bool("is_host") is True
    assert Rendezvous("192.0.2.1:29400", (2, 2)).parameters(60).get_as_bool("is_host") is False


def test_hosts_meet_in_a_file(tmp_path):
    found = Rendezvous(f"file:{tmp_path}/meet", (2, 2)).parameters(60)
    assert (found.backend, found.endpoint, found.get("store_type")) == ("c10d", f"{tmp_path}/meet", "file")


def test_the_environment_numbers_the_hosts(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    meeting = Rendezvous("", (2, 2))
    assert meeting.fixed() is None
    assert meeting.parameters(60).backend == "c10d"
    monkeypatch.setenv("NODE_RANK", "1")
    assert meeting.fixed() == ("127.0.0.1", 1234)
    found = meeting.parameters(60)
    assert (found.backend, found.endpoint, found.get("rank")) == ("static", "127.0.0.1:1234", 1)
    assert Rendezvous("127.0.0.1:99", (2, 2)).parameters(60).backend == "c10d"  # what is typed goes first


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (dict(MASTER_PORT="0"), "MASTER_PORT is '0', and ports have numbers from 1"),
        (dict(MASTER_PORT="1234", NODE_RANK="two"), "NODE_RANK is 'two', which is no number"),
        (
            dict(MASTER_PORT="1234", NODE_RANK="2"),
            r"NODE_RANK is '2', and there are 2 hosts .*: the last one has number 1",
        ),
    ],
)
def test_what_the_environment_cannot_mean_is_refused(variables, words, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^the environment variable {words}"):
        Rendezvous("", (2, 2)).check()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "several hosts need a place to find each other; type the same on all hosts: --rendezvous HOST:29400"),
        ("host:port", "--rendezvous host:port is no address; type"),
        (":1234", "--rendezvous :1234 is no address; type"),
        ("host:70000", "--rendezvous host:70000 is no address; type"),
        ("nosuch.invalid:29400", "the rendezvous nosuch.invalid:29400: this host knows no host 'nosuch.invalid'"),
        ("file:/no/such/folder/meet", "--rendezvous file:/no/such/folder/meet: there is no folder /no/such/folder"),
    ],
)
def test_no_place_to_meet_is_refused(where, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Rendezvous(where, (2, 2)).check()
    Rendezvous(where, (1, 1)).check()
