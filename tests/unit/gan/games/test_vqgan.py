"""VQGAN's networks, losses and training equal the published ones; its published files are read and written."""

from functools import cache
from pathlib import Path

import numpy
import pytest
import torch

from gan.files.errors import UserError
from gan.games.vqgan import VqGan
from nets.discriminator import PatchGan
from nets.norm import ActNorm
from nets.published.files import published_state, read_published, weights_in
from nets.vqgan import VqAutoencoder
from tests.support import families
from tests.support.saved import Malice
from tests.unit.nets.test_lpips import published

OF_JUDGE = "loss.discriminator."


@pytest.fixture(scope="module")
def figures():
    return families.load("vqgan.pt")


@pytest.fixture
def at(monkeypatch):
    return lambda step: monkeypatch.setattr(VqGan, "step", step)


def keys_of(figures, norm):
    keys = dict(figures["legacy"]["keys"])
    if norm == "act":
        keys = {key: keys[key] for key in keys if not key.startswith(OF_JUDGE)} | figures["actnorm"]["keys"]
    return {key: shape for key, shape in keys.items() if "perceptual" not in key}


@cache
def weights_of(norm):
    figures = families.load("vqgan.pt")
    return families.weights(keys_of(figures, norm), figures["settings"]["seed"])


def game_of(figures, norm="batch", learning="learned", perceptual=None, started=True, **rules):
    settings = figures["settings"]
    autoencoder = VqAutoencoder(
        width=settings["ch"],
        mult=settings["ch_mult"],
        blocks=settings["num_res_blocks"],
        attention=(1,),  # at 16 pixels
        features=settings["z_channels"],
        code=settings["embed_dim"],
        codes=settings["n_embed"],
        learning=learning,
    )
    weights = weights_of(norm)
    judge = PatchGan(3, settings["ndf"], norm=norm).double()
    of_judge = {key.replace("main", "model"): value for key, value in weights.items() if key.startswith(OF_JUDGE)}
    missing, _ = judge.load_state_dict({key.removeprefix(OF_JUDGE): of_judge[key] for key in of_judge}, strict=False)
    assert all(name.rpartition(".")[2] in ("to_loc", "to_scale") for name in missing)
    for each in judge.modules():
        if isinstance(each, ActNorm):
            each.initialized.fill_(started)
    autoencoder = autoencoder.double()
    autoencoder.load_state_dict({key: value for key, value in weights.items() if not key.startswith("loss.")})
    if perceptual is not None:
        perceptual = published(perceptual, settings["lpips_seed"])
    return VqGan(autoencoder, judge, perceptual, **{"rate": 1e-4, "start": 10, **rules})


def picture(figures):
    settings = figures["settings"]
    rng = numpy.random.default_rng(settings["seed"] + 1)
    shape = (settings["batch"], 3, settings["resolution"], settings["resolution"])
    return {"image": torch.as_tensor(rng.uniform(-1, 1, shape))}


def gradients(loss, module, prefix=""):
    names, weights = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return {
        f"{prefix}{name.removeprefix('model.')}": [0.0, 0.0] if grad is None else families.size(grad)
        for name, grad in zip(names, grads, strict=True)
    }


def seen(game, turn, batch):
    """What a turn returns, and the mean scores in it."""
    scores = []
    handle = game.discriminator.register_forward_hook(lambda *found: scores.append(found[2].mean().item()))
    losses = turn(batch)
    handle.remove()
    return losses, scores


def autoencoders_turn(game, batch, grads=True):
    """The figures of a turn of the autoencoder. The published code always computes the adaptive weight."""
    losses, scores = seen(game, game.paint, batch)
    difference = losses["pixels"] + losses.get("perceptual", 0)
    with_graph = game.autoencoder(batch["image"])[0]
    nll, score = sum(game.difference(with_graph, batch["image"]).values()), -game.discriminator(with_graph).mean()
    found = {
        "total": sum(losses.values()).item(),
        "quant_loss": losses["codebook"].item(),
        "nll_loss": difference.item(),
        "rec_loss": difference.item(),
        "p_loss": losses.get("perceptual", torch.zeros(())).item(),
        "d_weight": game.adversarial * game.balance(nll, score).item(),
        "disc_factor": float(game.joined),
        "g_loss": -scores[0],
    }
    return found | ({"grads": gradients(sum(losses.values()), game.autoencoder)} if grads else {})


def judges_turn(game, batch):
    losses, scores = seen(game, game.judge, batch)
    (loss,) = losses.values()
    found = {"disc_loss": loss.item(), "logits_real": scores[0], "logits_fake": scores[1]}
    found["grads"] = gradients(loss, game.discriminator, "main.")
    found["buffers_after"] = {
        f"main.{name.removeprefix('model.')}": families.size(value.double())
        for name, value in game.discriminator.named_buffers()
        if name.rpartition(".")[2] not in ("num_batches_tracked", "to_loc", "to_scale")
    }
    return found


@pytest.mark.parametrize("learning", ["learned", "fixed"])
def test_the_autoencoders_turn_equals_the_published_one(figures, at, learning):
    golden, batch = figures[{"learned": "legacy"}.get(learning, learning)], picture(figures)
    game = game_of(figures, learning=learning)
    z = game.autoencoder.encode(batch["image"]).detach().requires_grad_()
    codes, loss, _ = game.autoencoder.quantize(z)
    of_z, of_codes = torch.autograd.grad(loss + codes.square().mean(), (z, game.autoencoder.quantize.embedding.weight))
    found = {"z": families.size(of_z), "embedding": families.size(of_codes)}
    assert families.difference(found, golden["quantiser_grads"]) < 1e-9
    for step, name in ((9, "autoencoder_before"), (10, "autoencoder_after")):
        at(step)
        assert families.difference(autoencoders_turn(game_of(figures, learning=learning), batch), golden[name]) < 1e-9


def test_the_perceptual_loss_equals_the_published_one(figures, at):
    at(10)
    game = game_of(figures, perceptual=families.load("lpips.pt")["vgg"]["keys"])
    assert families.difference(autoencoders_turn(game, picture(figures)), figures["with_lpips"]) < 1e-9


def test_the_discriminators_turn_equals_the_published_one(figures, at):
    golden, batch = figures["batchnorm"], picture(figures)
    judge = game_of(figures).discriminator
    found = {"scores_real_eval": judge.eval()(batch["image"]), "scores_real": judge.train()(batch["image"])}
    for step, name in ((9, "before"), (10, "after"), (10, "vanilla")):
        at(step)
        found[name] = judges_turn(game_of(figures, loss="vanilla" if name == "vanilla" else "hinge"), batch)
    assert families.difference(found, golden) < 1e-9


def test_actnorm_equals_the_published_one(figures, at):
    golden, batch = figures["actnorm"], picture(figures)
    at(10)
    game = game_of(figures, norm="act", started=False)
    found = {
        "scores_real": game_of(figures, norm="act").discriminator(batch["image"]),
        "after": judges_turn(game_of(figures, norm="act"), batch),
        "autoencoder_after": autoencoders_turn(game_of(figures, norm="act"), batch, grads=False),
        "uninitialised_first_step": judges_turn(game, batch),
    }
    found["uninitialised_first_step"]["actnorm_after"] = {
        f"main.{name.removeprefix('model.')}.{key}": families.size(value)
        for name, each in game.discriminator.named_modules()
        if isinstance(each, ActNorm)
        for key, value in each.published_state().items()
        if key != "initialized"
    }
    assert families.difference(found, {key: golden[key] for key in found}) < 1e-9


def test_training_equals_the_published_one(figures):
    """The discriminator joins in the second step, when Adam has counted one of its own."""
    game, batch, found = game_of(figures, start=1), picture(figures), []

    def noted(turn):
        def play(batch):
            losses, scores = seen(game, turn, batch)
            details = [losses[name].item() for name in ("codebook", "pixels") if name in losses]
            found.extend([sum(losses.values()).item(), *scores, *details])
            return losses

        return play

    game.paint, game.judge = noted(game.paint), noted(game.judge)
    families.train(game, [batch] * 3)
    names = ("total", "g_loss", "quant_loss", "nll_loss", "disc_loss", "logits_real", "logits_fake")
    wanted = [step[name] * (-1 if name == "g_loss" else 1) for step in figures["steps"] for name in names]
    assert families.difference(found, wanted) < 1e-7


# ---- published files ----


class Callback:
    """What old checkpoints of Lightning hold beside the weights."""


def small(seed=0, norm="batch", learning="learned"):
    torch.manual_seed(seed)
    net = VqAutoencoder(1, 32, (1, 2), 1, (1,), 6, 5, 7, learning=learning)
    return VqGan(net, PatchGan(1, 4, 2, norm), rate=1e-4, start=10)


def state_of(game):
    (file,) = game.published()
    networks = file.networks.items()
    return {f"{start}{name}": value for start, each in networks for name, value in published_state(each).items()}


@pytest.mark.parametrize(("norm", "learning"), [("batch", "learned"), ("act", "ema")])
def test_a_file_gives_the_weights_back(tmp_path, norm, learning):
    one, other = (small(seed, norm, learning) for seed in (0, 1))
    picture = torch.rand(2, 1, 16, 16)
    one.discriminator(picture), one.autoencoder(picture)  # codes and ActNorm begin with these
    one.published()[0].write(tmp_path / "last.ckpt")
    assert read_published(tmp_path, other.published()) == ["last.ckpt"]
    for each in (one, other):
        each.eval()
    torch.testing.assert_close(other.autoencoder(picture)[0], one.autoencoder(picture)[0])
    torch.testing.assert_close(other.discriminator(picture), one.discriminator(picture))


@pytest.mark.parametrize("norm", ["batch", "act"])
def test_the_names_are_the_published_ones(figures, norm):
    found = {key: list(value.shape) for key, value in state_of(game_of(figures, norm)).items()}
    assert found == {key: list(shape) for key, shape in keys_of(figures, norm).items()}


def test_no_code_in_a_file_is_run_and_what_is_no_weight_is_left_out(here):
    made = small()
    state = state_of(made) | {"loss.perceptual_loss.lin0.model.1.weight": torch.ones(1)}
    torch.save({"state_dict": state, "callbacks": {Callback: 1, "one": Callback()}, "epoch": 3}, "any.ckpt")
    assert read_published("any.ckpt", made.published()) == ["any.ckpt"]
    torch.save({"state_dict": state, "callbacks": Malice(Path("ran"))}, "last.ckpt")
    with pytest.raises(UserError, match="cannot be read"):
        weights_in(Path("last.ckpt"))
    assert not Path("ran").exists()


def test_a_file_without_a_discriminator_gives_the_autoencoder(tmp_path):
    one, other = small(), small(1)
    torch.save({"state_dict": published_state(one.autoencoder)}, tmp_path / "last.ckpt")
    before = {name: value.clone() for name, value in other.discriminator.state_dict().items()}
    read_published(tmp_path, other.published())
    exactly = dict(rtol=0, atol=0)
    torch.testing.assert_close(other.autoencoder.state_dict(), one.autoencoder.state_dict(), **exactly)
    torch.testing.assert_close(dict(other.discriminator.state_dict()), before, **exactly)
