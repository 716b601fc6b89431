"""What an action of `python -m gan.sample` has made: pictures and videos, to be looked at or written.

Videos are GIF by Pillow, and MP4 where PyAV is installed.
"""

import base64
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from gan.app.sampling import grids
from gan.files.disk import free_name, whole_file, write_whole
from gan.files.errors import UserError, explained
from gan.sound import Sound

Columns = dict[str, grids.Batch]
Frames = Callable[[], Iterator[Image.Image]]
SIDE = 64  # pixels that the shorter side of a picture on a sheet has at least
VIDEOS = (".gif", ".mp4")
NO_MP4 = "MP4 needs PyAV: type pip install av"
BT_601 = 5  # how colours are converted; without this word players take large videos for BT.709, with other colours
MOST_FPS = 50  # of a GIF
WIDE = 256  # pixels that the shorter side of a video has at least
QUALITY = {"crf": "16", "preset": "medium"}  # a lower crf is better and larger; what x264 takes by default is 23


@dataclass
class Sheet:
    """Single pictures by name, and one picture of them all, which a notebook shows. It iterates over the single ones.

    The picture of all is a grid of `columns` with `titles` of its rows, or the single pictures side by side with their
    `titles` or names. `frames` draws a video of `count` pictures. Where nothing else is there, the frames are the
    single pictures.
    """

    name: str
    columns: Mapping[str, grids.Batch] = field(default_factory=dict, repr=False)
    titles: Sequence[str] = ()
    singles: Mapping[str, Tensor | Sound | Image.Image] = field(default_factory=dict, repr=False)
    frames: Frames | None = field(default=None, repr=False)
    count: int = 0

    def __iter__(self) -> Iterator[Image.Image]:
        return (grids.picture(sample, transparent=True) for _, sample in self._named())

    def __len__(self) -> int:
        return len(self.singles) or self.count

    def __getitem__(self, number: int) -> Image.Image:
        return [*self][number]

    @property
    def image(self) -> Image.Image:
        if self.columns:
            return grids.grid(self.columns, max(map(len, self.columns.values())), self.titles)
        names, samples = zip(*self._named(), strict=True)
        shown = zip((grids.picture(sample, transparent=True) for sample in samples), self.titles or names, strict=True)
        pictures = [grids.titled(grids.enlarged(each, SIDE), title) for each, title in shown]
        return grids.tiles(pictures, min(8, len(pictures)) if len(pictures) <= 64 else round(len(pictures) ** 0.5))

    @property
    def suffix(self) -> str:
        return ".png" if self.columns or self.singles else video_suffix()

    def save(self, path: str | Path, singles: bool = False, fps: int = 30) -> list[Path]:
        """Write the picture of all and its sounds, or the video, and with `singles` each sample in its own size.

        A picture that is alone is written in its own size.
        """
        path = Path(path)
        if self.frames and path.suffix.lower() in VIDEOS:
            with writing(path):
                save_video(self.frames(), path, fps)
            paths = [path]
        else:
            if self.frames and path.suffix.lower() != ".png":
                raise UserError(
                    f"'{path}' is no name of a picture or a video; type one that ends in .png, .gif or .mp4, "
                    f"and with --singles there is a folder of its frames, too"
                )
            save_png(self.image if self.columns or len(self) != 1 else self[0], path)
            paths = [path, *grids.save_sounds(self.columns, path)]
        if not singles:
            return paths
        taken: set[str] = set()
        for title, sample in self._named():
            name = free_name(title, taken)
            single = path.with_suffix("") / f"{name}.png"
            save_png(grids.picture(sample, transparent=True), single)
            if isinstance(sample, Sound):
                write_whole(single.with_suffix(".wav"), sample.wav())
        return [*paths, path.with_suffix("")]

    def _repr_png_(self) -> bytes:
        return grids.png(self.image)

    def _repr_html_(self) -> str | None:
        """A video moves in a notebook."""
        if not self.frames:
            return None
        with tempfile.TemporaryDirectory() as folder:
            save_video(self.frames(), path := Path(folder) / "video.gif")
            return f'<img src="data:image/gif;base64,{base64.b64encode(path.read_bytes()).decode()}">'

    def _named(self) -> Iterator[tuple[str, Tensor | Sound | Image.Image]]:
        if self.frames and not self.singles:
            return ((f"{number:03d}", frame) for number, frame in enumerate(self.frames()))
        return iter(self.singles.items())


def video_suffix() -> str:
    return ".mp4" if find_spec("av") else ".gif"


def save_video(frames: Iterable[Image.Image], path: Path, fps: int = 30) -> None:
    """Write frames of one size, small ones enlarged. A GIF is repeated for ever, and its colours are at most 256.

    A GIF counts in hundredths of a second, so frames of unequal length keep the time; players take 0.01 for 0.1.
    """
    if path.suffix.lower() != ".mp4" and fps > MOST_FPS:
        raise UserError(f"a GIF has at most {MOST_FPS} frames a second; type --fps {MOST_FPS}, or a name such as x.mp4")
    if path.suffix.lower() == ".mp4" and not find_spec("av"):
        raise UserError(f"{NO_MP4}, or write a GIF: type a name such as {path.with_suffix('.gif')}")
    rest = map(lambda frame: grids.enlarged(grids.picture(frame).convert("RGB"), WIDE), frames)
    first = next(rest)
    with whole_file(path) as part:
        if path.suffix.lower() == ".mp4":
            _write_mp4(first, rest, part, fps)
        else:
            others = list(rest)
            ends = [round(100 * number / fps) for number in range(len(others) + 2)]
            lengths = [10 * (end - begin) for begin, end in pairwise(ends)]
            first.save(part, "GIF", save_all=True, append_images=others, duration=lengths, loop=0)


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


def with_ending(path: Path, suffix: str) -> Path:
    """The path with this ending. A folder has none, and is refused."""
    if path.is_dir():
        raise UserError(f"'{path}' is a folder; type a name such as {path / f'picture{suffix}'}")
    return path.with_suffix(suffix)


def save_png(image: Image.Image, path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UserError(f"pictures are written as PNG; type a name such as {with_ending(path, '.png')}")
    with writing(path):
        write_whole(path, grids.png(image))


def refuse_overwriting(inputs: Iterable[str | Path | None], outputs: Iterable[Path]) -> None:
    """Refuse to write over what is read."""
    read = [path for path in map(Path, filter(None, inputs)) if path.exists()]
    for path in outputs:
        if path.exists() and any(map(path.samefile, read)):
            raise UserError(f"'{path}' is read and would be written over; type -o and another name")


@contextmanager
def writing(path: Path, *others: type[Exception], advice: str = "choose another file with -o") -> Iterator[None]:
    """Inside the `with`, a file is written, whose folder is made before. `others`: what is raised beside OSError.

    A folder that was made, and in which nothing is written, is removed again.
    """
    with explained(f"cannot write '{path}': {{why}}; {advice}", OSError, *others):
        new = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield
        finally:
            with suppress(OSError):  # there are files
                for folder in new:
                    folder.rmdir()


@contextmanager
def writer_into(path: Path) -> Iterator[Callable[[str, bytes], Any]]:
    """A function that writes a file of a name: into a new zip, or into a folder that has no files yet."""
    if path.suffix.lower() == ".zip":
        with whole_file(path) as part, zipfile.ZipFile(part, "w") as file:
            yield file.writestr
        return
    if path.suffix.lower() == ".npz":
        raise UserError(f"pictures are written to a folder or a .zip; type a name such as {path.with_suffix('.zip')}")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"'{path}' is there already and not empty; choose another folder, or remove its files")

    def write(name: str, content: bytes) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)

    yield write


def unused_title(title: str, columns: Mapping[str, Any]) -> str:
    """A title that no column has yet: the same may be asked for twice."""
    while title in columns:
        title += " "
    return title
