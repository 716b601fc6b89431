"""The editor's server: it is reached from this machine alone, by who knows its token, and computes one thing at a time.

[Note: who may ask]
Every page that a browser shows may send requests to this machine. So a request must name this machine as its host (else
a page of another host could have got our address by DNS), must come from our own page where the browser says from where
it comes, and must have the token. The token is in the address that is printed, and then in a cookie. What a request
names is a number or a name from a list, never a path.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from aiohttp import web

from gan.app.editing.editors import LARGEST, Editor
from gan.app.page.table import LOOK
from gan.files.errors import UserError, explained

HERE = Path(__file__).resolve().parent
HOST, NAMES = "127.0.0.1", re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
REQUESTS = 64  # at once; more are refused
HEADER = 1 << 16  # bytes of one; each start leaves the browser a cookie, and all come in one header
IDLE = 15.0  # seconds after which a connection that asks nothing is closed
FULL = "The editor has too much to do. Close other pages of it, and try this again."
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Turns:
    """One computation at a time, in order, in one thread for which the end of the process does not wait."""

    def __init__(self) -> None:
        self._pending = SimpleQueue[tuple[Callable[[], bytes], Future[bytes]]]()
        Thread(target=self._compute, daemon=True).start()

    async def take(self, work: Callable[[], bytes]) -> bytes:
        made: Future[bytes] = Future()
        self._pending.put((work, made))
        return await asyncio.wrap_future(made)

    def _compute(self) -> None:
        while True:
            work, made = self._pending.get()
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                    made.set_exception(error)


class Site:
    def __init__(self, editor: Editor, token: str) -> None:
        self.editor, self.token, self.turns, self.requests = editor, token, Turns(), 0
        self.cookie = f"edit-{token[:8]}"  # a name of its own: browsers give a cookie to all ports of a host

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.guard], client_max_size=LARGEST)
        page = [web.get("/", self.page), web.get("/{name:(?:edit|look)[.](?:css|js)}", self.page)]
        app.add_routes([*page, web.get("/{what}/{number:[0-9]{1,9}}", self.answer), web.post("/{what}", self.answer)])
        app.on_response_prepare.append(add_headers)
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who may not ask, in words; and say in words what was wrong with a request."""
        if refused := self.refused(request):
            return web.Response(status=403, text=refused)
        if self.requests >= REQUESTS:
            return web.Response(status=503, text=FULL)
        self.requests += 1
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return web.Response(status=413, text=f"This has more than {LARGEST:,} bytes, which the editor takes.")
        except UserError as error:
            return web.Response(status=400, text=str(error))
        finally:
            self.requests -= 1

    def refused(self, request: web.Request) -> str | None:
        """Why this request is refused. See [Note: who may ask]."""
        if not NAMES.fullmatch(request.host):
            return "The editor answers on this machine only: open the address that gan.edit has printed."
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        given = request.query.get("token") if request.path == "/" else None
        others = origin not in (None, f"http://{request.host}") or site not in ("same-origin", "none")
        if (others and not given) or (origin is None and request.method == "POST"):
            return "The editor answers its own page only."
        given = (given or request.cookies.get(self.cookie, "")).encode(errors="replace")
        if hmac.compare_digest(given, self.token.encode()):
            return None
        return "This address lacks its token: open the address that gan.edit has printed."

    async def page(self, request: web.Request) -> web.StreamResponse:
        if "token" not in request.query:
            name = request.match_info.get("name", "edit.html")
            return web.FileResponse(LOOK if name == LOOK.name else HERE / name)
        moved = web.HTTPSeeOther("/")  # so that the token does not stay in the address
        moved.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict", path="/")
        raise moved

    async def answer(self, request: web.Request) -> web.Response:
        work = self.editor.answers.get(request.match_info["what"])
        if work is None and request.match_info["what"] == "upload":  # the page sends any PNG there
            raise UserError("This run has no label maps; open a file that Save the edit has written.")
        if work is None:
            raise web.HTTPNotFound
        given = await request.read() if request.method == "POST" else request.match_info["number"].encode()
        made = await self.turns.take(partial(work, given))
        kind = "image/png" if made.startswith(b"\x89PNG") else "application/octet-stream"
        return web.Response(body=made, content_type=kind)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


async def serve(editor: Editor, port: int, ready: Callable[[str], None]) -> None:
    """Serve until this task is cancelled; `ready` gets the address when it can be opened."""
    token = secrets.token_urlsafe(24)
    app = Site(editor, token).application()
    runner = web.AppRunner(app, access_log=None, max_field_size=HEADER, keepalive_timeout=IDLE, shutdown_timeout=1)
    await runner.setup()
    try:
        with explained(f"port {port} cannot be used: {{why}}; type another one after --port", OSError):
            await web.TCPSite(runner, HOST, port).start()
        ready(f"http://{HOST}:{runner.addresses[0][1]}/?token={token}")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
