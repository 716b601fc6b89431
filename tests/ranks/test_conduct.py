"""What every policy does beside training: it validates, skips bad updates, and gives networks back as they were.

Written once for all entries of POLICIES, as in test_contract.py.
"""

import os
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies import POLICIES
from tests.ranks.test_contract import POLICY, WORLDS
from tests.support.doubled import doubled
from tests.support.duel import fit, loader
from tests.support.hard_games import Outdated, Plain
from tests.support.journey import Journey
from tests.support.parity import BROKEN, EXACT, Whole, distance, often, on, single, snapshot, trainer, vectors, warned

DIFFERENT = ("single", "ddp", "zero3", "fsdp", "pipeline")  # `make test` tries these, `make matrix` all
EACH = often([each for each in WORLDS if each.values[1] != 4], DIFFERENT)
OFFLOADED = [
    pytest.param(f"{each.values[0]}+offload", each.values[1], marks=[*each.marks, pytest.mark.slow])
    for each in EACH
    if "offload" in POLICIES[each.values[0]].takes
]


# ---- validation, and updates that cannot be made ----


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        self.generator(batch["x"][:, :4])
        self.seen = {name: weight.detach().clone() for name, weight in self.generator.named_parameters()}


class Spoilt(Whole):
    """One number of one sample, of the last rank, is not a number in the fourth step."""

    def __iter__(self):
        for batch in super().__iter__():
            if self.at == 4 and self.rank == self.world - 1:
                batch["x"][-1, 0] = torch.nan
            yield batch


def conducted(policy, world):
    """What the last validation has seen, what was trained, how many updates were skipped, and what is said of it."""
    game, strategy = Validated(), PhaseStrategy(policy, check=False)
    batches = loader(policy, world, kind=Spoilt), DataLoader([vectors(0), vectors(1)], batch_size=None)
    seed = mock.patch.dict(os.environ, PL_GLOBAL_SEED="11")
    with warned("skipped the update") as said, seed, doubled(policy if world > 1 else "single"):
        trainer(strategy, world, 6, val_check_interval=2, num_sanity_val_steps=0).fit(game, *batches)
        trained = snapshot(game, strategy)
    return game.seen, trained, {name: each.skipped for name, each in strategy.policies.items()}, said


@pytest.fixture(scope="module")
def alone():
    """In whose last validation the weights themselves are others than their averages."""
    seen, trained, *_ = conducted("single", 1)
    own = {name.removeprefix("weight generator."): value for name, value in trained.items()}
    assert distance(seen, {name: own[name] for name in seen}) > BROKEN
    updates = {(name.split()[1].split(".")[0], int(each)) for name, each in trained.items() if name.endswith("step")}
    assert updates == {("discriminator", 5), ("generator", 6)}
    return seen, trained


@pytest.mark.promise(
    "updates that are not finite",
    "skipped on all ranks together; a loss that stays so ends the run with a message",
)
@pytest.mark.parametrize(("policy", "world"), [*EACH, *OFFLOADED])
def test_it_validates_averages_and_one_bad_rank_skips_one_update_of_its_player_on_all(policy, world, ranks, alone):
    """And neither disturbs the training."""
    results = on(ranks, world)(conducted, policy, world)
    loss = "step 3, phase 'discriminator': loss 'real' is nan"
    words = [f"{loss}; skipped the update of 'discriminator' on all ranks (1 so far)"] * (policy != "dp")
    for rank, (seen, _, skipped, said) in enumerate(results):
        assert distance(seen, alone[0]) < EXACT
        assert skipped == {"generator": 0, "discriminator": 1} and said == words * (rank == 0)
    assert distance(results[0][1], alone[1]) < EXACT


@pytest.mark.parametrize("policy", often(POLICY, DIFFERENT))
def test_one_process_is_one_device(policy, alone):
    with mock.patch("strategies.sharding.deepspeed_engine.DTYPE", torch.float64):
        found = conducted(policy, 1)
    assert distance(found[0], alone[0]) == distance(found[1], alone[1]) == 0


def outdated(policy, world):
    with pytest.raises(UserError, match=r"call it again\. .* modified by an inplace operation"):
        fit(Outdated, policy, world, 1, size=2**20, batches=single, precision="32-true")


CALLED_BY_METHODS = [each for each in EACH if each.values[0] != "pipeline"]  # test_pipeline.py has games of its own
RECOMPUTED = often([(f"{name}+recompute", 2) for name in ("ddp", "zero1", "zero3")], ["zero3+recompute"])


@pytest.mark.parametrize(("policy", "world"), [*CALLED_BY_METHODS, *RECOMPUTED])
def test_a_graph_older_than_its_weights_is_an_error_as_in_plain_torch(policy, world, ranks):
    on(ranks, world)(outdated, policy, world)


# ---- the author's modules stay what they are ----


def left(policy, world):
    game = Journey().float()
    before = marks(game)
    trainer(PhaseStrategy(policy), world, 1, precision="32-true").fit(game, loader(policy, world, single))
    hooks = [
        *(hook for p in game.parameters() for hook in (p._post_accumulate_grad_hooks or p._backward_hooks or ())),
        *(hook for m in game.modules() for name in vars(m) if name.endswith("_hooks") for hook in vars(m)[name]),
    ]
    return {
        "the same modules": marks(game) == before,
        "frozen": [name for name, p in game.named_parameters() if not p.requires_grad],
        "own memory": all(p.untyped_storage().nbytes() == p.nbytes for p in game.parameters()),
        "no gradients": all(p.grad is None for p in game.parameters()),
        "attributes": [name for p in game.parameters() for name in vars(p)],
        "hooks": hooks,
        "own method": "synthesize" in vars(game.generator),
    }


def marks(game):
    modules = [(id(m), type(m), type(m._parameters), m is game or sorted(vars(m))) for m in game.modules()]
    return modules, list(game.state_dict()), [id(p) for p in game.parameters()]


@pytest.mark.parametrize(("policy", "world"), [*CALLED_BY_METHODS, *RECOMPUTED])
def test_modules_keys_and_flags_are_as_the_author_made_them(policy, world, ranks):
    for found in on(ranks, world)(left, policy, world):
        assert found == {
            "the same modules": True,
            "frozen": ["generator.table"],
            "own memory": True,
            "no gradients": True,
            "attributes": [],
            "hooks": [],
            "own method": False,
        }
