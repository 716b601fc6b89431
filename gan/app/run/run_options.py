"""What is typed for gan.plan, gan.verify and gan.bench grid: a run, the command's own options, the run's settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from gan.app.run.options import DEFAULT_RUN, arguments, early, run_first, run_parser
from gan.app.run.parser import Parser
from gan.files.errors import UserError
from gan.runs import full_name


def parse(
    argv: Sequence[str] | None,
    add_own: Callable[[Parser], None],
    *,
    default: str = DEFAULT_RUN,
    saved: Mapping[str, Any] | None = None,
    **texts: Any,
) -> Namespace:
    """The settings. `add_own` adds the options of the command itself; for `texts` see `run_parser`.

    `saved` are settings of the run that count where nothing else is typed.
    """
    argv = run_first(arguments(argv))
    run = full_name(early(argv, run=default).run)
    parser = run_parser(run, add_own, default, **texts)
    parser.set_defaults(dict(saved or {}))
    settings = parser.parse_args(argv)
    settings.run = run
    return settings


def strategies(words: list[str]) -> list[str]:
    """The strategies that are typed in these words: `ddp,zero3` are two, and `generator=zero3,*=ddp` is one."""
    found: list[str] = []
    for word in words:
        parts = [part.strip() for part in word.split(",")]
        if not all(parts):
            raise UserError(f"cannot read strategy '{word}'; type e.g. ddp,zero3 or generator=zero3,*=ddp")
        found += [part for part in parts if "=" not in part]
        pairs = [part for part in parts if "=" in part]
        found += [",".join(pairs)] if pairs else []
    return list(dict.fromkeys(found))


def numbers(name: str, text: str) -> list[int]:
    """The whole numbers that are typed for option `name`, with commas between them, each once."""
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", text):
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"cannot read {option} '{text}'; type numbers with commas, such as {option} 2,4")
    return list(dict.fromkeys(map(int, text.split(","))))
