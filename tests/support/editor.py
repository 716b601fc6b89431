"""The editor's server in a thread of the tests, and what asks it."""

import asyncio
import http.client
import json
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from gan.app.editing.editors import Editor
from gan.app.editing.server import serve
from tests.support import commands


@contextmanager
def serving(editor: Editor) -> Iterator[str]:
    """Inside the `with`, the editor's server answers at this address."""
    address: list[str] = []
    ready, ended = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(work())
            except asyncio.CancelledError:
                ended.set()
            finally:
                ready.set()

    async def work() -> None:
        tasks.append(asyncio.current_task())
        await serve(editor, 0, lambda found: (address.append(found), ready.set()))

    tasks: list[asyncio.Task] = []
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(60)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(tasks[0].cancel)
        thread.join(60)
        assert ended.is_set()


@contextmanager
def typed(*words: object) -> Iterator[str]:
    """Inside the `with`, the command answers at the address that it has printed. Then it gets a Ctrl-C, and ends."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "out").open("w") as out:
        command = commands.Typed(words, stdout=out, stderr=subprocess.STDOUT)
        said, address = Path(out.name).read_text, re.compile(r"open (http://127\.0\.0\.1:\d+/\?token=\S+) in")
        commands.until(lambda: command.poll() is not None or address.search(said()))
        try:
            yield address.search(said())[1]
        finally:
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 0
            assert "Traceback" not in said()


class Visitor:
    """Somebody who has opened the address."""

    def __init__(self, address: str) -> None:
        self.parts = urlsplit(address)
        (token,) = parse_qs(self.parts.query)["token"]
        self.headers = {"Cookie": f"edit-{token[:8]}={token}", "Origin": f"http://{self.parts.netloc}"}

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str | None) -> tuple[int, bytes, dict]:
        """The status, what was answered and its headers. A header that is None is not sent."""
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        link = http.client.HTTPConnection(self.parts.hostname, self.parts.port, timeout=60)
        link.putrequest(method, path, skip_host="Host" in given, skip_accept_encoding=True)
        for name, value in {**given, "Content-Length": str(len(body))}.items():
            if value is not None:
                link.putheader(name, value)
        link.endheaders(body)
        answer = link.getresponse()
        read = answer.read()
        link.close()
        return answer.status, read, dict(answer.getheaders())

    def draw(self, **edit: object) -> tuple[int, dict | str]:
        status, answer, _ = self.ask("POST", "/draw", json.dumps(edit).encode())
        return status, json.loads(answer) if status == 200 else answer.decode()
