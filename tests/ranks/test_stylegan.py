"""What is particular to StyleGAN; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import pickle
import zipfile
from functools import partial

import pytest
import torch

import gan
from gan import noise
from gan.app.sampling import drawings
from gan.files.errors import UserError
from gan.games.stylegan import StyleGan
from nets.ada import Ada
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.stylegan import StyleGenerator
from strategies import PhaseStrategy
from tests.ranks.test_games import pictures, style_networks, stylegan, stylegan_ada
from tests.support.duel import fit
from tests.support.parity import often, parts, trainer
from tests.support.saved import read_checkpoint

played = partial(fit, policy="ddp", batches=pictures, check=True, size=2**20)


def test_penalties_are_turns_of_their_own():
    game, strategy = stylegan(), PhaseStrategy("ddp")
    trainer(strategy, 1, 5).fit(game, parts(5, batches=pictures))
    updates = {
        name: max(int(state["step"]) for state in policy.optimizer.state_dict()["state"].values())
        for name, policy in strategy.policies.items()
    }
    assert updates == {"generator": 5 + 2, "discriminator": 5 + 2}  # path in steps 0 and 3; R1 in steps 0 and 4
    assert [(phase.name, phase.every, phase.second_order) for phase in game.phases] == [
        ("generator", 1, False),
        ("path", 3, True),
        ("discriminator", 1, False),
        ("r1", 4, True),
    ]


def test_means_are_of_the_samples_of_all_ranks(ranks):
    one, found = played(stylegan, world=1, steps=1), ranks(2).run(played, stylegan, world=2, steps=1, check=False)
    for name in ("weight path_mean", "weight generator.mapping.w_avg"):
        assert one[name].count_nonzero()
        for state in found:
            torch.testing.assert_close(state[name], one[name], rtol=1e-12, atol=1e-15)


def test_path_lengths_are_those_of_one_in_two_samples_on_any_number_of_ranks():
    game, three = stylegan().double(), {"image": pictures(0)["image"][:3]}
    words = r"path lengths are of one in 2 samples, .* has 3; .* \(--batch-size 8\), or one rank \(--devices 1\)"
    with pytest.raises(UserError, match=words), noise.at(noise.Place((0,), 3, 3, 6)):
        game.even(three)
    with noise.at(noise.Place((0,), 0, 3, 3)):
        assert game.even(three)["path"].isfinite(), "one device has any number of samples"


def test_frozen_layers_do_not_learn():
    torch.manual_seed(0)
    game = StyleGan(*style_networks(), freeze=2)
    assert pickle.loads(pickle.dumps([*game.configure_players()]))[1].freeze(0) == game.frozen  # for spawned ranks
    before = {name: weight.clone() for name, weight in game.discriminator.named_parameters()}
    trainer(PhaseStrategy("ddp"), 1, 2).fit(game, parts(2, batches=pictures))
    still = {name for name, weight in game.discriminator.named_parameters() if torch.equal(weight, before[name])}
    layers = "b16.fromrgb", "b16.conv0"
    assert still == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


# ---- adaptive augmentation ----


@pytest.mark.parametrize("augmented", often([True, False], [True]))
def test_a_run_goes_on_with_the_augmentation_turned_off_or_on(augmented, tmp_path):
    path = str(tmp_path / "two.ckpt")
    games = [StyleGan(*style_networks(), ada=Ada(pipe="blit") if on else None) for on in (augmented, not augmented)]
    played(lambda: games[0], world=1, steps=2, check=False, save=path)
    if augmented:
        assert "ada.p" in read_checkpoint(path)["state_dict"]
    played(lambda: games[1], world=1, steps=3, check=False, resume=path)
    assert games[1].step == 3


def ada_trained(world: int, steps: int = 4, **more) -> dict:
    game = stylegan_ada()
    game.ada.target, game.ada.images = -0.95, 128  # between the mean signs of these steps
    return played(lambda: game, world=world, steps=steps, **more)


@pytest.fixture(scope="module")
def unbroken() -> dict:
    return ada_trained(1)


@pytest.mark.promise("statistics kept by hand")
def test_the_probability_follows_the_scores_of_all_ranks(ranks, unbroken):
    assert 0 < unbroken["weight ada.p"] < 1
    for found in ranks(2).run(ada_trained, 2, check=False):
        assert found["weight ada.p"] == unbroken["weight ada.p"]


# ---- files that ranks draw together ----


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    net = StyleGenerator(8, latent=5, style=6, mapping=1, base=32, most=4).eval()
    write(tmp_path / "style.pkl", {"G_ema": published(net)})
    return tmp_path / "style.pkl"


def drawn(file, to, count, together):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawings, "TOGETHER", together)
        gan.open(file, "cpu").files(to, count, truncation=0.7)


def contents(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.parametrize("count", [5, 8])  # in the last turn the second rank has none, or as many as the first one
def test_two_ranks_write_the_pictures_of_one(count, file, tmp_path, ranks):
    drawn(file, tmp_path / "one.zip", count, 64)
    ranks(2).run(drawn, file, tmp_path / "two.zip", count, 2)
    found = contents(tmp_path / "two.zip")
    assert list(found) == [f"seed{number:06d}.png" for number in range(count)] and len({*found.values()}) == count
    assert found == contents(tmp_path / "one.zip")
