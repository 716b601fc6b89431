"""BigGAN's phases and training equal the published ones."""

import numpy
import pytest
import torch

from gan.games.biggan import BigGan
from tests.support import families
from tests.unit.nets.test_biggan import golden_networks, inputs


@pytest.fixture(params=["shared", pytest.param("plain", marks=pytest.mark.slow)])
def golden(request):
    figures = families.load("biggan.pt")
    return figures["settings"] | figures[request.param]


def game_of(golden, **settings):
    generator, discriminator, _ = golden_networks(golden)
    return BigGan(generator, discriminator, **settings)


def play(game, golden, phase):
    given = inputs(golden)
    with families.drawing([given["z"], given["numbers"]]):
        return getattr(game, phase)({"image": given["real"], "class": given["real_labels"].argmax(1)})


def grads(net, losses):
    sum(losses.values()).backward(inputs=[*net.parameters()])
    return families.gradients(net)


def far(found, wanted):
    """As `families.difference`, but gradients that are zero up to rounding, before a norm, are only to be small."""
    zero = [key for key, value in wanted.items() if isinstance(value, list) and value[0] < 1e-12]
    assert all(found[key][0] < 1e-12 for key in zero)
    return families.difference(*({k: v for k, v in each.items() if k not in zero} for each in (found, wanted)))


def test_the_discriminators_phase_equals_the_published_one(golden):
    wanted, seen = golden["d"], []
    game = game_of(golden, ortho=(0, golden["ortho"]))
    game.discriminator.register_forward_hook(lambda _net, _given, scores: seen.append(scores.detach()))
    losses = play(game, golden, "judge")
    fake, real = seen[0].chunk(2)
    assert families.difference(fake.tolist(), wanted["scores_fake"]) < 1e-9
    assert families.difference(real.tolist(), wanted["scores_real"]) < 1e-9
    assert families.difference(losses["hinge"].item(), wanted["real"] + wanted["fake"]) < 1e-9
    found = grads(game.discriminator, losses)
    assert far({key: found[key] for key in wanted["grads"]}, wanted["grads_with_ortho"]) < 1e-9
    for net, key in ((game.discriminator, "buffers_after"), (game.generator, "generator_buffers_after")):
        assert far(families.sizes(net.named_buffers()), wanted[key]) < 1e-9


def test_judging_in_two_passes_equals_the_published_losses(golden):
    losses = play(game_of(golden, split=True), golden, "judge")
    wanted = golden["d_split"]
    assert families.difference(losses["hinge"].item(), wanted["real"] + wanted["fake"]) < 1e-9


@pytest.mark.parametrize("golden", ["shared", "plain"], indirect=True)
def test_the_generators_phase_equals_the_published_one(golden):
    wanted, seen = golden["g"], {}
    game = game_of(golden, ortho=(golden["ortho"], 0))
    for net in (game.generator, game.discriminator):
        net.register_forward_hook(lambda net, _given, made: seen.update({type(net).__name__: made.detach()}))
    losses = play(game, golden, "fool")
    assert families.difference(seen["BigGenerator"], wanted["train_image"]) < 1e-9
    assert families.difference(seen["BigDiscriminator"].tolist(), wanted["scores"]) < 1e-9
    assert families.difference(losses["hinge"].item(), wanted["loss"]) < 1e-9
    found = grads(game.generator, losses)
    assert far({key: found[key] for key in wanted["grads"]}, wanted["grads_with_ortho"]) < 1e-9
    assert far(families.sizes(game.generator.named_buffers()), wanted["buffers_after"]) < 1e-9


def test_training_equals_the_published_one(golden):
    """Three times two steps of D and one of G, of two micro-batches each, by a Trainer."""
    average = dict(ema=golden["ema_decay"], ema_start=2)
    game = game_of(golden, judge_steps=2, micro_batches=2, ortho=(golden["ortho"], 0), **average)
    rng, size, classes = numpy.random.default_rng(golden["seed"] + 3), golden["batch"], golden["n_classes"]

    def noise():
        z = torch.from_numpy(rng.standard_normal((size, golden["dim_z"])))
        return [z, torch.from_numpy(rng.integers(0, classes, size))]

    batches, draws = [], []
    for _ in range(3):
        images = torch.from_numpy(rng.uniform(-1, 1, (4 * size, 3, 32, 32)))
        labels = torch.from_numpy(rng.integers(0, classes, 4 * size))
        for step in range(2):
            # Micro-batch k of two has the rows k, k + 2 and so on; the published ones are halves.
            rows = torch.arange(2 * size).view(2, size).t().flatten() + 2 * size * step
            batches.append({"image": images[rows], "class": labels[rows]})
        draws += [each for _ in range(6) for each in noise()]
    judged, fooled = (families.recorded(game, phase) for phase in ("judge", "fool"))
    with families.drawing(draws):
        families.train(game, batches)
    for turn, wanted in enumerate(golden["steps"]):
        assert abs(fooled[2 * turn + 1]["hinge"] / 2 - wanted["G_loss"]) < 1e-8
        assert abs(judged[4 * turn + 3]["hinge"] - wanted["D_loss_real"] - wanted["D_loss_fake"]) < 1e-8
    with game.averaged():
        found = {key: value.clone() for key, value in game.generator.state_dict().items()}
    wanted = golden["steps_average"]
    assert far(families.sizes((key, found[key]) for key in wanted), wanted) < 1e-8


def test_the_generators_statistics_are_averaged_too():
    players = BigGan(torch.nn.Module(), torch.nn.Module()).configure_players()
    assert [player.ema_buffers for player in players] == ["averaged", "copied"]


def test_fakes_have_any_class_whatever_the_pictures_have():
    torch.manual_seed(0)
    game = BigGan(torch.nn.Module(), torch.nn.Module())
    game.generator.classes = 5
    batch = {"image": torch.zeros(100, 3, 4, 4), "class": torch.zeros(100, dtype=torch.long)}
    labels = game.labels_of_fakes(batch)
    assert (labels.sum(1) == 1).all() and (labels.sum(0) > 5).all()


def test_orthogonal_regularisation_has_the_published_gradient():
    """By definition: 2 ((W W^T) * (1 - I)) W, for weights of two dimensions or more, and not for the shared table."""
    torch.manual_seed(0)
    game = BigGan(torch.nn.Module(), torch.nn.Module())
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(5, 2), torch.nn.Linear(2, 2)).double()
    (loss,) = game.regular(net, 0.25, net[2]).values()
    loss.backward()
    for weight in (net[0].weight, net[1].weight):
        rows = weight.detach().flatten(1)
        wanted = 0.25 * 2 * ((rows @ rows.T) * (1 - torch.eye(len(rows)))) @ rows
        torch.testing.assert_close(weight.grad.flatten(1), wanted)
    assert net[0].bias.grad is None and net[2].weight.grad is None
