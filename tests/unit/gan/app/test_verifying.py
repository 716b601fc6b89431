"""Two trainings compared, and which are."""

import math

import pytest
import torch

from gan import verify as verify
from gan.app.run.options import run_settings
from gan.app.verifying.records import LIMITS, Moment, Record, Tolerance, compare, digest, distances

EXACTLY = Tolerance(*LIMITS["64"])


def record(**changes):
    """Two steps of two phases. `changes` are numbers by kind_name, or by kind_name_step_phase."""
    kinds = {"loss_hinge": (0.5,), "gradient_w": (2.0,), "gradient_b": (1e-3,), "buffer_mean": (3.0, 4.0)}
    kinds |= {"weight_w": (100.0, 50.0)}
    moments = {}
    for step in (0, 1):
        moments[Moment(step, "", "batch", "0")] = (1, 2, 3, 4)
        for phase in ("judge", "fool"):
            for key, numbers in kinds.items():
                kind, name = key.split("_")
                numbers = changes.get(f"{key}_{step}_{phase}", changes.get(key, numbers))
                moments[Moment(step, phase, kind, name)] = numbers
        moments[Moment(step, "", "average", "w")] = changes.get(f"average_w_{step}", (7.0, 7.0))
    return Record(moments)


def parts(*changes):
    """Ranks, each with its rows of the batch."""
    ranks = [record(**each) for each in changes]
    for number, rank in enumerate(ranks):
        for moment in rank.moments:
            if moment.kind == "batch":
                rank.moments[moment] = (1, 2) if number == 0 else (3, 4)
    return ranks


QUARTER = {"loss_hinge": (0.25,)}
WORSE = {"gradient_w": (2.1,), "gradient_b": (1e-2,), "weight_w": (101.0, 50.0)}


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({}, {}, {}),
        ({"weight_w": (100.0 + 5e-9, 50.0), "gradient_b": (1e-3 + 5e-11,)}, {}, {}),  # rounding, whatever the size
        ({"weight_w": (100.0 + 5e-8, 50.0)}, {}, {(0, "judge", "weight", "w"): "weight 'w' is off by 5e-10"}),
        (QUARTER, {"loss_hinge": (0.75,)}, {}),  # their mean
        (QUARTER, {}, {(0, "judge", "loss", "hinge"): "loss 'hinge' is 0.375, on one device 0.5"}),
        ({"average_w_1": (7.0, 8.0)}, {}, {(1, "", "average", "w"): "average 'w' is off by 1e-01"}),
        # on any rank, where it is first
        ({}, {"weight_w_1_judge": (9.0, 9.0)}, {(1, "judge", "weight", "w"): "weight 'w' is off by 9e-01"}),
        ({}, {"buffer_mean_1_judge": (9.0, 9.0)}, {(1, "judge", "buffer", "mean"): "buffer 'mean' is off by 7e-01"}),
        (
            WORSE,  # of each kind the worst is named, in the order of a phase
            WORSE,
            {
                (0, "judge", "gradient", "w"): "the gradient of 'w' has norm 2.1, on one device 2, and 1 more",
                (0, "judge", "weight", "w"): "weight 'w' is off by 1e-02",
            },
        ),
    ],
)
def test_what_is_no_rounding_is_found(one, other, found):
    assert {each.moment: str(each) for each in compare(record(), parts(one, other), EXACTLY)} == found


def test_ranks_share_the_batch_or_all_have_it():
    one, ranks = record(), parts({}, {})
    moment = Moment(1, "", "batch", "0")
    for rank in ranks:
        rank.moments[moment] = (1, 2, 3, 4)
    assert compare(one, ranks, EXACTLY) == []
    ranks[0].moments[moment], ranks[1].moments[moment] = (1, 3), (2, 4)
    (found,) = compare(one, ranks, EXACTLY)
    assert found.moment == moment and "other samples than one device" in str(found)


def test_a_phase_that_a_rank_plays_alone_is_named():
    for step, phase in ((0, "third"), (1, "fool")):  # one too many, and one too few
        ranks = parts({}, {})
        if phase == "third":
            ranks[1].moments[Moment(step, phase, "loss", "loss")] = (1.0,)
        else:
            ranks[1].moments = {at: each for at, each in ranks[1].moments.items() if at[:2] != (step, phase)}
        (found,) = compare(record(), ranks, EXACTLY)
        assert found.moment[:3] == (step, phase, "phase")


def test_no_gradient_is_one_of_zeros():
    one, ranks = record(), parts({}, {})
    for rank in ranks:
        rank.moments[Moment(0, "judge", "gradient", "unreached")] = (0.0,)
    assert compare(one, ranks, EXACTLY) == []
    ranks[1].moments[Moment(0, "judge", "gradient", "unreached")] = (0.5,)
    (found,) = compare(one, ranks, EXACTLY)
    assert str(found) == "the gradient of 'unreached' has norm 0.5, on one device 0"


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3), torch.arange(6), torch.ones(6, dtype=torch.bool)])
def test_a_digest_sees_a_changed_and_a_moved_element(tensor):
    moved, changed = tensor.flatten()[[1, 0, 2, 3, 4, 5]], tensor.clone().flatten()
    changed[1] = 0
    assert (digest(moved) != digest(tensor)) == (not torch.equal(moved, tensor.flatten()))
    assert digest(changed) != digest(tensor) and digest(tensor) == digest(tensor.clone())
    assert digest(torch.zeros(0)) == (0.0, 0.0)


def test_the_distance_of_the_last_tensors():
    one = {"small": torch.tensor([0.0, 1e-3]), "large": torch.tensor([1000.0, 1.0]), "gone": torch.ones(1)}
    many = {"small": torch.tensor([1e-4, 1e-3]), "large": torch.tensor([1000.0, 2.0]), "new": torch.tensor(math.nan)}
    found = distances(many, one)
    assert found == {"small": pytest.approx(1e-4), "large": pytest.approx(1e-3), "gone": math.inf, "new": math.inf}
    assert distances({"w": torch.tensor([math.nan])}, {"w": torch.ones(1)}) == {"w": math.inf}
    unknown = torch.tensor([math.nan, -math.inf, 4.0])  # as a game keeps it on purpose
    assert distances({"w": unknown}, {"w": unknown}) == {"w": 0.0}
    assert distances({"w": unknown / 2}, {"w": unknown}) == {"w": 0.5}


@pytest.mark.parametrize("first", [0, 30_000])  # a resumed training has its real steps
def test_what_rounding_moves_may_be_off_by_more_and_nothing_else(first):
    one, shaken = Record(), Record()
    for step in (0, 1, 2):
        for name, apart in (("b", 1e-9 * (step == 1)), ("w", 1e-13)):
            one.moments[Moment(first + step, "judge", "weight", name)] = (0.5, 0.5)
            shaken.moments[Moment(first + step, "judge", "weight", name)] = (0.5 + apart, 0.5)
    shaken.distances = {"b": 3e-10, "w": 1e-13}
    tolerance = Tolerance.measured(one, shaken, "64")
    for step, bias in ((0, 1e-10), (1, 1e-7), (2, 1e-7)):
        assert tolerance.at(Moment(first + step, "judge", "weight", "b")) == pytest.approx(bias)
        assert tolerance.at(Moment(first + step, "judge", "weight", "w")) == 1e-10
    for moment in (Moment(first + 3, "judge", "weight", "b"), Moment(first, "judge", "loss", "b")):
        assert tolerance.at(moment) == 1e-10
    assert tolerance.at_end("b") == pytest.approx(3e-8) and tolerance.at_end("w") == 1e-10 and tolerance.above == 1


def test_in_float32_a_small_gradient_counts_by_its_own_size():
    off = parts({"gradient_b": (1.1e-3,)}, {"gradient_b": (1.1e-3,)})
    shaken = record()
    shaken.distances = {}
    tolerance = Tolerance.measured(record(), shaken, "32")
    assert compare(record(gradient_b=(1.1e-3 + 1e-8,)), off, tolerance) == []
    (found,) = compare(record(), off, tolerance)
    assert (found.moment.kind, found.moment.name) == ("gradient", "b")


def test_the_options_of_the_run_are_options(capsys):
    typed = ["--run", "r3gan-faces", "--latent", "7", "--strategy", "ddp", "zero3", "--devices", "2,4", "--steps=3"]
    settings = verify.parse(typed)
    found = (settings.run, settings.strategy, settings.devices, settings.steps)
    assert found == ("r3gan-faces", ["ddp", "zero3"], [2, 4], 3)
    assert run_settings(settings)["latent"] == 7
    assert verify.parse([]).strategy == ["ddp", "zero1", "zero2", "zero3"]
    with pytest.raises(SystemExit):
        verify.parse(["--run", "r3gan-faces", "--help"])
    said = capsys.readouterr().out
    assert "Pairs player=policy in one word are one strategy." in said and "Length of the noise vector." in said
