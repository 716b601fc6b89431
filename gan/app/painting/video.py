"""Videos: GIF by Pillow, and MP4 where PyAV is installed."""

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from PIL import Image

from gan.app.painting.grids import enlarged
from gan.files.disk import whole_file
from gan.files.errors import UserError

SUFFIXES = (".gif", ".mp4")
ADVICE = "MP4 needs PyAV: type pip install av"
BT_601 = 5  # how colours are converted; without this word players take large videos for BT.709, with other colours
SIDE = 256  # pixels that the shorter side has at least
QUALITY = {"crf": "16", "preset": "medium"}  # a lower crf is better and larger; what x264 takes by default is 23


def suffix() -> str:
    """The kind of video that can be written here."""
    return ".mp4" if find_spec("av") else ".gif"


def save(frames: Iterable[Image.Image], path: Path, fps: int = 30) -> None:
    """Write frames of one size, small ones enlarged. A GIF is repeated for ever, and its colours are at most 256."""
    if path.suffix.lower() == ".mp4" and not find_spec("av"):
        raise UserError(f"{ADVICE}, or write a GIF: type a name such as {path.with_suffix('.gif')}")
    rest = map(lambda frame: enlarged(frame.convert("RGB"), SIDE), frames)
    first = next(rest)
    with whole_file(path) as part:
        if path.suffix.lower() == ".mp4":
            _write_mp4(first, rest, part, fps)
        else:
            first.save(part, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)


def _write_mp4(first: Image.Image, rest: Iterable[Image.Image], path: Path, fps: int) -> None:
    import av

    # The format of pixels that every player knows has one colour for 2x2 of them.
    width, height = (side // 2 * 2 for side in first.size)
    with av.open(str(path), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps, options=QUALITY)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.colorspace = BT_601
        for frame in chain([first], rest):
            file.mux(stream.encode(av.VideoFrame.from_image(frame.crop((0, 0, width, height)))))
        file.mux(stream.encode())
