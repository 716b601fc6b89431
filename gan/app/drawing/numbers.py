"""Lists of numbers, such as seeds, as they are typed."""

import re
from collections.abc import Iterable

from gan.files.errors import UserError

MOST = 10_000  # numbers in a list
Numbers = str | int | Iterable[int | str]  # as typed, such as 0-63 or 1,5,8-10; in Python also range(64)


def numbers(given: Numbers, option: str = "--seeds") -> list[int]:
    """The numbers of a list as it is typed: 0-63, or 1,5,8-10."""
    parts = [given] if isinstance(given, str | int) else given
    found: list[int] = []
    for part in (part for each in parts for part in str(each).split(",")):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last - first + len(found) >= MOST:
            raise UserError(
                f"{option} '{part}' is no list of at most {MOST:,} numbers; type e.g. {option} 0-63 or 1,5,8-10"
            )
        found += range(first, last + 1)
    return found


def once(given: Numbers, option: str = "--seeds") -> list[int]:
    """The numbers of a list, each only once."""
    return [*dict.fromkeys(numbers(given, option))]
