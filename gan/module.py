"""GanModule: a game, as a LightningModule that knows nothing of devices and ranks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import getfullargspec
from typing import Any, NoReturn, Self, TypeVar

from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from gan import noise
from gan.files.checkpoint import check_left_out, load, load_module_state, take_format
from gan.files.errors import UserError, explained
from gan.files.finite import NotFinite, as_made, not_finite
from gan.making import on_meta, reopened
from gan.phase import Phase, Player, check_game

T = TypeVar("T")
READING = (
    "; to read a learning rate take self.trainer.optimizers, or the callback LearningRateMonitor; a schedule is "
    "Player(..., schedule=...)"
)
OF_CLI = {"_instantiator", "_class_path"}  # what LightningCLI saves beside hyper-parameters


def _trained_by_hand(call: str, reading: str = "") -> Callable[..., NoReturn]:
    def refuse(self: LightningModule, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            f"{type(self).__name__} calls self.{call}(), but what is trained by hand is not synchronised; write each "
            f"turn as a method that returns its loss: yield Player('generator', self.generator, partial(Adam, "
            f"lr=2e-4)) in configure_players(), Phase('generator', self.fool, learners='generator') in "
            f"configure_phases(), and leave training_step out{reading}"
        )

    return refuse


class GanModule(LightningModule):
    """A game of several networks. To write one, name the players and the phases, and write a loss for each phase.

        class MyGan(GanModule):
            def configure_players(self):
                yield Player("generator", self.generator, partial(Adam, lr=2e-4), ema=0.99)
                yield Player("discriminator", self.discriminator, partial(Adam, lr=2e-4))

            def configure_phases(self):
                yield Phase("discriminator", self.judge, learners="discriminator")
                yield Phase("generator", self.fool, learners="generator")

    `judge` and `fool` are methods that take a batch and return a loss. Train it with a Lightning
    `Trainer(strategy=PhaseStrategy("ddp"))`. One pass over the phases is one `step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.players: dict[str, Player] = {}
        self.phases: tuple[Phase, ...] = ()
        self.pretrained_weights_read = False  # those of learners are read once: see Player(weights=...)
        self._shared: dict[Any, Any] = {}

    def configure_players(self) -> Iterable[Player]:
        """Yield a Player for each network. Every game writes this method."""
        raise UserError(f"{type(self).__name__} has no configure_players(); yield a Player a sub-network")

    def configure_phases(self) -> Iterable[Phase]:
        """Yield a Phase for each turn, in the order of play. Every game writes this method."""
        raise UserError(f"{type(self).__name__} has no configure_phases(); yield a Phase a turn")

    def assemble(self) -> None:
        """Collect the players and phases and check that they fit together. The strategy calls it."""
        players, phases = self.configure_players() or (), self.configure_phases() or ()
        players = (players,) if isinstance(players, Player) else tuple(players)
        phases = (phases,) if isinstance(phases, Phase) else tuple(phases)
        check_game(players, phases)
        named = {player.name: player for player in players}
        # A player that follows another one is cut in the same places.
        self.players = {n: replace(p, blocks=named[p.follows].blocks) if p.follows else p for n, p in named.items()}
        self.phases = phases

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle is without players and phases, which may hold lambdas. A training makes them anew."""
        return {**super().__getstate__(), "players": {}, "phases": ()}

    @property
    def step(self) -> int:
        """How many passes over the phases are done. It is 0 without a trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def _strategy(self) -> Any:
        """The PhaseStrategy, which games stand below."""
        return self.trainer.strategy

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """The values of all ranks, stacked; the same values on one device. Outside of phases."""
        found = self.all_gather(values)
        assert isinstance(found, Tensor)
        return found

    def training_step(self, batch: Any) -> None:
        """Play every phase that is due in this step."""
        self._strategy.play(batch)

    def shared(self, name: str, make: Callable[..., T], *args: Any) -> T:
        """`make(*args)`, computed once in a step (and micro-batch) for all phases that ask for `name`.

        Use it for a fake that two phases need. Gradients flow through it to all players, in one phase: the others
        detach it. Phases that share must have the same number of micro-batches.
        """
        place = noise.here()
        key = (name, None if place is None else (place.first, place.rows))
        if key not in self._shared:
            with self._strategy.all_learning() if self._trainer is not None else nullcontext():
                self._shared[key] = make(*args)
        return self._shared[key]

    def on_validation_model_zero_grad(self) -> None:
        """Lightning calls this before a validation makes its loaders, which draw from training's random states."""
        if (aside := getattr(self.trainer.strategy, "set_random_states_aside", None)) is not None:
            aside()

    def forget_shared(self) -> None:
        """Drop what `shared` keeps. The strategy calls it before and after each step."""
        self._shared.clear()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with`, players compute with their averaged weights (EMA). Validation does this by itself."""
        with self._strategy.averaged() if self._trainer is not None else nullcontext():
            yield

    def player_of(self, optimizer: Optimizer) -> Player:
        """The player that an optimizer trains: hooks, such as `on_before_optimizer_step`, get a learner's optimizer."""
        updaters = ((policy, each) for policy in self._strategy.policies.values() for each in policy.updaters.values())
        return next(self.players[policy.player.name] for policy, each in updaters if each.optimizer is optimizer)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a game from the saved hyper-parameters and `kwargs`, with a checkpoint's weights, not their averages.

        Lightning's own method expects a checkpoint to be one file.
        """
        if hparams_file is not None:
            raise UserError("hyper-parameters are read from the checkpoint, or given by name; leave hparams_file out")
        saved = load(checkpoint_path, weights_only)
        game = cls(**{**cls._arguments(saved), **kwargs})
        meant, strict = as_made(game), game.strict_loading if strict is None else strict
        game._take(saved, f"{checkpoint_path} has other networks than {cls.__name__} makes", strict)
        if strict and (bad := not_finite(game.state_dict()).keys() - meant):
            raise NotFinite(
                f"{checkpoint_path} has weights that are not finite: '{min(bad)}'; take an earlier checkpoint, or type "
                f"strict=False"
            )
        return game if map_location is None else game.to(map_location)

    def _take(self, saved: dict[str, Any], other: str, strict: bool, exactly: bool = False) -> None:
        """Load a checkpoint outside of training, `exactly` in its number format. `other` is said of other networks."""
        self.on_load_checkpoint(saved)
        state, left_out = saved["state_dict"], saved.get("left_out", {})
        if saved.get("files") or on_meta(self):
            self.assemble()
        in_files = reopened(self, self.players.values(), saved, strict) if self.players else set()
        if exactly:
            take_format(self.state_dict(keep_vars=True), state)
        with explained(f"{other}: {{why}}", RuntimeError):
            load_module_state(self, state, strict=strict, left_out=in_files.union(left_out))
        if strict:
            check_left_out(self, left_out)
        self.pretrained_weights_read = True

    @classmethod
    def _arguments(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """The saved hyper-parameters that the constructor takes. LightningCLI, say, saves others too."""
        takes, found = getfullargspec(cls.__init__), saved.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
        names = {*takes.args, *takes.kwonlyargs}
        if (config := saved.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)) in names:
            return {config: found}
        names |= found.keys() - OF_CLI if takes.varkw else set()
        return {name: found[name] for name in names & found.keys()}

    # ---- Lightning's manual optimization, in which nothing would be synchronised ----

    optimizers = _trained_by_hand("optimizers", READING)
    lr_schedulers = _trained_by_hand("lr_schedulers", READING)
    manual_backward = _trained_by_hand("manual_backward")
    toggle_optimizer = _trained_by_hand("toggle_optimizer")
    clip_gradients = _trained_by_hand("clip_gradients")

    def configure_optimizers(self) -> None:
        """Refuse other strategies. Only they call this; PhaseStrategy takes the optimizers from the players."""
        raise UserError(
            f"{type(self).__name__} is a GanModule and cannot train under {type(self.trainer.strategy).__name__}; type "
            f"Trainer(strategy=PhaseStrategy('ddp')), with `from strategies import PhaseStrategy`"
        )
