"""Reads what the user types for --strategy: a policy for all players or for each, and options after a plus sign."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gan.files.errors import UserError, explained
from gan.phase import Player
from strategies.policies import deepspeed_config

if TYPE_CHECKING:
    from strategies.policies.policy import Policy


@dataclass(frozen=True)
class Option:
    """An option of a policy. `read` parses the value after a colon; without `read` the option takes no value."""

    help: str
    read: Callable[[str], Any] | None = None
    default: Any = None


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("expected a whole number, 1 or more")
    return int(text)


def _schedule(text: str) -> str:
    if text not in SCHEDULES:
        raise ValueError(f"expected one of {', '.join(SCHEDULES)}")
    return text


NEEDED = object()  # an option without a value says nothing
SCHEDULES = ("gpipe", "1f1b", "interleaved")

OPTIONS: dict[str, Option] = {
    "offload": Option("keep what a rank owns (optimizer state, average, shard of the weights) in CPU memory"),
    "bf16": Option("send weights and compute with them in bfloat16; what a rank owns stays in full precision"),
    "hybrid": Option("shard within a node, or among N ranks (hybrid:N); each such group has a copy", _number),
    "whole": Option("gather the whole player once a phase instead of piece by piece; needs memory for it"),
    "compile": Option("run forward and backward through torch.compile"),
    "recompute": Option(
        "keep only the inputs of blocks for backward and compute the rest again (activation checkpointing)"
    ),
    "stages": Option(
        "into how many stages the player is cut; default: one for each rank, or a divisor if it has fewer layers",
        _number,
        NEEDED,
    ),
    "chunks": Option(
        "in how many parts the samples go through the stages; by default two for each rank", _number, NEEDED
    ),
    "schedule": Option("gpipe (default), 1f1b or interleaved: see docs/how/pipelines.md", _schedule, NEEDED),
    "config": Option("a configuration file of DeepSpeed's own, as in config:ds.json", deepspeed_config.read, ""),
}


@dataclass(frozen=True)
class Choice:
    """What was typed for a player. `ranks` are those that it is on, if that was typed: see strategies/placing/."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: range | None = None

    def __hash__(self) -> int:
        return hash((self.policy, frozenset(self.options.items()), self.ranks))

    def __str__(self) -> str:
        where = "" if self.ranks is None else f"@{ranks_as_typed(self.ranks)}"
        return "+".join([self.policy, *(n if v is None else f"{n}:{v}" for n, v in self.options.items())]) + where


def ranks_as_typed(ranks: range) -> str:
    return f"{ranks.start}-{ranks[-1]}" if len(ranks) > 1 else str(ranks.start)


def choices(typed: str | Mapping[str, str], policies: Mapping[str, "type[Policy]"]) -> dict[str, Choice]:
    """The choice for each player, `*` for the rest: from `zero3`, `generator=zero3+offload,*=ddp`, or a mapping.

    `teacher=zero3@2-3` also says on which ranks the player is.
    """
    if not isinstance(typed, str):
        pairs = dict(typed)
    elif "=" not in typed:
        pairs = {"*": typed}
    else:
        parts = [part.partition("=") for part in typed.split(",")]
        pairs = {player.strip(): text.strip() for player, _, text in parts}
        if not all(pairs) or not all(pairs.values()):
            raise UserError(f"cannot read strategy '{typed}'; type e.g. ddp, or generator=zero3,*=ddp")
        if len(pairs) < len(parts):
            raise UserError(f"strategy '{typed}' names a player twice")
    return {player: _choice(text, policies) for player, text in pairs.items()}


def _choice(text: str, policies: Mapping[str, "type[Policy]"]) -> Choice:
    text, at, where = text.partition("@")
    name, *options = (part.strip() for part in text.split("+"))
    if name not in policies:
        raise UserError(f"unknown strategy '{name}'; known: {', '.join(policies)}")
    package = policies[name].package
    if package is not None and find_spec(package) is None:
        raise UserError(
            f"strategy '{name}' needs its package: pip install '.[{package}]' (coordinated-gans[{package}])"
        )
    ranks = _ranks(where, text) if at else None
    return Choice(name, dict(_option(option, name, policies) for option in options), ranks)


def _ranks(where: str, text: str) -> range:
    first, dash, last = (part.strip() for part in where.partition("-"))
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise UserError(f"cannot read the ranks in '{text}@{where}'; type e.g. {text.strip()}@2-3, or {text.strip()}@2")
    return range(int(first), int(last if dash else first) + 1)


def _option(text: str, policy: str, policies: Mapping[str, "type[Policy]"]) -> tuple[str, Any]:
    name, colon, value = text.partition(":")
    if name not in OPTIONS:
        raise UserError(f"unknown option '{name}' of strategy '{policy}'; known: {', '.join(OPTIONS) or 'none'}")
    if name not in policies[policy].takes:
        who = [f"{each}+{name}" for each, kind in policies.items() if name in kind.takes]
        raise UserError(f"strategy '{policy}' has no option '{name}'; type {' or '.join(who)}, or leave it out")
    option = OPTIONS[name]
    if not colon:
        if option.default is NEEDED:
            example = 2 if option.read is _number else "gpipe"
            raise UserError(f"option '{name}' of strategy '{policy}' needs a value, e.g. {policy}+{name}:{example}")
        return name, option.default
    if option.read is None:
        raise UserError(f"option '{name}' of strategy '{policy}' takes no value; type {policy}+{name}")
    with explained(f"option '{text}' of strategy '{policy}': {{why}}", ValueError):
        return name, option.read(value)


def choose(choice: Mapping[str, Choice], players: Mapping[str, Player]) -> dict[str, Choice]:
    """What was typed for each player that follows no other one; a follower has the policy of the followed."""
    unknown = [name for name in choice if name not in (*players, "*")]
    leaders = [name for name, player in players.items() if player.follows is None]
    missing = [name for name in leaders if name not in choice and "*" not in choice]
    if unknown:
        raise UserError(f"--strategy names no player of this game: {', '.join(unknown)}; known: {', '.join(players)}")
    if missing:
        raise UserError(f"--strategy says nothing of {', '.join(missing)}; add '*=ddp' for the rest")
    chosen = {name: choice[name] if name in choice else choice["*"] for name in leaders}
    for name in choice.keys() & players.keys() - chosen.keys():
        followed = players[name].follows
        assert followed is not None
        if choice[name] != chosen[followed]:
            raise UserError(
                f"player '{name}' follows '{followed}', so it has the same policy; leave '{name}=' out of --strategy"
            )
    return chosen
