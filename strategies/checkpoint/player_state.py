"""What a checkpoint has of each player beside its weights, and which weights it leaves out.

Each rank saves and loads its shares of the tensors, under the names that plain torch uses.
"""

import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map, tree_map_only

from gan.ema import Ema
from gan.files.checkpoint import Checksum, SavedTensor, Share, check_left_out, checksum, misfit, read
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Player
from gan.pretrained import check_files
from strategies import private
from strategies.batches.random_state import untouched
from strategies.checkpoint.first_weights import FirstWeights
from strategies.optimizers.updater import LossScale, Updater
from strategies.policies.policy import Policy
from strategies.sharding.resharded_parameter import version_of

# ---- averages ----


def average_state(policy: Policy) -> dict[str, Share] | None:
    """This rank's share of each weight's average, if there are some. Buffers' averages are whole on every rank."""
    if policy.ema is None:
        return None
    return {
        name: policy.storage.share_of(name, average) if name in policy.storage.weights else Share.whole(average)
        for name, average in policy.ema.state_dict().items()
    }


def load_average(policy: Policy, saved: Mapping[str, SavedTensor] | None) -> None:
    """Load the averages. If none were saved, they start at the weights."""
    if policy.ema is None and saved is not None and not policy.updaters:
        # The average that the optimizer of a training has kept: only to evaluate with.
        policy.ema = Ema(policy.storage.owned, policy.player.decay)
    if not isinstance(policy.ema, Ema):
        return
    if saved is None:
        policy.ema.load_state_dict(None)
    else:
        shares = average_state(policy) or {}
        if missing := shares.keys() - saved.keys():
            raise UserError(f"player '{policy.player.name}': the checkpoint has no average of '{min(missing)}'")
        read({saved[name]: share for name, share in shares.items()})


Averages = dict[str, dict[str, Tensor]]
_last: WeakKeyDictionary[GanModule, tuple[Averages, list[int]]] = WeakKeyDictionary()  # of games that were trained


def versions(game: GanModule) -> list[int]:
    """How often each weight was written: averages are not those of weights that a person has loaded since."""
    return [version_of(weight) for weight in game.parameters()]


def remember_averages(game: GanModule, averages: Averages) -> None:
    """At the end of a training, when the weights are whole again."""
    _last[game] = averages, versions(game)


def last_averages(game: GanModule) -> Averages:
    """Those of the last training, unless the weights were written since."""
    averages, then = _last.get(game, ({}, []))
    return averages if then == versions(game) else {}


def show_averages(game: GanModule, policies: Mapping[str, Policy], kept: Averages) -> None:
    """After a training: validate with its averages. Warn of those that have ended with it."""
    if game not in _last and not kept:
        return
    for name, policy in policies.items():
        if isinstance(policy.ema, Ema) and name in kept:
            policy.ema.load_state_dict(kept[name])
        elif policy.ema is not None:
            rank_zero_warn(
                f"player '{name}' is shown with its weights as they are now: its average has ended with the training, "
                f"or weights were written since; to see the average type ckpt_path=..., or validate while it trains"
            )


# ---- optimizers ----


def optimizer_state(policy: Policy, updater: Updater) -> dict[str, Any]:
    """The optimizer's state dict as in plain torch, with names in place of numbers and shares in place of tensors."""
    with updater.owning():
        packed = updater.optimizer.state_dict()
    stepped = _stepped(policy, updater)
    named = {name: packed["state"][n] for n, name in enumerate(stepped) if n in packed["state"]}
    beside = {key: value for key, value in packed["state"].items() if key not in range(len(stepped))}  # of no weight
    devices = tree_map_only(Tensor, lambda each: each.device.type, beside)
    own: dict[Any, Any] = {name: _with(values, lambda _, __: None) for name, values in named.items()}
    own |= {None: (tree_map_only(Tensor, Tensor.cpu, beside), devices)} if beside else {}
    state: dict[Any, Any] = policy.storage.values_of_all(own)
    more = {"made": updater.made, "beside": state.pop(None, ({}, {}))}
    state |= {name: _with(values, partial(_share, policy, name)) for name, values in named.items()}
    groups = zip(packed["param_groups"], updater.groups, strict=True)
    named_groups = [{**group, "params": names} for group, names in groups]
    types: dict[str, list[str]] = {}  # the names of tensors of another type than their weight
    for name, values in named.items():
        tensors = {key: each for key, each in values.items() if isinstance(each, Tensor) and key != "step"}  # torch's
        if keys := [key for key, each in tensors.items() if each.dtype != policy.storage.owned[name].dtype]:
            types[name] = keys
    return {**packed, "state": state, "param_groups": named_groups, "types": types, **more}


def load_optimizer_state(policy: Policy, updater: Updater, saved: Mapping[str, Any]) -> None:
    if "made" in saved:
        check_made(policy.player, updater, saved["made"])
    if [group["params"] for group in saved["param_groups"]] != updater.groups:
        raise UserError(
            f"player '{policy.player.name}': the checkpoint's optimizer has its weights in other groups than this "
            f"run's; resume with the settings it was trained with"
        )
    wanted: dict[SavedTensor, Share] = {}
    state = {
        number: _with(saved["state"][name], partial(_room, policy, updater, name, wanted))
        for number, name in enumerate(_stepped(policy, updater))
        if name in saved["state"]
    }
    read(wanted)
    beside = tree_map(
        lambda each, device: each.to(device) if isinstance(each, Tensor) else each, *saved.get("beside", ({}, {}))
    )
    with updater.owning():
        pairs, count = zip(saved["param_groups"], updater.optimizer.param_groups, strict=True), itertools.count()
        groups = [{**group, "params": list(itertools.islice(count, len(own["params"])))} for group, own in pairs]
        updater.optimizer.load_state_dict({**saved, "state": {**state, **beside}, "param_groups": groups})
    numbers = {name: number for number, name in enumerate(_stepped(policy, updater))}
    for name, keys in saved.get("types", {}).items():
        read_in = state.get(numbers.get(name, -1), {})
        for key in read_in.keys() & keys:
            own = updater.optimizer.state[policy.storage.owned[name]]
            own[key] = read_in[key].to(own[key].device)  # torch has given it the type of the weight


def _stepped(policy: Policy, updater: Updater) -> list[str]:
    """The names of the parameters that this rank's optimizer steps, in the order in which torch numbers them."""
    return [name for members in updater.groups for name in members if name in policy.storage.owned]


def _with(values: dict[str, Any], make: Callable[[str, Any], Any]) -> dict[str, Any]:
    """An optimizer's state of one weight, with `make(key, tensor)` in place of each tensor, also in lists and dicts."""
    return {key: tree_map_only((Tensor, SavedTensor), partial(make, key), value) for key, value in values.items()}


def _share(policy: Policy, name: str, key: str, value: Tensor) -> Share:
    return policy.storage.share_of(name, value) if policy.storage.per_element(key) else Share.whole(value)


def _room(
    policy: Policy, updater: Updater, name: str, wanted: dict[SavedTensor, Share], key: str, value: SavedTensor
) -> Tensor:
    """The memory that a saved tensor will be read to, entered in `wanted`."""
    owned = policy.storage.owned[name]
    if policy.storage.per_element(key):
        share = policy.storage.share_of(name, torch.empty(owned.shape, dtype=value.dtype, device=owned.device))
    else:
        if updater.elementwise and value.shape not in (owned.shape, torch.Size()):
            raise misfit(value, owned.shape)
        room = value.empty()
        if room.shape == owned.shape:  # it lies as the weight lies: fused optimizers do not look
            room = torch.empty_strided(owned.shape, owned.stride(), dtype=room.dtype, device=room.device)
        share = Share.whole(room)
    wanted[value] = share
    return share.tensor


# ---- optimizers and schedules that are made with other numbers than before ----

# [Note: made otherwise]
# A person may resume with another learning rate, and a checkpoint has the old one. The current numbers cannot tell what
# the person wants, for schedules and hooks move them. So a checkpoint also notes what the player's functions had made:
# the plain values of the optimizer's groups before there is a schedule, and those of the schedule at its begin
# (`Updater.made`). Where a resumed training makes other numbers, these count. Where all are the same, nothing is
# touched, and the training goes on to the bit. Checkpoints of earlier versions lack the note, and their numbers are
# kept.

HOW = {"foreach", "fused", "capturable", "differentiable"}  # how an optimizer computes: as in the checkpoint


def check_made(player: Player, updater: Updater, then: Mapping[str, Any]) -> None:
    """Refuse another class, and another choice such as amsgrad: what the checkpoint has in it would not fit."""
    now, advice = updater.made, "resume with the settings it was trained with"
    for what in ("optimizer", "schedule"):
        if then[what] != now[what]:
            raise UserError(
                f"player '{player.name}': the checkpoint's {what} is {then[what] or 'none'}, and this run's is "
                f"{now[what] or 'none'}; {advice}"
            )
    for before, made in zip(then["groups"], now["groups"], strict=False):
        for name in _made_otherwise(before, made):
            was, is_now = before[name], made[name]
            # An optimizer asks whether there is one.
            if isinstance(is_now, bool | str | None) or was is None or (name == "momentum" and not was):
                raise UserError(
                    f"player '{player.name}': its {now['optimizer']} was trained with {name}={was!r}, and has "
                    f"{name}={is_now!r} now; {advice}"
                )


def go_on(player: Player, updater: Updater, then: Mapping[str, Any]) -> str:
    """Let what a checkpoint has filled go on with the numbers that are made now. Returns a sentence that says so.

    A number that was as made becomes the new one. A learning rate that a hook has moved is scaled. If a schedule is
    made otherwise, it goes where one that is made now would be after as many steps: to change its numbers in the
    middle would give rates of neither.
    """
    now, groups, schedule = updater.made, updater.optimizer.param_groups, updater.schedule
    changed: list[str] = []
    for group, before, made in zip(groups, then["groups"], now["groups"], strict=False):
        for name in _made_otherwise(before, made):
            if group.get(name) == before[name]:
                _put(group, name, made[name])
            elif name == "lr" and before[name]:
                _put(group, name, group[name] * made[name] / before[name])
            else:  # training has moved it
                continue
            changed.append(name)
    moved = _made_otherwise(then["state"], now["state"])
    if schedule is not None and moved and all("lr" in made for made in now["groups"]):
        _replay(player, updater, schedule)
        changed.append(now["schedule"])
    what = ", ".join(dict.fromkeys(changed))
    return f"player '{player.name}' goes on with its {what} of now, in place of the checkpoint's" if what else ""


def _replay(player: Player, updater: Updater, schedule: LRScheduler) -> None:
    """Let a schedule that is made now make all steps of this one, which then goes on from there."""
    assert player.schedule is not None
    for group, made in zip(updater.optimizer.param_groups, updater.made["groups"], strict=True):
        group.pop("initial_lr", None)  # schedules of torch keep one that is there
        for name in {"lr", "initial_lr"} & made.keys():
            _put(group, name, made[name])
    with untouched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of steps before the optimizer's first
        again = player.schedule(updater.optimizer)
        for _ in range(private.steps_of(schedule)):
            again.step()
    schedule.load_state_dict(again.state_dict())


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """A rate that is a tensor stays the same one, for a compiled step has it."""
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _made_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in now if name in before and before[name] != now[name] and name not in HOW]


def rest_of_state(policy: Policy) -> dict[str, Any]:
    """The state of a player except weights, optimizer and schedule."""
    return {
        "ema": average_state(policy),
        "ema_updates": 0 if policy.average is None else policy.average.updates,
        "loss_scale": None if policy.loss_scale is None else asdict(policy.loss_scale),
        "skipped": policy.skipped,
    }


def load_rest(policy: Policy, state: Mapping[str, Any]) -> None:
    policy.skipped = state.get("skipped", 0)
    if policy.average is not None:
        policy.average.updates = state.get("ema_updates", 0)
    if policy.loss_scale is not None and state.get("loss_scale") is not None:
        policy.loss_scale = LossScale(**state["loss_scale"])


# ---- weights that are not in it ----


class LeftOut:
    """The weights that checkpoints leave out: those of `Player(saved=False)`, and of frozen players with `weights=`.

    The game's constructor makes the former each time. A checkpoint notes a checksum of each. The latter are read from
    files each time. A checkpoint notes the path and a digest of the files. So a run never goes on with other weights:
    it would differ silently from what it was. A weight that some player changes is not left out.

    Made while the weights of the constructor are whole.
    """

    def __init__(self, first: FirstWeights, policies: Mapping[str, Policy]) -> None:
        self.game, self.world, self.policies = first.game, first.world, policies
        self.of_players = {name: each for name, each in first.files.items() if policies[name].player.frozen}
        in_files = {name: set(map(id, policies[name].player.module.parameters())) for name in self.of_players}
        found: set[int] = set().union(*in_files.values())
        for policy in policies.values():
            if not policy.player.saved:
                found |= set(map(id, policy.player.module.parameters()))
        for policy in policies.values():
            changing = policy.weights if policy.player.follows is None else policy.belongings.parameters
            found -= set(map(id, changing.values()))
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in self.game.named_parameters() if id(p) in found}
        self.names = {
            player: [name for name, parameter in self.parameters.items() if id(parameter) in own]
            for player, own in in_files.items()
        }
        of_files = {name for names in self.names.values() for name in names}
        self.made = {name: p for name, p in self.parameters.items() if name not in of_files}  # by the constructor
        own = self.made if self.world.rank == 0 else {}
        self.checksums: dict[str, Checksum] = {name: checksum(parameter) for name, parameter in own.items()}
        self.files: dict[str, dict[str, Any]] = {}

    def note_files(self, first_of_host: bool) -> None:
        """Note for checkpoints which files there are. One rank of each host reads them, as fast as its disk can."""

        def own() -> dict[str, str]:
            return {name: each.digest() for name, each in self.of_players.items()} if first_of_host else {}

        of_hosts = [each for each in self.world.each(own) if each] if self.of_players else []
        for name, files in self.of_players.items():
            if len({digests[name] for digests in of_hosts}) > 1:
                raise UserError(f"player '{name}': {files.path} is not the same file on all hosts; copy it again")
            self.files[name] = {"path": str(files.path), "sha256": of_hosts[0][name], "names": self.names[name]}

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise if a checkpoint is of a run in which these weights had other values, or were not left out."""
        ids = set(map(id, self.made.values()))
        files, checksums = checkpoint.get("files", {}), checkpoint.get("left_out", {})
        for player in self.of_players.keys() - files.keys():
            raise UserError(f"the checkpoint was saved without weights= for '{player}'; resume as it was trained")
        for name in self.made.keys() - checksums.keys():
            raise UserError(f"the checkpoint was saved without saved=False for '{name}'; resume as it was trained")
        check_files(files, self.of_players, {name: each["sha256"] for name, each in self.files.items()})
        if not self.made:
            return

        def compare() -> None:
            check_left_out(self.game, {name: checksums[name] for name in self.made})

        with ExitStack() as stack:
            for policy in self.policies.values():
                if not ids.isdisjoint(map(id, policy.belongings.parameters.values())):
                    stack.enter_context(policy.gathered())
            self.world.each(compare)
