"""`python -m gan.edit`: an editor in the browser: paint label maps, choose styles, and see what the networks make."""

import asyncio
import webbrowser
from contextlib import suppress
from pathlib import Path

from jsonargparse import Namespace
from jsonargparse.typing import restricted_number_type

from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError

EXAMPLES = """examples:
  python -m gan.edit                                the newest run: open the address that is printed; Ctrl-C ends it
  python -m gan.edit runs/001-sean-faces --open     let the browser open it
  python -m gan.edit ffhq.pkl                       a published file of StyleGAN2 or R3GAN
  python -m gan.edit auto --repeat edit.json        draw a saved edit again, without a browser
"""

Port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])


@command
def main(argv: list[str]) -> None:
    settings = parse(argv)
    with working():
        from gan.app.editing.editors import open
        from gan.app.sampling.sheet import save_png

        try:
            from gan.app.editing.server import serve
        except ImportError as error:
            raise UserError(f"the editor needs {error.name}; type pip install '.[edit]'") from error

    shown = open(settings.which, settings.device, out=settings.out, data=settings.data, name=settings.run)
    editor = shown.editor()
    say(shown.title)
    if settings.repeat is not None:
        image, notes = editor.repeat(settings.repeat)
        path = shown.path(settings.repeat.stem, ".png", settings.file)
        save_png(image, path)
        say(*notes, f"  {path}")
        return

    def ready(address: str) -> None:
        say(f"open {address} in a browser on this machine; Ctrl-C ends the editor")
        if settings.open:
            webbrowser.open(address)

    with suppress(KeyboardInterrupt):
        asyncio.run(serve(editor, settings.port, ready))


def parse(argv: list[str]) -> Namespace:
    what = "Edit what a run's networks make, in a browser on this machine."
    parser = Parser("python -m gan.edit", "[RUN] [options]", what, EXAMPLES)
    options.add_saved_run(parser)
    add = parser.option
    add("--port", Port, "the port on 127.0.0.1; 0 is a free one", 0)
    parser.flag("--open", "let the browser open the address")
    add("--repeat", Path, "draw the edit in this file, which the editor has saved, and stop", metavar="FILE")
    add("-o --file", str, "where to write the repeated edit; default in the run's samples/", metavar="FILE")
    options.add_device(parser)
    return options.parse_saved_run(parser, argv)


if __name__ == "__main__":
    run(main)
