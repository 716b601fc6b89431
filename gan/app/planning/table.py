"""What a plan says to a person, and to a program."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jsonargparse import Namespace

from gan.app import outputs
from gan.app.planning.opening import Opened
from gan.app.planning.search import Found
from gan.runs import short_name
from strategies.amounts import Held, readable
from strategies.choice import Choice
from strategies.cost.budget import Budget, Cost

SPARE = 0.1  # of a device's memory, for what is not a tensor
COLUMNS = ("weights", "gradients", "optimizer", "average", "flying")


def head(settings: Namespace, game: Opened, budget: Budget) -> Iterator[str]:
    """What is planned, and for how many ranks."""
    total = sum(p.numel() for each in budget.belongings.values() for p in each.parameters.values())
    ranks = settings.nodes * settings.devices
    where = f"{ranks} rank{'s' * (ranks > 1)}"
    where += f", {settings.nodes} nodes of {settings.devices}" if settings.nodes > 1 else ""
    each = "each rank that trains" if budget.served else "each rank"
    yield f"{short_name(settings.run)}: {total:,} parameters, on {where}; {game.samples} samples on {each}"
    if game.why:
        yield f"\nmeasured on this CPU, because it cannot be played without values: {game.why}"


def usable(memory: float) -> float:
    """What a plan may take of a device's memory."""
    return memory * (1 - SPARE)


def verdict(cost: Cost, memory: float) -> str:
    """Whether it fits, and by how much."""
    of = f"of {readable(memory)} less a tenth"
    spare = usable(memory) - cost.peak.bytes
    if spare >= 0:
        return f"fits, with {readable(spare)} to spare {of}"
    return f"does not fit: {readable(-spare)} too much {of}"


def memory(cost: Cost, chosen: Mapping[str, Choice]) -> list[str]:
    """The memory of a rank at its peak, by player and kind."""
    peak = cost.peak
    rows = [("player", "policy", "weights", "gradients", "optimizer", "average", "in flight", "all")]
    for name, held in peak.players.items():
        amounts = [getattr(held, kind) for kind in COLUMNS]
        rows.append((name, str(chosen[name]), *map(_amount, amounts), _amount(held.bytes)))
    total = sum(peak.players.values(), Held())
    rows.append(("activations", "", *[""] * 5, _amount(peak.activations)))
    rows.append(("all", "", *(_amount(getattr(total, kind)) for kind in COLUMNS), _amount(peak.bytes)))
    there = cost.host.bytes
    host = [f"and {readable(there)} in the memory of the host, for each rank"] if there else []
    return [f"a rank at its peak, which is in phase '{peak.phase}'", *outputs.table(rows, left=(0, 1)), *host]


def traffic(cost: Cost) -> list[str]:
    """The peak of each phase, and the bytes that it moves by link."""
    rows = [("phase", "", "peak", "sent in a node", "between nodes")]
    for phase in cost.phases:
        often = "" if phase.every == 1 else f"every {phase.every} steps"
        often += f" {phase.idle:.0%} idle" if phase.idle else ""
        moved = phase.moved
        rows.append((phase.phase, often, _amount(phase.bytes), _amount(moved.within), _amount(moved.between)))
    mean = cost.moved
    rows.append(("a step", "in the mean", "", _amount(mean.within), _amount(mean.between)))
    return [
        "bytes, sent by a rank to others of its node, and by a node to other nodes",
        *outputs.table(rows, left=(0, 1)),
    ]


def typed(chosen: Mapping[str, Choice]) -> str:
    """The choices as they are typed after --strategy: the commonest one is that of `*`."""
    texts = {name: str(choice) for name, choice in chosen.items()}
    counts = {text: list(texts.values()).count(text) for text in texts.values()}
    most = max(counts, key=counts.__getitem__)
    if len(counts) == 1:
        return most
    own = [f"{name}={text}" for name, text in texts.items() if text != most]
    return ",".join([*own, f"*={most}"])


def as_json(found: Found) -> dict[str, Any]:
    """The same for programs, in bytes."""
    cost = found.cost
    return {
        "strategy": typed(found.chosen),
        "fits": found.fits,
        "bytes": cost.peak.bytes,
        "host": cost.host.bytes,
        "between_phases": {name: asdict(held) for name, held in cost.held.items()},
        "phases": [
            {
                "phase": phase.phase,
                "every": phase.every,
                "idle": phase.idle,
                "bytes": phase.bytes,
                "activations": phase.activations,
                "players": {name: asdict(held) for name, held in phase.players.items()},
                "moved": asdict(phase.moved),
                "payload": _payload(phase.collectives),
            }
            for phase in cost.phases
        ],
    }


def _payload(collectives: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in (one for player in collectives.values() for one in player):
        found[each.kind] = found.get(each.kind, 0) + each.payload
    return found


def _amount(amount: float) -> str:
    return readable(amount) if amount else "-"
