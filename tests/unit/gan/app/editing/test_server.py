"""Who may ask the editor's server, and what it takes."""

import asyncio
import json
import select
import socket
import threading
import time

import pytest
from PIL import Image

from gan.app.editing import server
from gan.app.editing.editors import LARGEST, Editor
from gan.files.errors import UserError
from tests.support.editor import Visitor, serving


class Blocks(Editor):
    """Editor whose drawing waits while `go` is not set, and which note what is drawn."""

    kind, parts = "noise", ("seed",)

    def __init__(self) -> None:
        super().__init__("blocks", 1)
        self.go, self.begun, self.drawn, self.now = threading.Event(), threading.Event(), [], 0
        self.go.set()

    def draw(self, edit):
        self.now += 1
        assert self.now == 1, "two at once"
        self.begun.set()
        assert self.go.wait(60)
        self.drawn.append(edit["seed"])
        self.now -= 1
        if edit["seed"] < 0:
            raise UserError("seeds are from 0 on")
        return Image.new("RGB", (2, 2), (edit["seed"], 0, 0)), []


@pytest.fixture
def blocks():
    return Blocks()


@pytest.fixture
def address(blocks):
    with serving(blocks) as found:
        yield found


@pytest.fixture
def visitor(address):
    return Visitor(address)


ELSEWHERE = "The editor answers on this machine only: open the address that gan.edit has printed."
ANOTHER_PAGE = "The editor answers its own page only."
NO_TOKEN = "This address lacks its token: open the address that gan.edit has printed."
FULL = b"The editor has too much to do. Close other pages of it, and try this again."
SEED = json.dumps({"seed": 1}).encode()
REFUSED = {
    "another host, by DNS": ("GET", "/", {"Host": "evil.example:80"}, ELSEWHERE),
    "a host that begins like ours": ("GET", "/", {"Host": "127.0.0.1.evil.example"}, ELSEWHERE),
    "no host": ("GET", "/", {"Host": ""}, ELSEWHERE),
    "half a host": ("GET", "/", {"Host": "[::1"}, ELSEWHERE),
    "another origin": ("POST", "/draw", {"Origin": "https://evil.example"}, ANOTHER_PAGE),
    "another port of this machine": ("POST", "/draw", {"Origin": "http://127.0.0.1:1"}, ANOTHER_PAGE),
    "a page without origin": ("POST", "/draw", {"Origin": "null"}, ANOTHER_PAGE),
    "a post that says no origin": ("POST", "/draw", {"Origin": None}, ANOTHER_PAGE),
    "a picture in another page": ("GET", "/", {"Origin": None, "Sec_Fetch_Site": "same-site"}, ANOTHER_PAGE),
    "no token": ("POST", "/draw", {"Cookie": None}, NO_TOKEN),
    "a wrong token": ("GET", "/?token=guessed", {}, NO_TOKEN),
    "a token of other letters": ("GET", "/?token=%C3%A4%00", {}, NO_TOKEN),
    "a cookie that is no text": ("GET", "/", {"Cookie": "NAME=\xff\xfe"}, NO_TOKEN),
    "a token elsewhere": ("GET", "/edit.js?token=guessed", {"Cookie": None}, NO_TOKEN),
}


@pytest.mark.parametrize("what", REFUSED)
def test_who_may_not_ask_is_refused_in_words(what, visitor, blocks):
    method, path, headers, words = REFUSED[what]
    if "NAME" in (headers.get("Cookie") or ""):
        headers = {"Cookie": headers["Cookie"].replace("NAME", visitor.headers["Cookie"].partition("=")[0])}
    status, answer, sent = visitor.ask(method, path, SEED if method == "POST" else b"", **headers)
    assert (status, answer.decode()) == (403, words)
    assert "Set-Cookie" not in sent and blocks.drawn == []
    assert visitor.draw(seed=1)[0] == 200  # the control: the same without the fault


def test_no_path_leads_to_a_file(visitor):
    paths = "/../../../etc/passwd /..%2f..%2f..%2fetc%2fpasswd /edit.js/../server.py /server.py /edit.html //etc/passwd"
    more = "/picture/../../etc/passwd /about/-1 /about/x /nothing/3"
    assert {visitor.ask("GET", path)[0] for path in f"{paths} {more}".split()} <= {404, 405}


def test_the_token_becomes_a_cookie_and_the_page_loads_nothing_from_elsewhere(address):
    visitor = Visitor(address)
    cookie = visitor.headers.pop("Cookie")
    status, _, headers = visitor.ask("GET", address[address.index("/", 8) :], Origin=None)
    assert (status, headers["Location"]) == (303, "/")
    assert headers["Set-Cookie"] == f"{cookie}; HttpOnly; Path=/; SameSite=Strict"
    status, page, headers = visitor.ask("GET", "/", Cookie=cookie, Origin=None)
    assert status == 200 and b"<title>Editor" in page
    assert "default-src 'self'; " in headers["Content-Security-Policy"]
    assert address.startswith("http://127.0.0.1:")
    for name in ("/edit.js", "/edit.css", "/look.css"):
        status, text, _ = visitor.ask("GET", name, Cookie=cookie)
        assert status == 200 and b"http" not in text
    assert b"http" not in page


def test_what_is_too_large_or_wrong_is_said_and_it_goes_on(visitor, blocks):
    status, answer, _ = visitor.ask("POST", "/draw", b"0" * (LARGEST + 1))
    assert (status, answer.decode()) == (413, "This has more than 16,777,216 bytes, which the editor takes.")
    for body in (b"", b"{", b"[" * 100_000, b"\xff", b'{"seed": -1}'):
        assert visitor.ask("POST", "/draw", body)[0] == 400
    status, answer, _ = visitor.ask("POST", "/upload", b"\x89PNG")
    assert status == 400 and answer.startswith(b"This run has no label maps; open a file that")
    assert visitor.draw(seed=-1) == (400, "seeds are from 0 on")
    assert visitor.draw(seed=1)[0] == 200


def test_two_hundred_at_once_are_refused_politely_and_it_goes_on(visitor, blocks):
    """Each asks for a picture, of which none is ready before all have asked."""
    blocks.go.clear()
    links = [socket.create_connection((visitor.parts.hostname, visitor.parts.port), 60) for _ in range(200)]
    head = "\r\n".join(f"{name}: {value}" for name, value in visitor.headers.items())
    for link in links:
        asked = f"POST /draw HTTP/1.1\r\nHost: {visitor.parts.netloc}\r\n{head}\r\nContent-Length: {len(SEED)}\r\n\r\n"
        link.sendall(asked.encode() + SEED)
    refused, until = [], time.monotonic() + 60
    while len(refused) < 200 - server.REQUESTS and time.monotonic() < until:
        refused = select.select(links, [], [], 0.1)[0]
    blocks.go.set()
    said = [link.recv(100_000) for link in links]
    assert sum(each.startswith(b"HTTP/1.1 200 ") for each in said) == server.REQUESTS
    assert sum(each.startswith(b"HTTP/1.1 503 ") and each.endswith(FULL) for each in said) == len(refused)
    for link in links:
        link.close()
    assert visitor.draw(seed=1)[0] == 200


def test_connections_that_ask_nothing_are_closed(blocks, monkeypatch):
    monkeypatch.setattr(server, "IDLE", 0.5)
    with serving(blocks) as address:
        visitor = Visitor(address)
        links = [socket.create_connection((visitor.parts.hostname, visitor.parts.port), 60) for _ in range(200)]
        assert visitor.ask("GET", "/")[0] == 200
        assert {link.recv(1) for link in links} == {b""}


def test_ctrl_c_does_not_wait_for_what_computes():
    go = threading.Event()

    async def play():
        task = asyncio.create_task(server.Turns().take(lambda: bytes(go.wait(60))))
        await asyncio.sleep(0.1)
        task.cancel()

    before, began = set(threading.enumerate()), time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - began < 30
    computing = set(threading.enumerate()) - before
    assert computing and all(thread.daemon for thread in computing)
    go.set()


def test_a_port_that_is_taken_is_named(address):
    port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(UserError, match=f"port {port} cannot be used: .*; type another one after --port"):
        asyncio.run(server.serve(Blocks(), port, lambda address: None))
