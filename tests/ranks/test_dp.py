"""dp: the same training as one device, by replicas in threads; or refused."""

import threading
import time
import warnings
from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
from lightning import Callback
from torch import nn

from gan import GanModule, Phase
from gan.files.errors import UserError
from strategies import PhaseStrategy, threads
from strategies.policies import POLICIES
from strategies.policies.dp import Dp
from strategies.policies.replica import Replica
from strategies.processes.launcher import Here
from strategies.threads import Meeting
from tests.ranks.test_contract import Saves
from tests.ranks.test_games import GAMES, pictures
from tests.ranks.test_zero import Lopsided
from tests.support.hard_games import HARD, BatchNorms, Plain
from tests.support.parity import BATCH, BROKEN, EXACT, distance, parts, train, trainer, vectors
from tests.support.saved import read_checkpoint


def fit(game, devices=2, steps=1, **kwargs):
    strategy = PhaseStrategy("dp", check=False)
    made = trainer(strategy, devices, steps, **{"sync_batchnorm": True, **kwargs})
    made.fit(game, parts(steps))
    return made


# ---- sameness ----


@pytest.mark.parametrize("name", ["TwoPhases", "BatchNormPenalty"])
def test_it_is_the_same_twice(name):
    one, two = (train(HARD[name], policy="dp", devices=4) for _ in range(2))
    assert distance(one, two) == 0


class Alone(Dp):
    """A control: the first replica's gradients are taken for everyone's."""

    name = "alone"

    def finish(self, scale):
        with mock.patch.object(self, "replicas", []):
            return super().finish(scale)


class Stale(Dp):
    """A control: the replicas never hear of an update within a step."""

    name = "stale"

    def update(self, norm):
        with mock.patch.object(self, "replicas", []):
            super().update(norm)


@pytest.mark.parametrize(("broken", "name"), [(Alone, "Plain"), (Alone, "Penalty"), (Stale, "TwoPhases")])
def test_the_control_differs(broken, name, hard_alone):
    with mock.patch.dict(POLICIES, dp=broken):
        assert distance(train(HARD[name], policy="dp", devices=2), hard_alone(name)) > BROKEN


def test_the_control_whose_replicas_keep_their_first_weights_differs(hard_alone):
    with mock.patch.object(Replica, "take"), mock.patch.object(Replica, "follow"):
        assert distance(train(Plain, policy="dp", devices=2), hard_alone("Plain")) > BROKEN


def test_the_control_with_batch_norm_of_each_replica_differs(hard_alone):
    found = train(BatchNorms, policy="dp", devices=2, sync_batchnorm=False)
    assert distance(found, hard_alone("BatchNorms")) > BROKEN


# ---- replicas and threads ----


class Seen(Plain):
    seen: ClassVar[list] = []

    def judge(self, batch):
        self.seen.append((threading.get_ident(), id(self), id(self.discriminator[0].weight), len(batch["x"])))
        time.sleep(0.01)
        return super().judge(batch)


def test_each_device_has_a_thread_and_networks_of_its_own():
    Seen.seen.clear()
    game = Seen()
    fit(game, devices=4, steps=3)
    assert len(Seen.seen) == 12
    for one in range(3):
        assert len({each[one] for each in Seen.seen}) == 4
    assert len(set(Seen.seen)) == 4  # the same thread for the same replica
    assert {each[3] for each in Seen.seen} == {BATCH // 4}
    assert (id(game), id(game.discriminator[0].weight)) in {each[1:3] for each in Seen.seen}
    assert "log" not in vars(game)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_it_says_once_what_it_costs():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(PhaseStrategy("dp"), 4, 2).fit(Plain(), parts(2))
    (message,) = [str(each.message) for each in caught if "strategy dp" in str(each.message)]
    for part in ("each of 4 devices", "copied", "cpu alone adds up gradients", "--strategy ddp"):
        assert part in message


def test_half_precision_is_that_of_every_replica_and_of_losses_only():
    kinds = []

    class Typed(Plain):
        def judge(self, batch):
            kinds.append(self.discriminator(batch["x"].float()).dtype)
            return super().judge({"x": batch["x"].float()})

        def fool(self, batch):
            return super().fool({"x": batch["x"].float()})

        def training_step(self, batch):
            super().training_step(batch)
            kinds.append(self.discriminator(batch["x"].float()).dtype)

    fit(Typed(), devices=4, precision="bf16-mixed")
    assert kinds == [torch.bfloat16] * 4 + [torch.float32] * 4


def test_the_default_type_is_that_of_the_losses_and_of_nothing_else():
    kinds = []

    class Typed(Plain):
        def judge(self, batch):
            time.sleep(0.02 * threads.here().number)  # the first is long done when the last begins
            kinds.append(torch.zeros(()).dtype)
            return super().judge(batch)

        def training_step(self, batch):
            super().training_step(batch)
            kinds.append(torch.zeros(()).dtype)

    fit(Typed(), devices=4)
    assert kinds == [torch.float64] * 4 + [torch.float32] * 4
    assert torch.get_default_dtype() == torch.float32


def test_what_losses_log_is_the_mean():
    class Logging(Plain):
        def judge(self, batch):
            self.log("first", batch["x"].mean())
            self.log_dict({"rows": len(batch["x"])}, on_step=True)
            return super().judge(batch)

    found = fit(Logging(), devices=4).callback_metrics
    assert found["first"].item() == pytest.approx(vectors(0)["x"].mean().item(), rel=1e-6)
    assert found["rows"] == BATCH // 4
    assert found["discriminator/real"] > 0


# ---- what games do besides ----


class Stashing(Plain):
    """A fake that one turn keeps for the other, as many games have it, and a count."""

    def __init__(self):
        super().__init__()
        self.turns = 0

    def judge(self, batch):
        self.kept = self.fake(batch["x"]).detach()
        self.turns += 1
        return super().judge(batch)

    def fool(self, batch):
        return super().fool(batch) + self.turns * (self.kept - self.fake(batch["x"])).square().mean()


class Hooked(Plain):
    def __init__(self):
        super().__init__()
        self.features = []
        self.discriminator[1].register_forward_hook(self.collect)

    def collect(self, module, inputs, output):
        self.features.append(output)

    def fool(self, batch):
        self.features.clear()
        loss = super().fool(batch)
        (features,) = self.features
        return loss + features.square().mean()


class Adaptive(Plain):
    """A number that training_step moves by what all the losses saw, as adaptive augmentation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("strength", torch.zeros(()))

    def judge(self, batch):
        self.signs = (batch["x"] > 0.1).to(batch["x"]).mean()
        return super().judge({"x": batch["x"] * (1 + self.strength)})

    def training_step(self, batch):
        super().training_step(batch)
        self.strength.add_(self.all_gather(self.signs).mean())


class Gathering(Plain):
    """Each fake is compared with the mean of all fakes, through which gradient flows."""

    def fool(self, batch):
        fake = self.fake(batch["x"])
        everyone = self.all_gather(fake, sync_grads=True).flatten(0, -2)
        return super().fool(batch) + (fake - everyone.mean(0)).square().mean()


class Lambdas(Plain):
    def configure_phases(self):
        discriminator, half = self.discriminator, 0.5
        judge = partial(self.judge)
        yield Phase(
            "discriminator", lambda batch: {**judge(batch), "half": half * sum(judge(batch).values())}, "discriminator"
        )
        yield Phase("generator", lambda batch: -discriminator(self.fake(batch["x"])).mean(), "generator")


class Clamped(Plain):
    """The first WGAN's: weights are clipped by hand after the step, past autograd's sight."""

    def training_step(self, batch):
        super().training_step(batch)
        for weight in self.discriminator.parameters():
            weight.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("game", [Stashing, Hooked, Adaptive, Gathering, Lambdas, Clamped])
def test_parity_of_games_with_habits(game):
    alone = train(game, policy="single")
    for devices in (2, 4):
        assert distance(train(game, policy="dp", devices=devices), alone) < EXACT


class Curriculum(Callback):
    """Changes the game between steps: a setting in a dictionary, a weight past autograd's sight, a buffer."""

    def on_train_batch_start(self, trainer, game, batch, batch_idx):
        game.settings["weight"] = 1.0 + batch_idx
        game.generator[0].weight.data.mul_(0.9)
        game.strength.add_(0.1)


class Taught(Adaptive):
    def __init__(self):
        super().__init__()
        self.settings = {"weight": 0.0}

    def fool(self, batch):
        return self.settings["weight"] * super().fool(batch)

    def training_step(self, batch):
        GanModule.training_step(self, batch)


def test_what_callbacks_do_to_the_game_reaches_every_replica():
    one, four = (
        train(Taught, policy=policy, devices=devices, callbacks=[Curriculum()])
        for policy, devices in (("single", 1), ("dp", 4))
    )
    assert distance(one, four) < EXACT


# ---- what a device holds ----


def held(replica, policy):
    """Bytes a device holds of a player when its optimizer steps."""
    weights = [replica.of(weight) for weight in policy.weights.values()]
    found = {"weights": sum(w.nbytes for w in weights), "gradients": sum(w.grad.nbytes for w in weights)}
    if replica.number == 0:
        states = policy.optimizer.state.values()
        found["moments"] = sum(t.nbytes for state in states for t in state.values() if t.ndim)
        found["average"] = sum(t.nbytes for t in policy.ema.average)
    return found


class Weighed(Dp):
    """Weighs in the second update, before gradients go."""

    def finish(self, scale):
        replicas = threads.here() and self.replicas
        if self.player.name == "net" and self.optimizer.state:
            first = Replica(None, self.world.device, 0, self.world.device)
            Weighed.found = [held(replica, self) for replica in [first, *replicas]]
        return super().finish(scale)


def test_the_first_device_holds_two_and_a_half_times_as_much_as_the_others():
    game = Lopsided()
    with mock.patch.dict(POLICIES, dp=Weighed):
        trainer(PhaseStrategy("dp", check=False), 4, 2).fit(game, parts(2))
    whole = 8 * sum(p.numel() for p in game.net.parameters())
    first, *others = Weighed.found
    assert first == {"weights": whole, "gradients": whole, "moments": 2 * whole, "average": whole}
    assert others == [{"weights": whole, "gradients": whole}] * 3
    assert sum(first.values()) / sum(others[0].values()) == 2.5


# ---- checkpoints that travel ----


def test_a_checkpoint_holds_the_image_pools_of_all_replicas(tmp_path):
    saved = {}
    for policy, devices in (("single", 1), ("dp", 4)):
        made = trainer(PhaseStrategy(policy), devices, 3, callbacks=[Saves(tmp_path / f"{policy}.ckpt")])
        with mock.patch.dict("os.environ", PL_GLOBAL_SEED="11"):
            made.fit(GAMES["cyclegan"](), parts(3, batches=pictures))
        state = read_checkpoint(tmp_path / f"{policy}.ckpt")["state_dict"]
        saved[policy] = state["past_a._extra_state"]
    assert set(saved["dp"]) == set(saved["single"]) == set(range(BATCH))
    for place, slots in saved["single"].items():
        torch.testing.assert_close(saved["dp"][place], slots, rtol=0, atol=EXACT)


# ---- errors ----


class Broken(BatchNorms):
    """Fails on one device, while the others wait for its batch norm."""

    def judge(self, batch):
        if threads.here().number == 2:
            raise ZeroDivisionError("by chance")
        return super().judge(batch)


def test_an_error_is_raised_with_its_device_and_nobody_hangs():
    with pytest.raises(ZeroDivisionError, match="by chance") as error:
        fit(Broken(), devices=4)
    assert error.value.__notes__[0] == "in replica 2 on cpu, one of 4 of strategy dp"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


class Unlike(BatchNorms):
    """One replica normalises once more than the others."""

    def judge(self, batch):
        if threads.here().number == 1:
            self.generator(torch.zeros(4, 4, dtype=torch.float64))
        return super().judge(batch)


class Named(Plain):
    def judge(self, batch):
        return {f"loss {threads.here().number}": super().fool(batch)}


class Averaging(Plain):
    def judge(self, batch):
        with self.averaged():
            return super().judge(batch)


class Outside(Plain):
    """A loss that calls a network by a global name."""

    def judge(self, batch):
        return OUTSIDE.discriminator(batch["x"]).square().mean()


class Scripted(Plain):
    def __init__(self):
        super().__init__()
        self.discriminator = torch.jit.script(nn.Linear(6, 1))


class Compiled(Plain):
    def __init__(self):
        super().__init__()
        self.discriminator.compile(backend="eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(
    ("game", "message"),
    [
        (Unlike, "under strategy dp the parts of a batch go different ways: replica 0 is at"),
        (Named, "replica 0 is at the losses loss 0; replica 1 is at the losses loss 1; type --strategy ddp"),
        (Averaging, "averaged\\(\\) in a step: under strategy dp the first device alone has averages"),
        (Outside, "replica 1 on cpu calls a Sequential of the first device, .* as a global variable"),
        (Scripted, "makes no replicas of compiled networks \\(RecursiveScriptModule\\); type --strategy ddp"),
        (Compiled, "makes no replicas of compiled networks \\(Sequential\\); type --strategy ddp"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_learned(game, message):
    global OUTSIDE
    OUTSIDE = module = game()
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    with pytest.raises(UserError, match=message):
        fit(module)
    for name, weight in module.named_parameters():
        assert torch.equal(weight.double(), before[name].double())


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="a batch of 16 does not divide among the 3 devices of strategy dp; choose"):
        fit(Plain(), devices=3)


@pytest.mark.parametrize("policy", ["generator=dp,*=ddp", {"discriminator": "zero3", "*": "dp"}])
def test_a_mix_with_others_is_refused(policy):
    with pytest.raises(
        UserError, match=r"dp is for all players together, and some have .*; type --strategy dp, or ddp"
    ):
        PhaseStrategy(policy)
    assert PhaseStrategy({"generator": "dp", "*": "dp"}).threaded


def test_one_of_several_processes_is_refused(monkeypatch):
    with pytest.raises(UserError, match="strategy dp is one process on one machine, and there are 2; type --strategy"):
        trainer(PhaseStrategy("dp"), 2, 1, num_nodes=2)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match="strategy dp is one process on one machine, and there are 4"):
        trainer(PhaseStrategy("dp"), 2, 1)


def test_the_trainer_sees_one_process():
    made = trainer(PhaseStrategy("dp"), 4, 1)
    assert (made.world_size, made.global_rank) == (1, 0)
    assert isinstance(made.strategy.launcher, Here)
    assert made.strategy.root_device == torch.device("cpu")


# ---- the meeting ----


def test_nobody_leaves_a_meeting_before_all_have_come():
    meeting, found = Meeting(3), [None] * 3

    def go(number):
        time.sleep(0.01 * number)
        found[number] = [meeting.all(number, "round", (number, turn)) for turn in range(5)]

    everyone = [threading.Thread(target=go, args=(number,)) for number in range(3)]
    for each in everyone:
        each.start()
    for each in everyone:
        each.join(timeout=20)
    assert found == [[[(k, turn) for k in range(3)] for turn in range(5)]] * 3
