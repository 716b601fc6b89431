"""The styles of one picture, or the mean of many: a code for each region, to mix, save and load."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from gan.app.sampling.sheet import writing
from gan.files.disk import read_plain, whole_file
from gan.files.errors import UserError

AGAIN = "make such a file with python -m gan.sample RUN save-styles"
PARTS = {"codes": Tensor, "present": Tensor, "label_names": list, "source": str}


@dataclass(frozen=True)
class Styles:
    """The style codes of the regions, [labels, style]; `source` says whose styles they are.

    A region that is not `present` has a code of zeros. Mixing makes new `Styles` and leaves the old ones as they are.
    """

    codes: Tensor
    present: Tensor
    label_names: tuple[str, ...]
    source: str

    def taking(self, other: "Styles", regions: Collection[int]) -> "Styles":
        """These styles, but with those of some regions from the other."""
        chosen = torch.zeros_like(self.present)
        chosen[list(regions)] = True
        codes = torch.where(chosen.unsqueeze(1), other.codes, self.codes)
        return replace(self, codes=codes, present=torch.where(chosen, other.present, self.present))

    def towards(self, other: "Styles", share: float) -> "Styles":
        """Styles on the straight line from these to the others: a share of 0 is exactly these, 1 exactly the others."""
        return replace(self, codes=torch.lerp(self.codes, other.codes, share), present=self.present | other.present)

    def lacking(self, regions: Collection[int]) -> list[int]:
        return [region for region in regions if not self.present[region]]

    def check(self, label_names: Sequence[str], length: int, where: Path) -> None:
        labels, ours = self.codes.shape
        if labels != len(label_names):
            why = f"has styles of {labels} regions and this run knows {len(label_names)}"
        elif ours != length:
            why = f"has style codes of length {ours} and this run has them of length {length}"
        elif self.label_names != tuple(label_names):
            k = next(k for k, pair in enumerate(zip(self.label_names, label_names, strict=True)) if len(set(pair)) > 1)
            why = f"calls region {k} '{self.label_names[k]}' and this run '{label_names[k]}'"
        else:
            return
        raise UserError(f"'{where}' {why}; save styles from this run")

    def save(self, path: Path) -> None:
        """Write a file of tensors, strings and lists only, so that it can be loaded without running code."""
        with writing(path, RuntimeError), whole_file(path) as part:
            torch.save({**vars(self), "label_names": list(self.label_names)}, part)

    @classmethod
    def load(cls, path: Path) -> "Styles":
        """Read a file of styles, without running any code in it."""
        saved = read_plain(path, "styles", AGAIN)
        known = isinstance(saved, dict) and all(isinstance(saved.get(name), kind) for name, kind in PARTS.items())
        if not known or saved["codes"].ndim != 2 or saved["present"].dtype != torch.bool:
            raise UserError(f"'{path}' holds no styles; {AGAIN}")
        codes, present, names, source = (saved[name] for name in PARTS)
        if not len(codes) == len(names) == len(present):
            raise UserError(f"'{path}' is damaged: it has {len(codes)} codes and {len(names)} names")
        return cls(codes, present, tuple(names), source)


def regions(wanted: Sequence[str | int], label_names: Sequence[str]) -> list[int]:
    """The numbers of regions that are given by name (upper or lower case) or by number."""
    names = [name.lower() for name in label_names]
    found = []
    for each in map(str, wanted):
        if each.lower() in names:
            found.append(names.index(each.lower()))
        elif each.isdecimal() and int(each) < len(names):
            found.append(int(each))
        else:
            close = get_close_matches(each.lower(), names, 1)
            hint = f"did you mean '{label_names[names.index(close[0])]}'?" if close else "choose a name or a number."
            known = ", ".join(name if name == str(k) else f"{k} {name}" for k, name in enumerate(label_names))
            raise UserError(f"there is no region '{each}'; {hint} Regions are {known}")
    return found
