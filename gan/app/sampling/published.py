"""A published file, opened without a run: its network draws from seeds, or translates pictures or sounds."""

from pathlib import Path
from typing import Any

from torch import nn

from gan.app.run.reopen import device_of
from gan.app.sampling.drawer import Drawer
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.shown import Shown
from gan.files.errors import UserError
from gan.games.translation import of_autoencoder, of_generator
from nets.biggan import BigGenerator
from nets.hifigan import HifiGenerator
from nets.mel import Mel
from nets.published.files import State, take_fitting, weights_in
from nets.published.hifigan import CONFIG, networks, read_config
from nets.published.translation import network_of
from nets.vqgan import VqAutoencoder

VOICE = "generator/"  # what the names of weights begin with in HiFi-GAN's file


def is_published(path: Path) -> bool:
    """Whether a path names a published file. Runs and their checkpoints are folders; HiFi-GAN's g_02500000 is none."""
    suffix = path.suffix.lower()
    return suffix in (".pkl", ".pth") or (suffix in (".ckpt", "") and path.is_file())


def open_published(path: Path, device: str = "auto") -> Shown:
    """Open a published file by what is in it. No code in the file is run."""
    if path.suffix.lower() == ".pkl":
        return Drawings(Drawer.of_networks(path, device))
    weights = weights_in(path)
    game: Any = nn.Module()  # in place of a run's game: it has what the actions ask of one
    if any(name.startswith(VOICE) for name in weights):
        game.generator, game.mel = _voice(path, weights)
    else:
        game.net = net = network_of(path, weights)
        if isinstance(net, BigGenerator):
            return Drawings(Drawer(net.eval().requires_grad_(False).to(device_of(device)), str(path)))
        ways = of_autoencoder(net) if isinstance(net, VqAutoencoder) else {"as trained": of_generator(net)}
        game.translations = lambda: ways
    return Shown(None, str(path), game.float().eval().requires_grad_(False).to(device_of(device)))


def _voice(path: Path, weights: State) -> tuple[HifiGenerator, Mel]:
    config = path.parent / CONFIG
    if not config.is_file():
        raise UserError(f"{path} is HiFi-GAN's, whose {CONFIG} must lie beside it: it says the sizes")
    generator, mel = networks(read_config(config), str(config))
    if wrong := take_fitting(weights, {VOICE: generator}):
        raise UserError(f"{path} and {config} do not fit: the weights are of {wrong}")
    return generator, mel
