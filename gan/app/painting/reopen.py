"""Open a run again from its folder: its networks as they were saved, and its data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from torch import Tensor
from torch.nn.parameter import is_lazy

from gan.app.run import folder, options
from gan.app.run.folder import RunFolder
from gan.app.run.resumed import instead
from gan.files.checkpoint import Share, averages_of, check_left_out, failing, load, load_module_state, read
from gan.files.contents import need
from gan.files.errors import Damaged, UserError, reason
from gan.files.finite import NotFinite, as_made, named, of_players
from gan.making import reopened
from gan.runs import Run, build, full_name
from strategies.accelerator import best, counted


@dataclass(frozen=True)
class SavedRun:
    """A run with the weights of one of its checkpoints, which was saved after `step`.

    `name` is the run's, as its settings have it. `averaged` are the players whose weights are averages.
    """

    name: str
    folder: RunFolder
    checkpoint: Path
    step: int
    settings: dict[str, Any]
    run: Run
    averaged: frozenset[str]


def open_run(
    which: str = "auto",
    out: Path = Path("runs"),
    device: str = "cpu",
    data: str | Path | None = None,
    name: str | None = None,
    exactly: Literal["ema", "raw"] | None = None,
    **overrides: Any,
) -> SavedRun:
    """Build a run from its settings and load a checkpoint's weights, averaged ones where a player has them.

    `which` is a run's folder, a checkpoint inside one, or `auto`: the newest run below `out` that has a checkpoint.
    `data` is the folder of the run's pictures, if they have moved. `name` is a run's name, as for `--run`: `auto` is
    then the newest run of that name, and an own run may have moved. `overrides` are other settings to change. With
    `exactly` the weights keep the number format of the checkpoint, and with "raw" no player gets an average. The
    networks are in evaluation mode and require no gradients. The run may still be training.
    """
    place, gone = _device(device), None
    if data:
        overrides["data"] = data
    while True:
        try:
            found = folder.find(which, out, name and full_name(name))
        except FileNotFoundError:
            continue  # training has just removed a checkpoint: there is a newer one
        except OSError as error:
            raise UserError(f"cannot look for the run '{which}': {reason(error)}") from error
        if found is None:
            what = f"run of {full_name(name)}" if name else "run"
            raise UserError(
                f"no {what} with a checkpoint in '{out}'; train one with python -m gan.fit, or name a run's folder"
            )
        where, checkpoint = found
        settings = options.load(where.settings, name, **overrides)
        run = _build(settings, where)
        try:
            saved = load(checkpoint)
            averaged = _load(run, saved, checkpoint, exactly)
        except UserError as error:
            if isinstance(error, NotFinite):
                earlier = where.before(checkpoint)
                advice = f"give an earlier one: type {earlier[0]}" if earlier else "the run has no earlier one"
                raise UserError(f"{error}; {advice}") from error
            if isinstance(error, Damaged) and checkpoint.exists():
                raise UserError(f"{error}; {instead(where, checkpoint)}") from error
            if checkpoint.exists() or str(checkpoint) == which or checkpoint == gone:
                raise
            gone = checkpoint  # training has just replaced it with a newer one
            continue
        run.game.eval().requires_grad_(False).to(place)
        return SavedRun(settings.run, where, checkpoint, saved["global_step"], settings.as_dict(), run, averaged)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device(best())
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UserError(
            f"unknown device '{device}'; type {', '.join(dict.fromkeys(['auto', 'cpu', best()]))}"
        ) from error
    there = torch.accelerator.device_count() if place.type == best() else 0
    if place.type != "cpu" and (place.index or 0) >= there:
        raise UserError(f"device '{device}' is not there: this machine has {counted(there, place.type)}; type cpu")
    return place


def _build(settings: Namespace, where: RunFolder) -> Run:
    chosen = options.run_settings(settings)
    if "perceptual" in chosen:
        chosen["perceptual"] = "off"  # only training needs this loss, and the file of its weights may be gone
    try:
        return build(settings.run, **chosen)
    except UserError as error:
        if "data" not in chosen:
            raise
        raise UserError(
            f"{where.path} cannot be opened: {error}. If its data have moved, type --data and their folder"
        ) from error


def _load(run: Run, saved: Mapping[str, Any], checkpoint: Path, exactly: str | None = None) -> frozenset[str]:
    """Load weights and averages, after a check that they are of this game. Returns whose weights are averages."""
    game = run.game
    game.assemble()
    meant = {name: as_made(player.module) for name, player in game.players.items()}
    networks = [(name, player.module) for name, player in game.players.items()]
    players = saved.get("players", {})
    if saved.get("game") != type(game).__name__ or list(players) != list(game.players):
        whose, who = saved.get("game", "another program"), ", ".join(players) or "unknown"
        raise UserError(
            f"{checkpoint} is of {whose} with players {who}; the run's settings make {type(game).__name__} with "
            f"players {', '.join(game.players)}"
        )
    with failing(checkpoint):
        state, _ = need(saved, "state_dict", dict), need(saved, "global_step", int)
        averages = {name: (exactly != "raw" and averages_of(saved, name)) or {} for name in players}
    left_out = saved.get("left_out", {})
    in_files = reopened(game, game.players.values(), saved)
    if exactly:
        _take_format(game.state_dict(keep_vars=True), state)
    try:
        load_module_state(game, state, left_out=in_files.union(left_out))
    except RuntimeError as error:
        first = " ".join(" ".join(str(error).splitlines()[:2]).split())
        raise UserError(f"{checkpoint} has other networks than the run's settings make: {first}") from error
    check_left_out(game, left_out)
    game.pretrained_weights_read = True
    bad = of_players(networks, meant)
    for name, player in game.players.items():
        tensors = dict(player.module.named_buffers(remove_duplicate=False))
        tensors |= dict(player.module.named_parameters(remove_duplicate=False))
        if unknown := averages[name].keys() - tensors.keys():
            raise UserError(f"{checkpoint} has an average of '{min(unknown)}', which player '{name}' does not have")
        if exactly:
            _take_format(tensors, averages[name])
        read({there: Share.whole(tensors[tensor]) for tensor, there in averages[name].items()})
    if bad := bad or of_players(networks, meant):
        raise NotFinite(f"{checkpoint} cannot be used: {named(bad)}")
    return frozenset(name for name, average in averages.items() if average)


def _take_format(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Let these tensors have numbers of the format of those that are saved under their names."""
    for name, tensor in own.items():
        dtype = getattr(saved.get(name), "dtype", None)
        if isinstance(tensor, Tensor) and dtype is not None and not is_lazy(tensor):
            tensor.data = tensor.data.to(dtype)
