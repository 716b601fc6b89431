"""Which network gloo uses, and what a person types where that leads nowhere."""

import os
import socket

import pytest
import torch.distributed as dist

from gan.files.errors import UserError
from strategies.processes import interface
from strategies.processes.interface import GLOO, choose_interface, clear_errors, own_name

MESH = "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152] timed out connecting: Connection refused"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setenv(GLOO, "")  # so that it is put back
    monkeypatch.delenv(GLOO)


def test_gloo_is_told_the_interface_towards_the_main_address():
    choose_interface("127.0.0.1")
    assert os.environ[GLOO] == "lo"


def test_what_the_user_has_chosen_stays(monkeypatch):
    monkeypatch.setenv(GLOO, "eth7")
    choose_interface("127.0.0.1")
    assert os.environ[GLOO] == "eth7"


@pytest.mark.parametrize("address", ["no-such-host.invalid", "127.0.0.77"])
def test_an_address_that_no_interface_has_is_left_to_torch(address, monkeypatch):
    monkeypatch.setattr(interface, "own_address", lambda towards: socket.gethostbyname(towards))
    choose_interface(address)
    assert GLOO not in os.environ


@pytest.mark.parametrize(("own", "name"), [("10.1.2.3", "10.1.2.3"), ("127.0.1.1", "node0"), ("::1", "node0")])
def test_a_host_is_called_by_its_own_address_unless_only_itself_can_reach_that(own, name, monkeypatch):
    monkeypatch.setattr(interface, "own_address", lambda towards: own)
    assert own_name("node0") == name


def test_a_name_that_does_not_exist_is_taken_as_it_is():
    assert own_name("no-such-host.invalid") == "no-such-host.invalid"


@pytest.mark.parametrize(("chosen", "words"), [("eth7", "interface eth7"), (None, "that this host's name leads to")])
def test_ranks_that_gloo_cannot_connect_say_what_to_type(chosen, words, monkeypatch):
    if chosen is not None:
        monkeypatch.setenv(GLOO, chosen)
    said = rf"met at 10.0.0.1, but .*{words}; type export {GLOO}=NAME on each host"
    with pytest.raises(UserError, match=said), clear_errors("10.0.0.1"):
        raise RuntimeError(MESH)
    with pytest.raises(RuntimeError, match=r"^other$") as caught, clear_errors("10.0.0.1"):
        raise RuntimeError("other")
    assert not isinstance(caught.value, UserError)


def test_a_main_port_that_is_taken_is_named_with_its_variable():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        words = f"^the environment variable MASTER_PORT is '{port}', and another program"
        with pytest.raises(UserError, match=words), interface.clear_meeting("127.0.0.1", port):
            dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)


def test_a_main_address_that_is_no_host_is_named_with_its_variable():
    words = "^the environment variable MASTER_ADDR is 'no host', and this host knows no"
    with pytest.raises(UserError, match=words), interface.clear_meeting("no host", 29500):
        pass
