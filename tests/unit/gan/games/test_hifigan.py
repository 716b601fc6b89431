"""HiFi-GAN's networks, losses and training equal the published ones."""

from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gan.games.hifigan import HifiGan
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel
from nets.published.files import published_name, published_state, take_published
from tests.support import families

V3 = dict(rates=(8, 8, 4), up_kernels=(16, 16, 8), kernels=(3, 5, 7), dilations=((1, 2), (2, 6), (3, 12)), twice=False)
RULES = {"v1": {}, "v3": V3}


@pytest.fixture(scope="module")
def figures():
    return families.load("hifigan.pt")


@pytest.fixture
def judges(figures):
    """71 million weights of the recipe, read as published ones."""
    seed, shapes = figures["settings"]["seed"], figures["v1"]["keys"]
    with torch.device("meta"):  # to draw so many takes a second
        made = Judges(ScaleJudges(), PeriodJudges()).double()
    made.to_empty(device=families.DEVICE)
    take_published(made.mpd, families.weights(shapes["mpd"], seed + 2))
    take_published(made.msd, families.weights(shapes["msd"], seed + 3))
    return made


def game_of(figures, version: str, judges: nn.Module) -> HifiGan:
    width, seed = figures["settings"][f"{version}_channels"], figures["settings"]["seed"] + (version == "v3")
    generator = HifiGenerator(width=width, **RULES[version]).double()
    take_published(generator, families.weights(figures[version]["keys"]["generator"], seed))
    return HifiGan(generator, judges, Mel(22050, 80, 1024, 256, top=8000)).double().train()


def batch_of(figures) -> dict[str, torch.Tensor]:
    settings = figures["settings"]
    rng = numpy.random.default_rng(settings["seed"] + 4)
    return {"wave": torch.tensor(rng.uniform(-0.95, 0.95, (settings["batch"], settings["segment"])))}


def sizes(tensors) -> dict[str, list[float]]:
    return families.sizes((published_name(name), value) for name, value in tensors)


def test_spectrograms_equal_the_published_ones(figures):
    mels = {"input_fmax_8000": 8000, "loss_fmax_none": None}
    wanted = figures["mel"]
    for (name, top), basis in zip(mels.items(), ("basis_fmax_8000", "basis_fmax_none"), strict=True):
        mel = Mel(22050, 80, 1024, 256, top)
        runs = [row[a:b] for row, a, b in zip(mel.filters, wanted[basis]["first"], wanted[basis]["end"], strict=True)]
        assert torch.equal(torch.cat(runs), wanted[basis]["values"])
        assert torch.cat(runs).sum().item() == pytest.approx(mel.filters.sum().item(), rel=1e-6)
        assert families.difference(mel.double()(batch_of(figures)["wave"]), wanted[name]) < 1e-9


@pytest.mark.parametrize("version", RULES)
def test_the_generator_equals_the_published_one(figures, version):
    game, batch = game_of(figures, version, nn.Identity()), batch_of(figures)
    wanted = figures[version]
    shapes = {key: list(each.shape) for key, each in published_state(game.generator).items()}
    assert shapes == wanted["keys"]["generator"]
    with torch.no_grad():
        assert families.difference(game.voice(batch).unsqueeze(1), wanted["audio"]) < 1e-9
        for layer in game.generator.modules():
            if parametrize.is_parametrized(layer):
                parametrize.remove_parametrizations(layer, "weight")
        assert families.difference(game.voice(batch), wanted["audio_without_weight_norm"]) < 1e-9
    assert sorted(game.generator.state_dict()) == figures["v1"]["keys_without_weight_norm"] or version == "v3"


def test_the_generators_turn_equals_the_published_one(figures, judges):
    game, batch, wanted = game_of(figures, "v1", judges), batch_of(figures), dict(figures["v1"]["generator"])
    seen: list[Any] = []
    with judges.register_forward_hook(lambda _, __, out: seen.append(out)):
        losses = game.fool(batch)
    _, made = seen
    shapes = {name: [[list(x.shape) for x in judge] for judge in made[name]] for name in made}
    assert shapes == wanted.pop("feature_shapes")
    found = {name.replace("matching", "feature"): loss.item() for name, loss in losses.items()}
    for name, judges in made.items():
        found[f"adversarial_{name}_each"] = [(1 - judge[-1]).square().mean().item() for judge in judges]
    slopes = torch.autograd.grad(sum(losses.values()), list(game.generator.parameters()))
    names = (name for name, _ in game.generator.named_parameters())
    found |= {"total": sum(losses.values()).item(), "grads": sizes(zip(names, slopes, strict=True))}
    assert families.difference(found, wanted) < 1e-9


@pytest.mark.slow  # 71 million weights learn
def test_training_equals_the_published_one(figures, judges):
    """And of the discriminators' first turn also each score and gradient."""
    game, batch, first = game_of(figures, "v3", judges), batch_of(figures), figures["v3"]["discriminators"]
    seen, scores, found = families.recorded(game, "judge", "fool"), {"mpd": [], "msd": []}, {}
    for name, kept in scores.items():
        note = lambda _, __, out, kept=kept: kept.append([judge[-1].detach() for judge in out])  # noqa: E731
        getattr(judges, name).register_forward_hook(note)

    def before_an_update(*_):
        if not found:
            for name in scores:
                gradients = ((key, each.grad) for key, each in getattr(judges, name).named_parameters())
                found[f"{name}_grads"] = sizes(gradients)
            found["msd_buffers_after"] = sizes(judges.msd.named_buffers())

    with register_optimizer_step_pre_hook(before_an_update):
        families.train(game, [batch] * 2)
    with torch.no_grad():
        game.judge(batch)  # what both have learned is seen in the turn that comes
    turns = [{name.replace("matching", "feature"): value for name, value in turn.items()} for turn in seen]
    made = [{f"d_{name}": value for name, value in judged.items()} for judged in turns[::2]]
    for judged, fooled in zip(made, turns[1::2], strict=False):
        judged |= fooled
    wanted = [{name: each[name] for name in one} for one, each in zip(made, figures["v3"]["steps"], strict=False)]
    assert made[0].keys() == figures["v3"]["steps"][0].keys()
    assert families.difference(made[: len(wanted)], wanted) < 1e-7
    for name, kept in scores.items():
        for kind, best, judged in zip(("real", "fake"), (1, 0), kept, strict=False):
            assert families.difference(judged, first["scores"][f"{name}_{kind}"]) < 1e-9
            found[f"{name}_{kind}"] = [(score - best).square().mean().item() for score in judged]
        found[name] = seen[0][name]
    assert families.difference(found, {name: figure for name, figure in first.items() if name != "scores"}) < 1e-9


def test_given_spectrograms_stand_for_those_of_the_waves():
    game = HifiGan(torch.nn.Identity(), torch.nn.Identity(), Mel(8000, 4, 64, 16))
    wave, given = torch.rand(1, 128), torch.rand(1, 4, 8)
    assert game.voice({"wave": wave, "mel": given}) is given
    assert torch.equal(game.voice({"wave": wave}), game.mel(wave))


def test_the_rate_falls_once_an_epoch():
    game = HifiGan(torch.nn.Identity(), torch.nn.Identity(), Mel(8000, 4, 64, 16))
    assert [player.schedule_per for player in game.configure_players()] == ["epoch", "epoch"]
    for player in game.configure_players():
        rule = player.optimizer([torch.zeros(1, requires_grad=True)]).defaults
        assert (rule["lr"], rule["betas"], rule["weight_decay"]) == (2e-4, (0.8, 0.99), 0.01)
