"""GanModule: a game as a LightningModule, with no line on distribution."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self, TypeVar

from lightning import LightningModule

from gan import noise
from gan.checkpoint import load, load_module_state
from gan.errors import UserError
from gan.phase import Phase, Player, check_game

T = TypeVar("T")


class GanModule(LightningModule):
    """A game of several networks: say who plays and which turns there are, and write each turn's loss.

    It trains under `Trainer(strategy=PhaseStrategy(...))`; one pass over the phases is one `step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.players: dict[str, Player] = {}
        self.phases: tuple[Phase, ...] = ()
        self._shared: dict[Any, Any] = {}

    def configure_players(self) -> Iterable[Player]:
        """Yield the sub-networks with their optimizers. To be written by the author of the game."""
        raise UserError(f"{type(self).__name__} has no configure_players(); yield a Player a sub-network")

    def configure_phases(self) -> Iterable[Phase]:
        """Yield the turns in the order they are played. To be written by the author of the game."""
        raise UserError(f"{type(self).__name__} has no configure_phases(); yield a Phase a turn")

    def assemble(self) -> None:
        """Ask the author for players and phases and check that they hold together; the strategy calls it."""
        players, phases = tuple(self.configure_players()), tuple(self.configure_phases())
        check_game(players, phases)
        self.players = {player.name: player for player in players}
        self.phases = phases

    @property
    def step(self) -> int:
        """How many passes over the phases are behind us; 0 where no trainer is attached."""
        return self._trainer.global_step if self._trainer is not None else 0

    def training_step(self, batch: Any) -> None:
        """One step: play every phase that is due."""
        for phase in self.phases:
            if phase.due(self.step):
                self.trainer.strategy.run(phase, batch)

    def shared(self, name: str, make: Callable[..., T], *args: Any) -> T:
        """`make(*args)`, made once a step and micro-batch and handed to every phase that asks for `name`.

        For a fake that both phases use. It is made with the graph of all players, whoever learns first;
        detach it where no gradient should pass. The phases that share must cut the batch alike.
        """
        place = noise.here()
        key = (name, None if place is None else (place.first, place.rows))
        if key not in self._shared:
            with self.trainer.strategy.all_learning() if self._trainer is not None else nullcontext():
                self._shared[key] = make(*args)
        return self._shared[key]

    def forget_shared(self) -> None:
        """Drop what `shared` keeps; the strategy calls it around every step."""
        self._shared.clear()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the players' averaged weights (EMA) for a while; validation does so by itself."""
        with self.trainer.strategy.averaged() if self._trainer is not None else nullcontext():
            yield

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
        """A new game with the saved hyper-parameters and `kwargs`, and with a checkpoint's weights, not their averages.

        Lightning's own method expects a checkpoint to be one file.
        """
        if hparams_file is not None:
            raise UserError("hyper-parameters are read from the checkpoint, or given by name; leave hparams_file out")
        saved = load(checkpoint_path, weights_only is not False)
        game = cls(**{**saved.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}), **kwargs})
        game.on_load_checkpoint(saved)
        try:
            load_module_state(game, saved["state_dict"], strict=game.strict_loading if strict is None else strict)
        except RuntimeError as error:
            raise UserError(f"{checkpoint_path} has other networks than {cls.__name__} makes: {error}") from error
        return game if map_location is None else game.to(map_location)

    def configure_optimizers(self) -> None:
        """Only a strategy that does not know players asks a GanModule for optimizers."""
        strategy = type(self.trainer.strategy).__name__
        raise UserError(
            f"{type(self).__name__} is a GanModule and cannot train under {strategy}; type "
            f"Trainer(strategy=PhaseStrategy('ddp')), with `from strategies import PhaseStrategy`"
        )
