"""The first values of weights that come from files, or that were on the meta device: each rank makes what it keeps.

[Note: set-up without whole weights]
A policy that shards weights (`Policy.begins_sharded`) adopts its player while these weights have no values: they are
`ReshardedParameter`s from the start, with memory for one element. When its storage has memory for this rank's shares,
the shares are filled, from files or by `reset_parameters()` (see [Note: first values] in gan/making.py). All other
weights, and buffers, are filled before the policies adopt the players.

So a rank never holds more than its shares, one module that is being made, and a few MB of a file.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise, zip_longest

import numpy as np
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gan.ema import Ema
from gan.files.checkpoint import Share, aside
from gan.files.errors import UserError
from gan.making import Making, give_memory
from gan.module import GanModule
from gan.pretrained import WeightFiles, open_files
from strategies import private
from strategies.accelerator import same_parameters
from strategies.objects.reachable import Reachable
from strategies.policies.policy import Policy
from strategies.sharding.bucket import UNSHARDED, memory_of
from strategies.sharding.resharded_parameter import hide, resharded, show
from strategies.world import World, agree

UNSENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # that gloo or NCCL lacks


class FirstWeights:
    """`seed` is the run's. `resumed`: a checkpoint's values are loaded after set-up, so they are not made before."""

    def __init__(self, game: GanModule, world: World, seed: int, resumed: bool) -> None:
        """Find what has no values, and open the files. If one rank fails, all raise."""
        players = game.players.values()
        self.game, self.world, self.seed = game, world, seed
        self.making = Making(game, players)
        self.gone = {id(p): p for p in game.parameters() if resharded(p)}  # of an ended training
        self.begin_sharded: list[Policy] = []
        # What a learner has learned, or gets from a checkpoint, is not read again.
        again = resumed or game.pretrained_weights_read
        named = [each for each in players if each.weights is not None and (each.frozen or not again)]
        self.files: dict[str, WeightFiles] = {}
        self.tensors: dict[str, dict[str, Tensor]] = {}

        def open_all() -> None:
            self.files = open_files(named)
            self.tensors = {name: each.tensors() for name, each in self.files.items()}

        if named:
            world.each(open_all)
        self.read = self._one_file_each()
        self.given: set[int] = set()
        if resumed:
            self.given = {id(value) for value in game.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}
        self._refuse()

    def _one_file_each(self) -> set[int]:
        """The ids of what is read. Raise if two players would read the same tensor from different files."""
        sources: dict[int, tuple[str, str]] = {}
        for player, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                other, other_name = sources.setdefault(id(tensor), (player, name))
                paths = [self.files[each].path.resolve() for each in (player, other)]
                if paths[0] != paths[1]:
                    raise UserError(
                        f"player '{player}' reads '{name}' from {paths[0]}, and player '{other}' reads the same tensor "
                        f"('{other_name}') from {paths[1]}; leave weights out for one of them"
                    )
        return set(sources)

    def _refuse(self) -> None:
        for player in self.game.players.values():
            for name, parameter in player.module.named_parameters():
                if not player.saved and player.weights is None and parameter.is_meta:
                    raise UserError(
                        f"player '{player.name}': '{name}' is on torch.device('meta'), and with saved=False the game's "
                        f"constructor must make it; type weights=PATH, or leave saved=False out"
                    )
        names = {id(parameter): name for name, parameter in self.game.named_parameters()}
        for key in self.gone:
            if key not in self.given | self.read:
                raise UserError(
                    f"'{names[key]}' has no values: they were sharded in a training that was interrupted, or did not "
                    f"fit on one rank after it; make the game anew, or type ckpt_path=... in fit"
                )

    def begin(self, policies: Iterable[Policy]) -> None:
        """Fill all that no policy shards, before the policies adopt their players."""
        self.begin_sharded = [policy for policy in policies if policy.begins_sharded]
        later = {id(each) for policy in self.begin_sharded for each in policy.belongings.parameters.values()}
        files = {id(each): each for tensors in self.tensors.values() for each in tensors.values()}
        now: dict[Tensor, Share | None] = {}
        for key, tensor in (files | self.making.tensors | self.gone).items():
            if key not in later:
                if resharded(tensor):
                    show(tensor, torch.empty(tensor.shape.numel(), dtype=tensor.dtype, device=self.world.device))
                elif tensor.is_meta:
                    give_memory(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=self.world.device))
                now[tensor] = Share.whole(tensor)
            elif tensor.is_meta:
                nothing = torch.full((), torch.nan, dtype=tensor.dtype, device=self.world.device)
                assert isinstance(tensor, nn.Parameter)
                give_memory(tensor, nothing.expand(tensor.shape))
                hide(tensor, nothing)
        if now:
            self.world.each(lambda: self._fill(now))

    def fill_shards(self) -> None:
        """Fill this rank's shares of what policies shard, after they have adopted their players."""
        ours = self.read | self.making.tensors.keys()
        policies = [p for p in self.begin_sharded if not ours.isdisjoint(map(id, p.belongings.parameters.values()))]
        shares = {weight: share for policy in policies for weight, share in policy.storage.shares().items()}
        if policies:
            self.world.each(lambda: self._fill(shares))
        self.game.pretrained_weights_read = True
        for policy in policies:
            policy.storage.shards_changed(others=True)
            if isinstance(policy.ema, Ema):
                policy.ema.load_state_dict(None)

    def _fill(self, shares: Mapping[Tensor, Share | None]) -> None:
        for player, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                share = shares.get(tensor)
                if share is not None:
                    self.files[player].read(name, share)
        rest = {each: share for each, share in shares.items() if id(each) not in self.read | self.given}
        self.making.make(rest, self.seed, self.world.device)

    def bytes_of(self, policy: Policy) -> int:
        """The bytes of a player's weights that have never been whole on this rank."""
        made = self.making.tensors.keys() | self.gone.keys()
        weights = policy.belongings.parameters.values() if policy in self.begin_sharded else ()
        return sum(weight.numel() * weight.element_size() for weight in weights if id(weight) in made)


def refuse_other_networks(game: nn.Module, parts: Iterable[nn.Module], world: World) -> None:
    """Weights go from rank to rank by their place in these parts, so each must have the same place on all ranks."""
    names = {id(tensor): name for name, tensor in (*game.named_parameters(), *game.named_buffers())}
    weights = [
        f"'{names.get(id(tensor), name)}' {[*tensor.shape]}"
        for part in parts
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    ]
    if agree(weights, world.device):
        return
    everyone = world.gather(weights)
    rank = next(number for number, each in enumerate(everyone) if each != everyone[0])
    first, other = next(pair for pair in zip_longest(everyone[0], everyone[rank]) if pair[0] != pair[1])
    raise UserError(
        f"the networks are not the same on all ranks: rank 0 has {first or 'no more weights'} where rank {rank} has "
        f"{other or 'no more weights'}; a set has another order in each process, so make layers and lists of weights "
        f"over a list or sorted(...)"
    )


def refuse_one_memory(game: nn.Module) -> None:
    """Two weights in one memory learn as one. Policies that copy weights would make two of them, without a word."""
    spans = []
    for name, weight in game.named_parameters():
        if weight.numel() and not (weight.is_meta or is_lazy(weight) or resharded(weight)):
            last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
            spans.append((weight.data_ptr(), weight.data_ptr() + (last + 1) * weight.element_size(), name))
    for (_, end, name), (begin, _, other) in pairwise(sorted(spans)):
        if begin < end:
            raise UserError(
                f"weights '{name}' and '{other}' are in one memory, as after `.data = `, and ranks would have two; "
                f"have one parameter: decoder.weight = encoder.weight, or F.linear(x, encoder.weight.t())"
            )


def _tensors(game: GanModule) -> Iterator[tuple[str, Tensor]]:
    """What the game keeps beside its parameters, also as arrays, whose base is the tensor that gave them."""
    for name, each in Reachable([game]).objects.values():
        while isinstance(each, np.ndarray):
            each = each.base
        if isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
            yield name, each


@contextmanager
def refuse_old_views(game: GanModule) -> Iterator[None]:
    """Around what gives weights other memory, as policies do that shard: code would go on to read the old values.

    What else has the memory of a weight that may learn, such as `self.w = self.layer.weight.data`, must move with it.
    """
    weights = {memory_of(each): (name, each) for name, each in game.named_parameters() if each.requires_grad}
    views = [(name, each, *weights[memory_of(each)]) for name, each in _tensors(game) if memory_of(each) in weights]
    yield
    for name, view, of, weight in views:
        # A hook may make `weight` of `weight_orig` in each forward, as torch's spectral_norm.
        anew = of.startswith(f"{name}_") and game.get_submodule(of.rpartition(".")[0])._forward_pre_hooks
        if memory_of(view) != memory_of(weight) and not anew:
            raise UserError(
                f"'{name}' has the memory of weight '{of}', whose policy gives the weight other memory, so '{name}' "
                f"would keep the values of the start; read the weight itself in the loss, or type .clone() if these "
                f"values are meant"
            )


def refuse_views_of_gathered(game: GanModule) -> None:
    """Before weights are freed again: what code keeps of their memory would be old after that, or point to nothing."""
    for name, each in _tensors(game):
        if memory_of(each) in UNSHARDED:
            raise UserError(
                f"'{name}' is in the memory of a weight that was gathered, which is freed again; read the weight "
                f"itself each time, or type .clone() if its values of now are meant"
            )


def refuse_lazy(game: nn.Module) -> None:
    """Everything here is decided by shapes, which a lazy layer has only after its first call; and memory is dense."""
    for name, tensor in (*game.named_parameters(), *game.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"'{name}' has no shape before the first call of its network; call the network once where it is made, "
                f"or type the sizes, such as nn.Linear(64, 8) in place of nn.LazyLinear(8)"
            )
        if tensor.layout != torch.strided:
            raise UserError(
                f"'{name}' is sparse, and a checkpoint has dense tensors; keep it in a plain attribute, without "
                f"register_buffer, or keep its dense indices and values"
            )


def move_game(game: nn.Module, device: torch.device, precision: Precision, everywhere: bool = False) -> None:
    """To this device, in the run's precision. With `everywhere`, all ranks get the values of the first one."""
    with aside(game, resharded):
        precision.convert_module(game)
    with without_values(game), same_parameters(device):
        game.to(device)
        if everywhere:
            for name, buffer in game.named_buffers():
                if buffer.dtype in UNSENT:
                    raise UserError(
                        f"buffer '{name}' is {buffer.dtype}, which ranks cannot send to each other; make it torch.int32"
                    )
            private.broadcast_module(game)


def without_values(game: nn.Module) -> AbstractContextManager[None]:
    """Inside the `with`, a game is without the tensors that have no values here."""
    return aside(game, lambda tensor: tensor.is_meta or resharded(tensor))
