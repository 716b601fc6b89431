"""HiFi-GAN's networks, losses and training equal the published ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from gan.games.hifigan import HifiGan
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel
from nets.published.files import published_name, published_state, take_published
from strategies import PhaseStrategy
from tests.support import families
from tests.support.parity import trainer

V3 = dict(rates=(8, 8, 4), up_kernels=(16, 16, 8), kernels=(3, 5, 7), dilations=((1, 2), (2, 6), (3, 12)), twice=False)
RULES = {"v1": {}, "v3": V3}


def one_often(often: str):
    """The judges are the same networks under both versions of the generator. They have 71 million weights."""
    marks = {version: [pytest.mark.slow] * (version != often) for version in RULES}
    return pytest.mark.parametrize("version", [pytest.param(each, marks=marks[each]) for each in RULES])


@pytest.fixture(scope="module")
def figures():
    return families.load("hifigan.pt")


@pytest.fixture(scope="module")
def untrained() -> list[Judges]:
    """Judges that no test has trained: to make their 71 million weights takes seconds."""
    return []


@pytest.fixture
def judges(figures, untrained):
    """With the recipe's weights, read as published ones. What a forward changes is changed back."""
    if not untrained:
        seed, shapes = figures["settings"]["seed"], figures["v1"]["keys"]
        untrained.append(Judges(ScaleJudges(), PeriodJudges()).double())
        take_published(untrained[0].mpd, families.weights(shapes["mpd"], seed + 2))
        take_published(untrained[0].msd, families.weights(shapes["msd"], seed + 3))
    buffers = {name: buffer.clone() for name, buffer in untrained[0].named_buffers()}
    yield untrained[0].train()
    for name, buffer in untrained[0].named_buffers() if untrained else ():
        buffer.copy_(buffers[name])


def game_of(figures, version: str, judges: nn.Module) -> HifiGan:
    """With the recipe's weights, read as published ones."""
    width, seed = figures["settings"][f"{version}_channels"], figures["settings"]["seed"] + (version == "v3")
    generator = HifiGenerator(width=width, **RULES[version]).double()
    take_published(generator, families.weights(figures[version]["keys"]["generator"], seed))
    return HifiGan(generator, judges, Mel(22050, 80, 1024, 256, top=8000)).double().train()


def batch_of(figures) -> dict[str, torch.Tensor]:
    settings = figures["settings"]
    rng = numpy.random.default_rng(settings["seed"] + 4)
    return {"wave": torch.tensor(rng.uniform(-0.95, 0.95, (settings["batch"], settings["segment"])))}


@contextmanager
def outputs(network: nn.Module) -> Iterator[list[Any]]:
    """What the network gives in the `with`, forward by forward."""
    seen = []
    with network.register_forward_hook(lambda _, __, out: seen.append(out)):
        yield seen


def sizes(tensors) -> dict[str, list[float]]:
    return {published_name(name): families.size(value.detach()) for name, value in tensors}


def gradients(network, loss) -> dict[str, list[float]]:
    found = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
    return sizes(zip((name for name, _ in network.named_parameters()), found, strict=True))


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
    assert {key: list(each.shape) for key, each in published_state(game.generator).items()} == wanted["keys"][
        "generator"
    ]
    with torch.no_grad():
        assert families.difference(game.voice(batch).unsqueeze(1), wanted["audio"]) < 1e-9
        for layer in game.generator.modules():
            if parametrize.is_parametrized(layer):
                parametrize.remove_parametrizations(layer, "weight")
        assert families.difference(game.voice(batch), wanted["audio_without_weight_norm"]) < 1e-9
    assert sorted(game.generator.state_dict()) == figures["v1"]["keys_without_weight_norm"] or version == "v3"


@one_often("v3")
def test_the_discriminators_turn_equals_the_published_one(figures, version, judges):
    game, batch = game_of(figures, version, judges), batch_of(figures)
    wanted, both, seen = figures[version]["discriminators"], judges, {}
    with outputs(both.mpd) as seen["mpd"], outputs(both.msd) as seen["msd"]:
        losses = game.judge(batch)
    found = {f"{name}_grads": gradients(getattr(both, name), losses[name]) for name in seen}
    for name, (real, fake) in seen.items():
        for kind, several in (("real", real), ("fake", fake)):
            scores = [judge[-1].detach() for judge in several]
            found[f"{name}_{kind}"] = [((1 - x if kind == "real" else x) ** 2).mean().item() for x in scores]
            assert families.difference(scores, wanted["scores"][f"{name}_{kind}"]) < 1e-9
        found[name] = losses[name].item()
    found["msd_buffers_after"] = sizes(both.msd.named_buffers())
    assert families.difference(found, {name: figure for name, figure in wanted.items() if name != "scores"}) < 1e-9


@one_often("v1")  # the training is of v3
def test_the_generators_turn_equals_the_published_one(figures, version, judges):
    game, batch, wanted = game_of(figures, version, judges), batch_of(figures), dict(figures[version]["generator"])
    with outputs(judges) as seen:
        losses = game.fool(batch)
    _, made = seen
    shapes = {name: [[list(x.shape) for x in judge] for judge in made[name]] for name in made}
    assert shapes == wanted.pop("feature_shapes", shapes)
    found = {name.replace("matching", "feature"): loss.item() for name, loss in losses.items()}
    for name, judges in made.items():
        found[f"adversarial_{name}_each"] = [(1 - judge[-1]).square().mean().item() for judge in judges]
    found |= {"total": sum(losses.values()).item(), "grads": gradients(game.generator, sum(losses.values()))}
    assert families.difference(found, wanted) < 1e-9


def test_in_evaluation_spectral_norm_stands_still(figures, judges):
    wave, msd = batch_of(figures)["wave"], judges.msd
    with torch.no_grad():
        msd(wave), msd(wave)
        scores = [judge[-1] for judge in msd.eval()(wave)]
    for version in RULES:
        assert families.difference(scores, figures[version]["msd_eval_real_after_one_pass"]) < 1e-9


class Noted(HifiGan):
    """Keeps the losses of each turn."""

    def judge(self, batch):
        losses = super().judge(batch)
        self.noted.append({f"d_{name}": loss.item() for name, loss in losses.items()})
        return losses

    def fool(self, batch):
        losses = super().fool(batch)
        self.noted[-1] |= {name.replace("matching", "feature"): loss.item() for name, loss in losses.items()}
        return losses


def test_training_equals_the_published_one(figures, judges, untrained):
    untrained.clear()
    game, wanted = game_of(figures, "v3", judges), figures["v3"]["steps"]
    game.__class__, game.noted = Noted, []
    train = trainer(PhaseStrategy("ddp", check=False), 1, len(wanted))
    train.fit(game, DataLoader([batch_of(figures)] * len(wanted), batch_size=None))
    assert families.difference(game.noted, wanted) < 1e-7


def test_given_spectrograms_stand_for_those_of_the_waves():
    game = HifiGan(torch.nn.Identity(), torch.nn.Identity(), Mel(8000, 4, 64, 16))
    wave, given = torch.rand(1, 128), torch.rand(1, 4, 8)
    assert game.voice({"wave": wave, "mel": given}) is given
    assert torch.equal(game.voice({"wave": wave}), game.mel(wave))


def test_the_rate_falls_once_an_epoch():
    game = HifiGan(torch.nn.Identity(), torch.nn.Identity(), Mel(8000, 4, 64, 16))
    assert [player.schedule_per for player in game.configure_players()] == ["epoch", "epoch"]
