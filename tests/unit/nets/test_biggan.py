"""BigGAN's networks, losses and trainings equal the published ones."""

import numpy
import pytest
import torch
from torch.optim import Adam

from gan.ema import Ema
from gan.files.errors import UserError
from gan.games.biggan import BigGan
from nets.biggan import BigGanDiscriminator, BigGanGenerator
from tests.support import families


@pytest.fixture(scope="module", params=["shared", "plain"])
def golden(request):
    figures = families.load("biggan.pt")
    return figures[request.param] | {"settings": figures["settings"], "variant": request.param}


def labels(numbers, classes=10):
    return torch.nn.functional.one_hot(torch.as_tensor(numbers), classes).double()


def inputs(golden):
    """The pictures and the noise of the recipe."""
    s = golden["settings"]
    rng = numpy.random.default_rng(s["seed"] + 2)
    x = rng.uniform(-1, 1, (s["batch"], 3, 32, 32))
    return torch.as_tensor(x), torch.as_tensor(rng.standard_normal((s["batch"], golden["dim_z"])))


def afresh(golden, **settings):
    """A game with the recipe's weights, after ten passes of the discriminator; and those passes' scores."""
    s, shared = golden["settings"], golden["variant"] == "shared"
    attention = 16 if shared else 0
    common = dict(classes=s["n_classes"], attention=attention)
    sizes = dict(latent=s["dim_z"], shared=s["shared_dim"] if shared else 0, hierarchical=shared)
    game = BigGan(
        BigGanGenerator(32, s["ch"], **common, **sizes), BigGanDiscriminator(32, s["ch"], **common), **settings
    ).double()
    for number, (name, keys) in enumerate(golden["keys"].items()):
        network = getattr(game, name)
        assert {key: list(value.shape) for key, value in network.state_dict().items()} == {
            key: list(shape) for key, shape in keys.items()
        }
        network.load_state_dict(families.weights(keys, s["seed"] + number))
    x, _ = inputs(golden)
    with torch.no_grad():
        scores = [game.discriminator(x, labels(golden["labels_real"])).tolist() for _ in range(10)]
    return game, scores


def gradients(network):
    return {name: families.size(each.grad) for name, each in network.named_parameters()}


def buffers(network):
    return {name: families.size(each) for name, each in network.named_buffers()}


def batch_of(golden):
    return {"image": inputs(golden)[0], "class": torch.as_tensor(golden["labels_real"])}


def drawn(golden):
    return families.drawing([inputs(golden)[1], torch.as_tensor(golden["labels_fake"])])


def close(found, wanted, bound=1e-9):
    assert found.keys() <= wanted.keys(), found.keys() - wanted.keys()
    apart = families.difference(found, {name: wanted[name] for name in found})
    print("largest difference", apart)
    assert apart < bound


def test_scores_and_pictures(golden):
    game, scores = afresh(golden)
    x, z = inputs(golden)
    sv0 = {name: each.item() for name, each in game.discriminator.named_buffers() if name.endswith("sv0")}
    game.eval()
    with torch.no_grad():
        image = game.generator(z, labels(golden["labels_fake"]))
        found = {
            "warm_up_scores": scores,
            "warm_up_sv0": sv0,
            "eval_image": image,
            "eval_scores_fake": game.discriminator(image, labels(golden["labels_fake"])).tolist(),
            "eval_scores_real": game.discriminator(x, labels(golden["labels_real"])).tolist(),
        }
    close(found, golden)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_discriminators_turn(golden, orthogonal):
    game, _ = afresh(golden, orthogonal=(0, golden["settings"]["ortho"] * orthogonal))
    with drawn(golden):
        losses = game.judge(batch_of(golden))
    sum(losses.values()).backward()
    wanted = golden["d"]
    if orthogonal:
        return close({"grads_with_ortho": gradients(game.discriminator)}, wanted)
    found = {name: losses[name].item() for name in ("real", "fake")} | {"grads": gradients(game.discriminator)}
    found["buffers_after"] = buffers(game.discriminator)
    found["generator_buffers_after"] = buffers(game.generator)
    close(found, wanted)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_generators_turn(golden, orthogonal):
    game, _ = afresh(golden, orthogonal=(golden["settings"]["ortho"] * orthogonal, 0))
    with drawn(golden):
        losses = game.fool(batch_of(golden))
    sum(losses.values()).backward()
    wanted = golden["g"]
    if orthogonal:
        return close({"grads_with_ortho": gradients(game.generator)}, wanted)
    found = {"loss": losses["adversarial"].item(), "grads": gradients(game.generator)}
    found["buffers_after"] = buffers(game.generator)
    close(found, wanted)


def test_the_average(golden):
    decay = golden["settings"]["ema_decay"]
    game, _ = afresh(golden, ema=decay, ema_start=2)
    # As published, iteration 0 has the full decay; a training begins with iteration 1.
    decays = lambda updates: decay if updates == 0 else game.decay(updates - 1)  # noqa: E731
    generator = game.generator
    average = Ema(dict(generator.named_parameters()), decays, network=generator)
    optimizer, losses = Adam(generator.parameters(), lr=2e-4, betas=(0.0, 0.999)), []
    for _ in range(4):
        optimizer.zero_grad()
        with drawn(golden):
            loss = game.fool(batch_of(golden))["adversarial"]
        loss.backward()
        optimizer.step()
        average.update()
        losses.append(loss.item())
    close({"losses": losses}, golden["ema"], 1e-6)
    close(averages(average), golden["ema"]["average"], 1e-6)


def averages(average):
    found = dict(zip(average.parameters, average.average, strict=True)) | average.of_buffers
    return {name: families.size(each) for name, each in found.items()}


def test_three_iterations_with_accumulation(golden):
    s, rng = golden["settings"], numpy.random.default_rng(golden["settings"]["seed"] + 3)
    game, _ = afresh(golden, ema=s["ema_decay"], ema_start=2, orthogonal=(s["ortho"], 0))
    generator, batch, found = game.generator, s["batch"], []
    average = Ema(dict(generator.named_parameters()), game.decay, network=generator)
    g_adam, d_adam = (Adam(each.parameters(), lr=2e-4, betas=(0.0, 0.999)) for each in (generator, game.discriminator))

    def draws():
        z = torch.as_tensor(rng.standard_normal((batch, golden["dim_z"])))
        return families.drawing([z, torch.as_tensor(rng.integers(0, 10, batch))])

    for _ in range(3):
        x = torch.as_tensor(rng.uniform(-1, 1, (4 * batch, 3, 32, 32)))
        classes = torch.as_tensor(rng.integers(0, 10, 4 * batch))
        parts = [{"image": a, "class": b} for a, b in zip(x.split(batch), classes.split(batch), strict=True)]
        for step in range(2):
            d_adam.zero_grad()
            for part in parts[2 * step : 2 * step + 2]:
                with draws():
                    losses = game.judge(part)
                (sum(losses.values()) / 2).backward()
            d_adam.step()
        g_adam.zero_grad()
        for _ in range(2):
            with draws():
                fool = game.fool(parts[0])
            (sum(fool.values()) / 2).backward()
        g_adam.step()
        average.update()
        found.append({"G_loss": fool["adversarial"].item() / 2} | {f"D_loss_{n}": losses[n].item() for n in losses})
    assert families.difference(found, golden["steps"]) < 1e-7
    wanted = golden["steps_average"]
    close({name: each for name, each in averages(average).items() if name in wanted}, wanted, 1e-7)


def test_other_sizes_have_the_published_numbers_of_blocks():
    for size, (up, down) in {64: (4, 5), 128: (5, 6), 256: (6, 7)}.items():
        generator = BigGanGenerator(size, 2, classes=3, latent=21, shared=4, attention=0)
        judge = BigGanDiscriminator(size, 2, classes=3, attention=0)
        image = generator(torch.randn(2, generator.latent), torch.eye(3)[:2])
        assert image.shape == (2, 3, size, size)
        assert judge(image, torch.eye(3)[:2]).shape == (2,)
        assert (len(generator.blocks), len(judge.blocks)) == (up, down)


def test_a_size_that_no_published_network_has():
    with pytest.raises(UserError, match="are for 32, 64, 128, 256 pixels, not for 48"):
        BigGanGenerator(48)
