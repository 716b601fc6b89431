"""What `python -m gan.sample` does with any run: its actions as methods, which return what they draw.

gan/sample.py says what each does.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from PIL import Image
from torch import Tensor

from gan.app.outputs import say
from gan.app.run.reopen import NOTHING_HELD_OUT, SavedRun, first_batches, first_samples, shown_columns
from gan.app.sampling import grids
from gan.app.sampling.painter import Maps
from gan.app.sampling.sheet import Sheet
from gan.app.sampling.translating import Translator, translation_of, voice_folder
from gan.files.disk import name_for
from gan.files.errors import UserError
from gan.games.spade import Spade
from gan.games.translation import Translation
from nets.hifigan import HifiGenerator

T = TypeVar("T")
Words = str | int | Iterable[str | int] | None  # what is typed one after the other; in Python also a single one


def words(given: Words) -> list[str]:
    return [str(each) for each in ([given] if isinstance(given, str | int) else () if given is None else given)]


def file_name(action: str, words: Sequence[str] | None) -> str:
    return "-".join([action, *(name_for(Path(word).stem) for word in words or ())])[:120]


PYTHONS = {"class": "label", "from": "from_", "o": "file"}  # options that an argument of Python cannot be called
VALUE = r"(?: '[^']*'| [^\s;,]*[\d.][^\s;,]*)"  # of an option in a sentence: other words go on with the sentence
TYPED = re.compile(
    rf"python -m gan\.sample (?:'[^']*'|\S+) ([a-z][a-z-]*)((?: --[a-z-]+{VALUE}*)*)"
    rf"|(?<![\w-])(?:--([a-z-]+)|-(o)\b)({VALUE}*)"
)


def as_python(text: str) -> str:
    """A sentence with the options and actions of the command as Python has them: `--picture 3` is `picture=3`."""

    def named(found: re.Match[str]) -> str:
        action, how, long, short, typed = found.groups()
        word = action or long or short
        name = PYTHONS.get(word, word.replace("-", "_"))
        if action:
            return f"{name}({as_python(how.strip().replace(' --', ', --'))})"
        values = [each if each.replace(".", "").isdecimal() else f"'{each}'" for each in typed.replace("'", "").split()]
        return f"{name}={', '.join(values)}" if len(values) < 2 else f"{name}=[{', '.join(values)}]"

    return TYPED.sub(named, text)


def in_python(method: Callable[..., T]) -> Callable[..., T]:
    """An action whose errors name its arguments, and other actions, as Python has them."""

    @wraps(method)
    def acted(*args: Any, **options: Any) -> T:
        try:
            return method(*args, **options)
        except UserError as error:
            error.args = (as_python(str(error)),)
            raise

    return acted


class NoAction(UserError, AttributeError):
    """The run has no such action. `hasattr` says so too."""


class Shown:
    """An opened run of any game. `game` has its networks, with averaged weights where the run has some.

    A published file is opened without a run. Its network stands in place of the game.
    """

    kind = "any"
    title = ""
    typed = False  # whether the command asks
    editor: Callable[[], Any]  # makes what `edit` asks; `gan.open` sets it, since an editor stands above all kinds

    def __init__(self, run: SavedRun | None, title: str = "", game: Any = None) -> None:
        self.run, self.title = run, title if run is None else f"{run.folder.path}, step {run.step}"
        self.game: Any = game if run is None else run.run.game
        self.makes_sounds = isinstance(getattr(self.game, "generator", None), HifiGenerator)
        self.translates = self.makes_sounds or isinstance(self.game, Spade) or hasattr(self.game, "translations")

    def __repr__(self) -> str:
        words = [self.title, *([] if self.run is None else [type(self.game).__name__])]
        words += [] if self.size is None else [f"{self.size[1]}x{self.size[0]}"]
        return f"<{type(self).__name__} of {', '.join(words)}>"

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return in_python(found) if _is_action(found) and not self.typed else found

    def __getattr__(self, name: str) -> Any:
        found = [each for each in dir(self) if _is_action(getattr(type(self), each, None))]
        raise NoAction(f"{self.title}: {self.about}, so there is no '{name}'; its actions are {', '.join(found)}")

    @property
    def saved(self) -> SavedRun:
        if self.run is None:
            raise UserError(f"{self.title} is no run, so it has no held-out samples; leave show out")
        return self.run

    @property
    def about(self) -> str:
        if self.run is None:
            return "it is a published network that translates"
        return "its game neither draws from noise nor has styles"

    @property
    def default(self) -> str:
        """The action of `sample`."""
        return "show" if self.run is not None else "translate"

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the pictures, where these are known."""
        size = None if self.run is None else self.run.of_data("size")
        return (size, size) if isinstance(size, int) else size

    @property
    def background(self) -> str:
        return "white" if self.run is None else self.run.settings.get("background", "white")

    @property
    def device(self) -> torch.device:
        return next(self.game.parameters()).device

    def stand(self, batches: int) -> None:
        raise UserError(f"{self.title}: {self.about}, so it has no standing statistics; leave --standing out")

    def path(self, name: str, suffix: str, typed: str | Path | None = None) -> Path:
        """Where to write, if nothing else is typed. It is said if a file is there."""
        own = f"{Path(self.title).stem}-{name}" if self.run is None else self.run.folder.samples / name
        path = Path(typed or f"{own}{suffix}")
        if path.is_file():
            say(f"{path} is there already, and will be replaced; to keep it, type -o and another name")
        return path

    def sample(self, *args: Any, **options: Any) -> Sheet:
        """What the command draws if no action is typed."""
        return getattr(self, self.default)(*args, **options)

    def edit(self, edit: str | Path | Mapping[str, Any]) -> Image.Image:
        """Draw an edit: a file that the editor has saved, or the same in Python, such as {"picture": 3, "seed": 1}."""
        editor = self.editor()
        image, notes = editor.picture_of(edit) if isinstance(edit, Mapping) else editor.repeat(Path(edit))
        say(*notes)
        return image

    def show(self, count: int = 8, seed: int = 0) -> Sheet:
        if not hasattr(self.game, "show"):
            raise UserError(
                f"run {self.saved.name} shows nothing: its game needs show(batch), as in docs/guide/game.md"
            )
        found, held = first_batches(self.saved.run, count)
        batch = first_samples(found, count)
        if not held:
            say(NOTHING_HELD_OUT)
        batch = move_data_to_device(batch, self.device)
        columns = shown_columns(self.game, batch, seed)
        made = grids.made(columns, batch).items()
        singles = {f"{row}-{title}": each for title, column in made for row, each in enumerate(column)}
        return Sheet("show", columns, singles=singles)

    def translate(
        self,
        inputs: str | Path | Image.Image | None = None,
        file: str | Path | None = None,
        direction: str | None = None,
        largest: int | None = None,
    ) -> list[Path] | Sheet:
        """Write the translations of a folder or zip of pictures, or of one, each in its own size; or of other files."""
        if isinstance(self.game, Spade):
            if direction:
                raise UserError(f"{self.title}: label maps have no direction; leave --direction out")
            return self._painted(lambda maps: self.game.generator(self.game.mask(maps[:, 0])), inputs, file, largest)
        if self.makes_sounds and not isinstance(inputs, Image.Image):
            if direction or largest:
                raise UserError(
                    f"{self.title}: sounds have no direction and no size; leave --direction and --largest out"
                )
            return [voice_folder(self.game.generator, self.game.mel, *self._places(inputs, file), self.device)]
        chosen = translation_of(self.game, self.title, direction)
        if chosen.codes and largest:
            raise UserError(f"{self.title}: maps of codes have no size to change; leave --largest out")
        shorter = None if self.run is None else self.run.settings.get("load_size")
        if shorter:
            size = "each in its own size" if largest is None else f"{largest} pixels at most on the longer side"
            say(f"{size}; the run was trained on pictures of {shorter} pixels on the shorter side")
        half = None if self.run is None else self.run.of_data("half")
        any_shape = self.run is not None and self.run.settings.get("side_by_side", False)
        by = Translator(chosen, self.device, largest, self.background, half, any_shape)
        return self._translated(by, inputs, file)

    def _painted(
        self, paint: Callable[[Tensor], Tensor], inputs: object, file: str | Path | None, largest: int | None
    ) -> list[Path] | Sheet:
        """The pictures of label maps [1, 1, height, width], each in its own size."""
        data: Any = self.saved.run.data
        known, multiple = Maps.of_data(data.val), 2 ** getattr(self.game.generator, "upsamplings", 0)
        if largest is None:
            size = "{1}x{0}".format(*known.size)
            say(f"each in the size of its label map; the run was trained on {size}, see --largest")
        rules = {"labels": data.val.num_labels, "void": known.void}
        chosen = Translation(lambda maps: paint(maps.long()), 1, multiple, **rules)
        return self._translated(Translator(chosen, self.device, largest), inputs, file)

    def _translated(self, by: Translator, inputs: object, file: str | Path | None) -> list[Path] | Sheet:
        if isinstance(inputs, Image.Image):
            if file is not None:
                raise UserError(f"a picture of Pillow gives a sheet; leave {file} out, and call save() of the sheet")
            return Sheet("translated", singles={"translated": by.of_picture(inputs)})
        return [by.of_folder(*self._places(inputs, file))]

    def _places(self, inputs: object, file: str | Path | None) -> tuple[str, Path]:
        """What is typed as --inputs, and where to write."""
        if inputs is None:
            raise UserError("say which pictures: --inputs and a folder, a zip or a picture")
        if not isinstance(inputs, str | Path):
            raise UserError(f"--inputs takes a path or a picture of Pillow, and not {type(inputs).__name__}")
        return str(inputs), self.path(f"translated-{name_for(Path(inputs).stem)}", "", file)


def _is_action(method: object) -> bool:
    """The actions are the public methods that return a sheet or files."""
    returned = getattr(method, "__annotations__", {}).get("return")
    return returned in (Sheet, list[Path], list[Path] | Sheet) and not getattr(method, "__name__", "").startswith("_")
