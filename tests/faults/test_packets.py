"""What is sent to a port is what its name says, and a killed rank that nobody names is reported."""

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.faults.kinds.packets import PACKETS

TOKEN = b"0123456789abcdef" * 2
UNTIED = """
from pathlib import Path
from strategies.processes.lost_ranks import Survivor
from tests.faults.case import Player
from tests.faults.kinds.packets import packets
Survivor.tie = lambda *_: None
print(Player(packets, "packets", 0, 0, Path("known").absolute()).end().wrong)
"""


@pytest.mark.parametrize("name", [name for name in PACKETS if "line without end" not in name])
def test_only_who_knows_the_token_begins_with_it(name):
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        held = PACKETS[name](server.getsockname(), TOKEN, Random(1))
        with closing(server.accept()[0]) as first:
            for connection in held:
                connection.close()
            try:
                heard = first.makefile("rb").read()
            except ConnectionResetError:
                heard = b""
    assert heard.startswith(TOKEN) == name.startswith("the token")


def test_who_is_refused_goes_on():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    assert PACKETS["many connections"](place, TOKEN, Random(1)) == []


@pytest.mark.slow
def test_the_control_without_a_lifeline_is_reported(tmp_path):
    command = [sys.executable, "-c", UNTIED]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert "no rank listens on a port" in ended.stdout, ended.stderr
    assert "a killed rank is named" in ended.stdout or "no traceback" in ended.stdout
