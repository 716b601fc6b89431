"""Lightning's hooks around backward and update: called where they belong, or refused by name."""

from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from gan.files.errors import UserError
from gan.module import GanModule
from strategies import private

HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")

# Methods of a LightningModule that nobody calls here, and what to write instead.
INSTEAD = {
    "configure_optimizers": "yield Player(name, network, optimizer=..., schedule=...) in configure_players()",
    "configure_gradient_clipping": "type Player(..., clip=1.0)",
    "optimizer_step": "write on_before_optimizer_step(optimizer), or Phase(..., every=...) for other intervals",
    "optimizer_zero_grad": "leave it out: no gradient stays from one phase to the next",
    "backward": "return the loss from the phase's method; on_before_backward(loss) sees it",
    "lr_scheduler_step": "type Player(..., schedule=...)",
    "configure_sharded_model": "make the networks in __init__ or configure_model()",
}
CALLBACKS = {
    GradientAccumulationScheduler: "type Phase(..., micro_batches=...)",
    StochasticWeightAveraging: "type Player(..., ema=0.999)",
    WeightAveraging: "type Player(..., ema=0.999)",
    BaseFinetuning: "type Player(..., freeze=...)",
    LearningRateFinder: "give each player's optimizer a rate, as by partial(Adam, lr=2e-4)",
    ModelPruning: "prune the networks where they are made, by torch.nn.utils.prune",
}


class GameFirst(Callback):
    """Calls the game's own on_train_batch_end before callbacks', and not after them: so they save the whole step."""

    put_back: Callable[..., None] | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.on_train_batch_end(*args)
        own, name = vars(pl_module), "on_train_batch_end"
        before = {name: own[name]} if name in own else {}

        def put_back(*_: Any) -> None:
            own.pop(name, None)
            own.update(before)

        own[name] = self.put_back = put_back  # Lightning's own call of the hook puts it back

    def on_exception(self, *_: Any) -> None:
        if self.put_back is not None:
            self.put_back()


class Hooks:
    """Calls those of HOOKS that the game or a callback overrides. Which these are is decided once."""

    def __init__(self, trainer: Trainer | None = None, game: GanModule | None = None) -> None:
        self.trainer = trainer
        pairs: list[tuple[Any, type]] = []
        if trainer is not None:
            pairs = [(game, GanModule), *((each, Callback) for each in private.callbacks(trainer))]
        self.wanted = [name for name in HOOKS if any(overrides(each, name, base) for each, base in pairs)]

    def call(self, name: str, *args: Any) -> None:
        """In Lightning's order: the callbacks, then the game."""
        if self.trainer is not None and name in self.wanted:
            private.call_hooks(self.trainer, name, *args)


NO_HOOKS = Hooks()


def overrides(instance: Any, name: str, base: type) -> bool:
    """Whether a class or an instance has a method of its own in place of the one of `base`."""
    own = getattr(type(instance), name, None)
    return name in getattr(instance, "__dict__", ()) or (own is not None and own is not getattr(base, name, None))


def refuse_what_is_not_called(trainer: Trainer, game: GanModule) -> None:
    """Refuse methods, settings and callbacks of Lightning that would do nothing here, before training."""
    what = type(game).__name__
    for name, instead in INSTEAD.items():
        if overrides(game, name, GanModule):
            raise UserError(f"{what} has a method {name}(), which PhaseStrategy does not call; {instead}")
    if game.automatic_optimization:
        raise UserError(f"{what} sets automatic_optimization = True; leave it out: PhaseStrategy plays the phases")
    if value := trainer.gradient_clip_val:
        raise UserError(f"Trainer(gradient_clip_val={value}) is for one optimizer; type Player(..., clip={value})")
    if (number := trainer.accumulate_grad_batches) != 1:
        raise UserError(
            f"Trainer(accumulate_grad_batches={number}) is not for several phases; type a batch {number} times as "
            f"large and Phase(..., micro_batches={number})"
        )
    for callback in private.callbacks(trainer):
        for kind, instead in CALLBACKS.items():
            if isinstance(callback, kind):
                raise UserError(f"the callback {type(callback).__name__} is for one network and optimizer; {instead}")
