"""Control headless Chromium through a pipe, by its DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


class Page:
    """One page: open a file or an address, run scripts in it, and collect all errors.

    To ask for anything else than files, and than what `host` has, is an error.
    """

    def __init__(self, process: subprocess.Popen, out: int, into: int) -> None:
        self.process, self.out, self.into = process, out, into
        self.session: str | None = None
        self.problems: list[str] = []
        self.events: list[str] = []
        self.host = "file:"
        self._calls, self._rest = 0, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, where: Path | str) -> None:
        """Load a file from the disk, or an address, and wait until it is loaded."""
        self.events.clear()
        self.host = "file:" if isinstance(where, Path) else where[: where.index("/", 8) + 1]
        self.call("Page.navigate", url=where.resolve().as_uri() if isinstance(where, Path) else where)
        while "Page.loadEventFired" not in self.events:
            self._hear()

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the screen, which counts as a phone's."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def stroke(self, places: Sequence[tuple[float, float]]) -> None:
        """Press the mouse at the first place, move it over the others, and let it go. One place is a click."""
        how = {"button": "left", "clickCount": 1, "buttons": 1}
        for kind, (x, y) in [("mousePressed", places[0]), *(("mouseMoved", place) for place in places[1:])]:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **how)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=places[-1][0], y=places[-1][1], **how)

    def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does."""
        find = f"document.querySelector({json.dumps(selector)})"
        x, y = self.evaluate(
            f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}}), (box => [box.x + box.width / 2, "
            f"box.y + box.height / 2])({find}.getBoundingClientRect())"
        )
        self.stroke([(x, y)])

    def press(self, key: str) -> None:
        details = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": {"Enter": "\r"}.get(key, key)} if key in ("Enter", " ") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **details, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **details)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._calls:
                assert "error" not in heard, heard
                return heard["result"]

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self.out], [], [], 120)[0], "Chromium says nothing any more"
            part = os.read(self.out, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        heard = json.loads(line)
        event, about = heard.get("method", ""), heard.get("params", {})
        self.events.append(event)
        complaint = {
            "Runtime.exceptionThrown": lambda: True,
            "Runtime.consoleAPICalled": lambda: about["type"] in ("error", "warning", "assert"),
            "Log.entryAdded": lambda: (
                about["entry"]["level"] in ("error", "warning") and about["entry"]["source"] != "intervention"
            ),
            "Network.loadingFailed": lambda: True,
            "Network.requestWillBeSent": lambda: not about["request"]["url"].startswith(("data:", "blob:", self.host)),
        }
        if event == "Page.javascriptDialogOpening":  # whether to leave the page; until this is answered it does nothing
            answer = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self.into, json.dumps({**answer, "sessionId": self.session}).encode() + b"\0")
        if event in complaint and complaint[event]():
            self.problems.append(line.decode())
        return heard


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A page in a new browser, which is closed at the end. Where there is none, the test is skipped."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium here to open the page in; install Debian's package chromium")
    theirs_in, into = os.pipe()
    out, theirs_out = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    quiet = [f"--disable-{what}" for what in ("quic", "background-networking", "component-update", "sync")]
    command = [program, *flags, *quiet, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(process, out, into)
    finally:
        os.close(into)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out)
