"""Data sets on disk, damaged before a command reads them or while it trains on them."""

import io
import os
import shutil
import signal
import time
from pathlib import Path
from random import Random

from PIL import Image

from tests.faults.case import Case
from tests.faults.kinds.damage import damage_bytes, not_a_file
from tests.faults.known import FOLDER, ONE
from tests.support.layouts import hollow_png

BEGUN = 60  # seconds for a training to begin
NAMES = (b"\x1b[2J.png", b"\xff\xfe.png", b"a\nb.png", b"..png", b"x" * 250 + b".png", b" .png", b"\xc3\xa9.png")


def damaged_data(case: Case) -> None:
    """Damage a folder of pictures, a file of its cache or a picture to paint; then train, paint or score."""
    run = case.copy("folder")
    for _ in range(case.chance.choice((1, 1, 2))):
        case.say(damage(Path("data"), case.chance))
    match case.chance.choice(("fit", "fit", "resume", "sample", "evaluate", "pair", "styles")):
        case "fit":
            case.run("fit", *FOLDER, *ONE, "--max-steps", "1")
        case "resume":
            case.run("resume", "--resume", run, *ONE, "--max-steps", "3", "--save-every", "1", refusable=False)
        case "sample":
            case.run("sample", run)
        case "evaluate":
            case.run("evaluate", run, "--scores", "ssim", "--devices", "1", "--accelerator", "cpu")
        case "pair":
            shutil.copytree(case.known / "folder" / "data", "mine")
            picture, label = Path("mine/images/0.png"), Path("mine/labels/0.png")
            case.say(one_file(case.chance.choice((picture, label)), case.chance))
            case.run("sample", run, "reconstruct", "--picture", f"{picture}:{label}", "-o", "out/a.png")
        case "styles":
            case.run("sample", run, "save-styles", "-o", "mine.pt")
            if Path("mine.pt").is_file():
                case.say(one_file(Path("mine.pt"), case.chance))
                case.run("sample", run, "transfer", "--from", "mine.pt", "--to", "0", "-o", "out/b.png")


def data_damaged_meanwhile(case: Case) -> None:
    """Damage a data set while a run trains on it, with and without a worker."""
    case.copy("folder")
    workers = case.chance.choice(("0", "0", "1"))
    words = (*FOLDER, *ONE, "--max-steps", "10", "--save-every", "5", "--sample-every", "10", "--log-every", "1")
    started = case.start("fit", *words, "--workers", workers)
    running, until = started[3], time.monotonic() + BEGUN
    begun = Path("runs/002-sean-folder/metrics.csv")
    while running.runs() and not begun.exists() and time.monotonic() < until:
        time.sleep(0.02)
    case.say(damage(Path("data"), case.chance))
    signals = ()
    if case.chance.random() < 0.3 and running.runs():
        signals = (case.chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)),)
        case.say(f"and {signals[0].name}")
        os.kill(running.process, signals[0])
    case.judge(*started, refusable=False, signals=signals, damaged="data/*")


def damage(data: Path, chance: Random) -> str:
    """Something is wrong with a folder of pictures."""
    files = sorted(path for path in data.rglob("*") if not path.is_dir() or path.is_symlink())
    pictures = [path for path in files if path.suffix == ".png"]
    whole = all((data / name).is_dir() for name in ("images", "labels"))  # not, if they were damaged before
    match chance.choice(("file",) * 8 + ("folder", "cache", "gone") + ("more", "name", "link") * whole):
        case "folder":
            return not_a_file(data / chance.choice(("images", "labels")), chance)
        case "more":
            (data / "images" / "9.png").write_bytes(pictures[0].read_bytes() if pictures[0].is_file() else b"")
            return "a picture without a label map"
        case "name":
            name = chance.choice(NAMES)
            for part in chance.sample(("images", "labels"), chance.choice((1, 2))):
                shutil.copy(pictures[-1], os.fsencode(data / part) + b"/" + name)
            return f"a name {name[:20]!r}"
        case "link":
            if not (data / "images" / "again").is_symlink():
                (data / "images" / "again").symlink_to("..")
            return "a folder that is in itself"
        case "cache":
            caches = sorted(data.with_name(f"{data.name}.gan-cache").glob("*.jsonl"))
            return one_file(chance.choice(caches), chance) if caches else "no cache to damage"
        case "gone":
            chance.choice(pictures).unlink()
            return "a picture or a label map is gone"
    return one_file(chance.choice(pictures), chance)


def one_file(path: Path, chance: Random) -> str:
    """A file is damaged, is none, or is a picture of another kind."""
    if chance.random() < 0.35 and path.is_file():
        return damage_bytes(path, chance)
    if chance.random() < 0.4:
        return not_a_file(path, chance)
    kind = chance.choice(list(OTHERS))
    path.unlink(missing_ok=True)
    path.write_bytes(OTHERS[kind]())
    return f"{path} is {kind}"


def _drawn(mode: str, size: tuple[int, int] = (16, 16), value: int = 5, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, value).save(stream, kind)
    return stream.getvalue()


OTHERS = {
    "a JPEG": lambda: _drawn("L", kind="JPEG"),
    "a GIF": lambda: _drawn("P", kind="GIF"),
    "a PNG in colours": lambda: _drawn("RGB"),
    "a PNG of 16 bits": lambda: _drawn("I;16", value=300),
    "a PNG of one bit": lambda: _drawn("1", value=1),
    "a PNG with other labels": lambda: _drawn("L", value=200),
    "a PNG of one pixel": lambda: _drawn("L", (1, 1)),
    "a PNG of another shape": lambda: _drawn("L", (16, 5)),
    "a PNG with transparency": lambda: _drawn("LA"),
    "a PNG that says it is huge": lambda: hollow_png(100_000, 100_000),
    "text": lambda: b"no picture\n",
    "a part of a PNG": lambda: _drawn("RGB")[:40],
}
