"""Where styles are taken from, and which styles replace missing ones."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gan.painting.painter import Painter, Picture
from gan.painting.styles import Styles


class StyleSource:
    """Where styles are taken from, as the command line names it: a picture, a file of styles, or `mean`.

    `missing` says how a region is painted that has no style here: `mean` takes the mean styles of `among` training
    pictures, `own` the painted picture's own style, and `zero` no style.
    """

    def __init__(self, painter: Painter, which: str, missing: str = "mean", among: int = 1000) -> None:
        self.painter, self.missing, self.among = painter, missing, among
        self._noted: dict[tuple[str, str], list[int]] = {}
        self.picture: Picture | None = None
        if which == "mean":
            self.title, self.styles = "mean", painter.mean(self.among)
        elif which.endswith(".pt"):
            self.title, self.styles = Path(which).stem, painter.load(Path(which))
        else:
            self.picture = painter.picture(which)
            self.title, self.styles = self.picture.title, painter.styles(self.picture)

    @property
    def image(self) -> Tensor | None:
        return None if self.picture is None else self.picture.image

    def spotlight(self, region: int) -> Tensor | None:
        return None if self.picture is None else self.picture.spotlight(region)

    def on(self, picture: Picture, chosen: list[int] | None = None, edited: bool = False) -> Styles:
        """The styles to paint a picture's label map in.

        All of them are from here, or with `chosen` only those regions' styles, and the rest are the picture's own.
        Missing styles are replaced as `missing` says. But on the picture that the styles are from, or on an `edited`
        map of it, no region of that picture counts as missing: a region too small for a style is painted without one.
        """
        same = self.picture is not None and (edited or _same(self.picture, picture))
        known = self.picture.regions if same else ()
        lacking = [region for region in self.styles.lacking(picture.regions) if region not in known]
        if chosen is None:
            return self._with_replaced(lacking, picture)
        absent = [region for region in chosen if region not in picture.regions]
        self._note(f"picture {picture.title} lacks", absent, "nothing to change there")
        filled = self._with_replaced([region for region in lacking if region in chosen], picture)
        return self.painter.styles(picture).taking(filled, chosen)

    def _with_replaced(self, lacking: list[int], picture: Picture) -> Styles:
        """These styles, with the missing ones replaced."""
        if not lacking or self.missing == "zero":
            return self.styles
        whose = f"styles of {self.title} lack"
        if self.missing == "own":
            self._note(whose, lacking, "painted in the picture's own")
            return self.styles.taking(self.painter.styles(picture), lacking)
        mean = self.painter.mean(self.among)
        self._note(whose, [region for region in lacking if mean.present[region]], "painted in the mean styles")
        self._note(whose, mean.lacking(lacking), "as do all pictures that the mean is of; painted without style")
        return self.styles.taking(mean, lacking)

    def notes(self) -> list[str]:
        """Which styles were missing, and what was done, for the user to read."""
        names = self.painter.label_names
        return [
            f"{who} {', '.join(names[k] for k in sorted(found))}: {what}" for (who, what), found in self._noted.items()
        ]

    def _note(self, who: str, which: Sequence[int], what: str) -> None:
        if which:
            noted = self._noted.setdefault((who, what), [])
            noted += [region for region in which if region not in noted]


def _same(one: Picture, other: Picture) -> bool:
    if one.image is None or other.image is None:
        return False
    return torch.equal(one.image, other.image) and torch.equal(one.label, other.label)
