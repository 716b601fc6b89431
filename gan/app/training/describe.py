"""A game as text: the players with their networks and sizes, and the phases in the order of play."""

from torch import nn

from gan.module import GanModule
from gan.phase import Player, parameters_of


def describe(game: GanModule) -> str:
    """The text that `--dry-run` prints, and that every run has in game.txt."""
    game.assemble()
    lines = [f"game {type(game).__name__}", "", "players"]
    own = parameters_of(tuple(game.players.values()))
    for player in game.players.values():
        lines.append(f"  {player.name}: {_parameters(player, own)}, {_recipe(player)}")
        children = ((name, child) for name, child in player.module.named_children() if [*child.parameters()])
        lines += [f"    {name}: {type(child).__name__}, {_count(child)}" for name, child in children]
    lines += ["", "phases, in every step"]
    for phase in game.phases:
        notes = [f"teaches {', '.join(phase.learners)}"]
        notes += [f"every {phase.every} steps"] if phase.every > 1 else []
        notes += [f"from step {phase.start} on"] if phase.start else []
        notes += [f"until step {phase.until}"] if phase.until is not None else []
        notes += ["in steps of its choice"] if phase.when is not None else []
        notes += [f"in {phase.micro_batches} micro-batches"] if phase.micro_batches > 1 else []
        notes += ["second order"] if phase.second_order else []
        notes += [f"by {_made(phase.optimizer)}"] if phase.optimizer is not None else []
        lines.append(f"  {phase.name}: {'; '.join(notes)}")
    return "\n".join(lines) + "\n"


def _parameters(player: Player, own: dict[str, dict[str, nn.Parameter]]) -> str:
    said = f"{_count(player.module)} parameters"
    parameters = list(player.module.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    if not player.frozen and not all(parameter.requires_grad for parameter in parameters):
        said += f", {learning:,} of them learn"
    has = {id(parameter): parameter.numel() for parameter in parameters}
    for name, stored in own.items():
        shared = sum(has.get(id(parameter), 0) for parameter in stored.values())
        said += f", {shared:,} of them stored by {name}" if shared and name != player.name else ""
    return said


def _count(module: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,}"


def _decay(player: Player) -> str:
    return f"from {player.decay(0)} on" if callable(player.ema) else str(player.ema)


def _per(what: str) -> str:
    return "" if what == "update" else f" per {what}"


def _made(optimizer: object) -> str:
    made = getattr(optimizer, "func", optimizer)
    settings = ", ".join(f"{key}={value}" for key, value in getattr(optimizer, "keywords", {}).items())
    return f"{getattr(made, '__name__', type(made).__name__)}({settings})"


def _recipe(player: Player) -> str:
    if player.follows is not None:
        return f"follows {player.follows}, ema {_decay(player)}{_per(player.ema_per)}"
    if player.frozen:
        return "frozen" if player.saved and player.weights is None else "frozen, not in checkpoints"
    notes = [_made(player.optimizer)]
    notes += ["with a schedule" + _per(player.schedule_per)] if player.schedule else []
    notes += [f"ema {_decay(player)}{_per(player.ema_per)}"] if player.ema is not None else []
    notes += [f"clip {player.clip}"] if player.clip is not None else []
    notes += ["changed after each update"] if player.after is not None else []
    notes += ["parts frozen in some steps"] if player.freeze is not None else []
    return ", ".join(notes)
