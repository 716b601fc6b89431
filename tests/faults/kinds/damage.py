"""Ways to damage a file. Each says what it has done."""

import os
import shutil
import socket
from pathlib import Path
from random import Random


def damage_bytes(path: Path, chance: Random) -> str:
    """Flip a bit, cut, empty, repeat or overwrite."""
    content = bytearray(path.read_bytes())
    way = chance.choice(("flip", "flip", "flip", "cut", "empty", "longer", "overwrite", "zeros", "moved"))
    if not content or way == "empty":
        path.write_bytes(b"")
        return f"{path} emptied"
    where = chance.randrange(len(content))
    some = chance.randrange(1, 64)
    match way:
        case "flip":
            bit = chance.randrange(8)
            content[where] ^= 1 << bit
            way = f"bit {bit} of byte {where} flipped"
        case "cut":
            del content[where:]
            way = f"cut to {where} bytes"
        case "longer":
            content += chance.randbytes(some)
            way = f"{some} bytes longer"
        case "overwrite":
            content[where : where + some] = chance.randbytes(min(some, len(content) - where))
            way = f"{some} bytes from {where} on overwritten"
        case "zeros":
            content[where:] = bytes(len(content) - where)
            way = f"zeros from byte {where} on"
        case "moved":
            del content[where : where + some]
            way = f"{some} bytes from {where} on taken out"
    path.write_bytes(content)
    return f"{path} {way}"


def not_a_file(path: Path, chance: Random) -> str:
    """Something else in the place of a file."""
    way = chance.choice(("nothing", "folder", "pipe", "socket", "loop", "broken link", "zeros without end", "text"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match way:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as some:
                some.bind(os.path.relpath(path))
        case "loop":
            path.symlink_to(path.name)
        case "broken link":
            path.symlink_to("nowhere")
        case "zeros without end":
            path.symlink_to("/dev/zero")
        case "text":
            path.write_text("no such thing\n")
    return f"{path} is now {way}"
