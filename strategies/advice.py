"""What to type where a player cannot have its policy. Errors deep in a policy know the player alone."""

import re
from collections.abc import Mapping

_typed: dict[str, str] = {}  # of the training of this process: players, or `*`, and what was typed for them
_leaders: dict[str, str] = {}  # whom a player follows; itself if it follows none


def note_typed(typed: Mapping[str, str], leaders: Mapping[str, str]) -> None:
    """Let `type_instead` know what all players have."""
    for kept, new in ((_typed, typed), (_leaders, leaders)):
        kept.clear()
        kept.update(new)


def type_instead(player: str, policy: str = "", without: str = "") -> str:
    """`--strategy ...` that gives one player another policy, or its own without an option; others keep what they have.

    A player that follows another one has the policy of that one.
    """
    name, typed = _leaders.get(player, player), _typed or {"*": "ddp"}
    own, at, where = typed.get(name, typed.get("*", "ddp")).partition("@")
    kept = "+".join(part for part in own.split("+") if not without or part.partition(":")[0] != without)
    mix = {name: policy or kept + at + where} | {each: text for each, text in typed.items() if each != name}
    if _leaders and not set(_leaders.values()) - mix.keys():
        mix.pop("*", None)  # no player is left for it
    return _strategy(mix)


def instead_of(kind: str, other: str) -> str:
    """`--strategy ...` that gives all players with such policies others, as zero1 for deepspeed1, without options."""
    return _strategy({each: re.sub(rf"^{kind}(\d)[^@]*", rf"{other}\1", text) for each, text in _typed.items()})


def _strategy(mix: Mapping[str, str]) -> str:
    return "--strategy " + (",".join(map("=".join, mix.items())) if len(mix) > 1 else next(iter(mix.values())))
