"""Lightning's hooks around backward and update: called where they belong, or refused by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any, cast
from unittest import mock

from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies import private
from strategies.batches.draws import for_all_ranks
from strategies.policies.policy import Policy
from strategies.sharding.reduction import Reduction, whole_gradients
from strategies.world import World, equal_on_ranks

OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
AFTER = Phase(OF_BATCHES[-1], dict, ())  # what it draws is compared and tried as what a phase draws
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# In these a game or a callback may draw what a loss reads later.
PARTS = ("train_", "train_epoch_", "train_batch_", "validation_", "validation_epoch_")
DRAWING = *HOOKS, *(f"on_{part}{end}" for part in PARTS for end in ("start", "end"))

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
    lightnings.GradientAccumulationScheduler: "type Phase(..., micro_batches=...)",
    lightnings.StochasticWeightAveraging: "type Player(..., ema=0.999)",
    lightnings.WeightAveraging: "type Player(..., ema=0.999)",
    lightnings.BaseFinetuning: "type Player(..., freeze=...)",
    lightnings.LearningRateFinder: "give each player's optimizer a rate, as by partial(Adam, lr=2e-4)",
    lightnings.ModelPruning: "prune the networks where they are made, by torch.nn.utils.prune",
}


class GameFirst(Callback):
    """Calls the game's own hooks at the end of a step or epoch before callbacks', and not after them.

    So what callbacks save is of the whole step or epoch. And weights are whole where Lightning's model summary calls a
    game that has an `example_input_array`: in on_fit_start.
    """

    def __init__(self) -> None:
        self.instead = ExitStack()  # empty where the callback may be pickled

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.example_input_array is None:
            return
        strategy: Any = trainer.strategy
        whole, hook = ExitStack(), pl_module.on_fit_start
        shown = any(isinstance(each, lightnings.ModelSummary) for each in private.callbacks(trainer))
        for policy in strategy.policies.values():
            if not policy.storage.unsharded and any(map(private.logs_graph, trainer.loggers)):
                raise UserError(
                    f"player '{policy.player.name}': a logger with log_graph=True calls the game on the first rank "
                    f"alone, which has not all weights under '{policy.name}'; type log_graph=False"
                )
            if shown:
                whole.enter_context(policy.gathered())

        def called() -> None:
            self.instead.close()
            whole.close()
            hook()

        self.instead.enter_context(mock.patch.object(pl_module, "on_fit_start", called))

    def on_exception(self, *_: Any) -> None:
        self.instead.close()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        call_now(pl_module, "on_train_batch_end", *args)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(Any, trainer.strategy).steps.logged.end_epoch()
        call_now(pl_module, "on_train_epoch_end")


@contextmanager
def draws_alike(game: GanModule) -> Iterator[None]:
    """Inside the `with`, what the game's hooks and callbacks draw is the same on all ranks: a loss may read it."""
    with ExitStack() as stack:
        for number, owner in enumerate([game, *private.callbacks(game.trainer)]):
            for name in DRAWING:
                if overrides(owner, name, Callback if number else GanModule):
                    alike = Alike(getattr(owner, name), game, name, number)
                    stack.enter_context(mock.patch.object(owner, name, alike.call))
        yield


class Alike:
    """A hook of the game, whose number is 0, or of a callback. What it draws is the same on all ranks."""

    def __init__(self, hook: Callable[..., Any], game: GanModule, name: str, number: int) -> None:
        self.hook, self.game, self.where = hook, game, (name, number)
        self.step, self.before = -1, 0  # the last step, and how often the hook was called before in it
        self.done = False  # by `call_now`, what Lightning's next call is for

    def call(self, *args: Any) -> Any:
        if self.done:
            self.done = False
            return None
        self.step, self.before = self.game.step, self.before + 1 if self.step == self.game.step else 0
        strategy: Any = self.game.trainer.strategy
        begins = self.where == ("on_train_epoch_start", 0)  # a run that is resumed from within would call it again
        strategy.epoch_begins |= begins
        key = strategy.saving.seed, self.step, self.before, *self.where
        with for_all_ranks(*key):
            found = self.hook(*args)
        strategy.epoch_begins &= not begins
        return found


def call_now(game: LightningModule, name: str, *args: Any) -> None:
    """Call the game's own hook now, and not when Lightning does."""
    alike = getattr(vars(game).get(name), "__self__", None)
    if isinstance(alike, Alike):
        alike.call(*args)
        alike.done = True


class Hooks:
    """Calls those of HOOKS that the game or a callback overrides. Which these are is decided once."""

    def __init__(self, trainer: Trainer | None = None, game: GanModule | None = None) -> None:
        self.trainer, self.wanted, self.of_batches = trainer, list[str](), False
        if trainer is None:
            return
        pairs = [(game, GanModule), *((each, Callback) for each in private.callbacks(trainer))]
        self.wanted = [name for name in HOOKS if any(overrides(each, name, base) for each, base in pairs)]
        owners = [(game, GanModule), (private.datamodule(trainer), LightningDataModule)]
        changed = {name for owner, base in owners for name in OF_BATCHES if owner and overrides(owner, name, base)}
        self.of_batches = bool(changed - {"on_before_batch_transfer"})
        if trainer.world_size > 1 and "on_before_batch_transfer" in changed:
            rank_zero_warn(
                "what on_before_batch_transfer draws or computes is each rank's own, and no trial sees it; write "
                "on_after_batch_transfer(batch, dataloader_idx) in its place, or do it in the loss"
            )

    def call(self, name: str, *args: Any) -> None:
        if self.trainer is not None and name in self.wanted:
            private.call_hooks(self.trainer, name, *args)


NO_HOOKS = Hooks()


# ---- gradients that a hook sees ----


def see_gradients(
    learners: Sequence[Policy], phase: Phase, hooks: Hooks, world: World, compared: bool, seed: tuple[int, int]
) -> list[Tensor]:
    """Let a hook see, and change, whole gradients, of all learners, as it may clip them together. Returns the norms.

    `compared`: ranks must leave the same. `seed` decides what the hook draws.
    """
    with ExitStack() as stack:
        for learner in learners:
            if learner.storage.owns_part:
                stack.enter_context(learner.lent("on_before_optimizer_step"))
                stack.enter_context(whole_gradients(learner.reduction))
        before = [_gradients_of(learner) for learner in learners]
        for learner in learners:
            with for_all_ranks(*seed, phase.name, learner.player.name, "hook"):
                hooks.call("on_before_optimizer_step", learner.learners_updater.optimizer)
        for learner, old in zip(learners, before, strict=True):
            # What ranks leave must be alike: later all gather the same weights, so nothing shows it.
            now = _gradients_of(learner)
            written = [(id(each), version) for each, version in now] != [(id(each), version) for each, version in old]
            if compared and not equal_on_ranks([gradient for gradient, _ in now] if written else [], world.device):
                raise UserError(
                    f"phase '{phase.name}', player '{learner.player.name}': on_before_optimizer_step has left other "
                    f"gradients on each rank. They are averaged over the ranks already; what the hook puts in their "
                    f"place must be so too: gan.ranks.mean(x) in place of x"
                )
        # Of the whole gradients that are here now, so not by what a reduction of shards has in place of it.
        return [Reduction.norms(learner.reduction) for learner in learners]


def _gradients_of(learner: Policy) -> list[tuple[Tensor, int]]:
    """Each gradient, and how often it has been written."""
    gradients = (weight.grad for weight in learner.storage.weights.values())
    return [(gradient, gradient._version) for gradient in gradients if gradient is not None]


def refuse_partial_gradients(learners: Sequence[Policy], last: bool, world: World) -> AbstractContextManager[object]:
    """Inside the `with`, to use a gradient that is not whole is an error: published code would find None, and go on."""
    policies = [each for each in learners if world.size > 1 and not (last and each.reduction.reduces_in_backward)]
    stored = ((each, (*each.storage.weights.values(), *each.storage.owned.values())) for each in policies)
    owners = {id(weight): policy for policy, weights in stored for weight in weights}
    return GradientsApart(owners) if owners else nullcontext()


# pyrefly: ignore[missing-attribute]  # torch declares `grad` for tensors, and its descriptor not
GRADIENT = (Tensor.grad.__get__, Tensor.grad.__set__)


class GradientsApart(TorchFunctionMode):
    """Refuses to read or write the gradients of these weights."""

    def __init__(self, owners: Mapping[int, Policy]) -> None:
        super().__init__()
        self.owners = owners

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in GRADIENT and (policy := self.owners.get(id(args[0]))):
            raise UserError(
                f"player '{policy.player.name}': on_after_backward uses gradients, and under policy '{policy.name}' or "
                f"with micro-batches they are not whole there; write on_before_optimizer_step(self, optimizer), where "
                f"they are the means over all ranks"
            )
        return function(*args, **(kwargs or {}))


# ---- what is refused ----


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
    if overrides(game, "training_step", GanModule):
        taken = signature(game.training_step).parameters.values()
        many = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        needed = [each.name for each in taken if each.default is each.empty and each.kind not in many]
        if len(needed) > 2:
            raise UserError(
                f"{what}.training_step is called with a batch and its number, in place of the phases, and needs "
                f"{', '.join(needed)}; give the method another name, which phases call"
            )
    if trainer.world_size > 1 and private.compiled_whole(game):
        raise UserError(
            f"torch.compile({what}) compiles phases, hooks and the ranks' messages too; pass the game itself, and type "
            f"PhaseStrategy('ddp+compile')"
        )
    if game.automatic_optimization:
        raise UserError(f"{what} sets automatic_optimization = True; leave it out: PhaseStrategy plays the phases")
    if (value := trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == "value":
        raise UserError(
            f"Trainer(gradient_clip_algorithm='value') is for one optimizer; write in on_before_optimizer_step(self, "
            f"optimizer): for group in optimizer.param_groups: torch.nn.utils.clip_grad_value_(group['params'], "
            f"{value})"
        )
    if value:
        raise UserError(f"Trainer(gradient_clip_val={value}) is for one optimizer; type Player(..., clip={value})")
    if (number := trainer.accumulate_grad_batches) != 1:
        raise UserError(
            f"Trainer(accumulate_grad_batches={number}) is not for several phases; type a batch {number} times as "
            f"large and Phase(..., micro_batches={number})"
        )
    for logger in filter(private.uploads, trainer.loggers):
        raise UserError(
            f"{type(logger).__name__}(log_model=...) uploads files, and a checkpoint here is a folder; leave log_model "
            f"out, and upload the folder after fit"
        )
    for callback in private.callbacks(trainer):
        if isinstance(callback, lightnings.ModelCheckpoint) and callback.monitor and callback._every_n_train_steps:
            rank_zero_warn(
                f"ModelCheckpoint(monitor='{callback.monitor}', every_n_train_steps=...): a checkpoint has the score "
                f"of the validation before its step; leave every_n_train_steps out, and each validation is followed by "
                f"a save"
            )
        if isinstance(callback, lightnings.ModelCheckpoint) and callback._train_time_interval is not None:
            raise UserError(
                "ModelCheckpoint(train_time_interval=...) never saves where there are several optimizers; type "
                "every_n_train_steps=..."
            )
        for kind, instead in CALLBACKS.items():
            if isinstance(callback, kind):
                raise UserError(f"the callback {type(callback).__name__} is for one network and optimizer; {instead}")
