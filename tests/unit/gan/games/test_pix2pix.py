"""pix2pix equals the published one: pictures, scores, three steps and learning rates. What else is learned by them, and
gradients and statistics: test_pix2pix_options.py."""

import numpy
import pytest
import torch
from torch.optim import SGD

from gan.files.errors import UserError
from gan.games.pix2pix import Pix2pix, epoch_decay, linear_decay
from nets.discriminator import PatchGan
from nets.published.files import read_published
from nets.resnet import UNet
from tests.support import families
from tests.support.families import recorded


@pytest.fixture
def golden():
    return families.load("pix2pix.pt")


@pytest.fixture
def made(golden):
    figures, settings = golden["pix2pix"], golden["settings"]
    networks = {
        "generator": UNet(3, 3, settings["ngf"], settings["num_downs"], dropouts=0).double(),
        "discriminator": PatchGan(6, settings["ndf"]).double(),
    }
    for seed, (name, network) in enumerate(networks.items(), settings["seed"]):
        network.load_state_dict(families.weights(figures["keys"][name], seed))
    rng = numpy.random.default_rng(settings["seed"] + 2)
    shape = (settings["batch"], 3, settings["crop"], settings["crop"])
    batch = {side: torch.from_numpy(rng.uniform(-1, 1, shape)) for side in "ab"}
    return Pix2pix(**networks, decay=linear_decay(100)), batch


def test_pictures_and_scores_of_an_evaluation_equal_the_published_ones(made, golden):
    game, batch = made
    with torch.no_grad():
        image = game.eval().generator(batch["a"])
        found = {"eval_image": image, "eval_scores_fake": game.score(batch["a"], image)}
    assert families.difference(found, {name: golden["pix2pix"][name] for name in found}) < 1e-9


def test_three_steps_equal_the_published_ones(made, golden):
    game, batch = made
    seen = recorded(game, "judge", "fool")
    families.train(game, [batch] * 3)
    turns = zip(seen[::2], seen[1::2], strict=True)
    found = [[fooled["gan"], fooled["pixels"], 2 * judged["gan"]] for judged, fooled in turns]
    steps = golden["pix2pix"]["steps"]
    wanted = [[step["G_GAN"], step["G_L1"], step["D_real"] + step["D_fake"]] for step in steps]
    assert families.difference(found, wanted) < 1e-7


def test_the_rate_of_each_epoch_is_the_published_one(golden):
    batches = 3
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=2e-4)
    schedule, rates = epoch_decay(100, 100, batches)(optimizer), []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        for _ in range(batches):
            optimizer.step()
            schedule.step()
    assert families.difference(rates, golden["lr_per_epoch"]) < 1e-12


# ---- published files ----


def small(**settings):
    torch.manual_seed(0)
    return Pix2pix(UNet(3, 3, 4, 2, **settings), PatchGan(6, 4, 1), linear_decay(4))


def test_a_single_file_of_any_name_and_old_statistics_are_read(tmp_path):
    game = small(norm="instance")
    state = {f"module.{name}": torch.full_like(value, 0.5) for name, value in game.generator.state_dict().items()}
    statistics = {"module.model.model.1.model.2.running_mean": torch.zeros(4)}
    torch.save(state | statistics, tmp_path / "edges2shoes.pth")
    assert read_published(tmp_path / "edges2shoes.pth", game.published()) == ["edges2shoes.pth"]
    assert all((value == 0.5).all() for value in game.generator.state_dict().values())
    (tmp_path / "more").mkdir()
    for epoch in (5, 40):
        torch.save({name: value + epoch for name, value in state.items()}, tmp_path / "more" / f"{epoch}_net_G.pth")
    assert read_published(tmp_path / "more", game.published()) == ["40_net_G.pth"]


def test_what_does_not_fit_is_named(tmp_path):
    game, file = small(), tmp_path / "latest_net_G.pth"
    with pytest.raises(UserError, match="has none of latest_net_G"):
        read_published(tmp_path, game.published())
    size = r"another size: model.model.0.weight is \[8, 3, 4, 4\] there and \[4, 3, 4, 4\]"
    for state, words in (
        (UNet(3, 3, 8, 2).state_dict(), size),
        (UNet(3, 3, 4, 3).state_dict(), r"other networks than are made here: .* is only there"),
        ([1], "holds no published weights"),
    ):
        torch.save(state, file)
        with pytest.raises(UserError, match=words):
            read_published(file, game.published())
    file.write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot be read as published weights"):
        read_published(tmp_path, game.published())
