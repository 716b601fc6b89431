"""A published file, opened without a run: its network draws from seeds, or translates pictures or sounds."""

from pathlib import Path

from torch import nn

from gan.app.run.reopen import device_of
from gan.app.sampling.drawer import Drawer
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.shown import Shown
from gan.files.errors import UserError
from gan.games.translation import Translation, of_autoencoder, of_generator
from nets.hifigan import HifiGenerator
from nets.mel import Mel
from nets.published.files import State, take_fitting, weights_in
from nets.published.hifigan import CONFIG, networks, read_config
from nets.published.translation import translator
from nets.resnet import ResnetGenerator, UNet
from nets.vqgan import VqAutoencoder

VOICE = "generator/"  # what the names of weights begin with in HiFi-GAN's file


class Translating(nn.Module):
    """A published network in place of a game of pix2pix, CycleGAN, CUT or VQGAN: it has the same translations."""

    def __init__(self, net: UNet | ResnetGenerator | VqAutoencoder) -> None:
        super().__init__()
        self.net = net

    def translations(self) -> dict[str, Translation]:
        if isinstance(self.net, VqAutoencoder):
            return of_autoencoder(self.net)
        return {"as trained": of_generator(self.net)}


class Voice(nn.Module):
    """A published generator of HiFi-GAN in place of its game."""

    def __init__(self, generator: HifiGenerator, mel: Mel) -> None:
        super().__init__()
        self.generator, self.mel = generator, mel


def is_published(path: Path) -> bool:
    """Whether a path names a published file. Runs and their checkpoints are folders; HiFi-GAN's g_02500000 is none."""
    suffix = path.suffix.lower()
    return suffix in (".pkl", ".pth") or (suffix in (".ckpt", "") and path.is_file())


def open_published(path: Path, device: str = "auto") -> Shown:
    """Open a published file by what is in it. No code in the file is run."""
    if path.suffix.lower() == ".pkl":
        return Drawings(Drawer.of_networks(path, device))
    weights = weights_in(path)
    if any(name.startswith(VOICE) for name in weights):
        game: nn.Module = _voice(path, weights)
    elif net := translator(path, weights):
        game = Translating(net)
    else:
        return Drawings(Drawer.of_biggan(path, weights, device))
    return Shown(None, str(path), game.float().eval().requires_grad_(False).to(device_of(device)))


def _voice(path: Path, weights: State) -> Voice:
    config = path.parent / CONFIG
    if not config.is_file():
        raise UserError(f"{path} is HiFi-GAN's, whose {CONFIG} must lie beside it: it says the sizes")
    generator, mel = networks(read_config(config), str(config))
    if wrong := take_fitting(weights, {VOICE: generator}):
        raise UserError(f"{path} and {config} do not fit: the weights are of {wrong}")
    return Voice(generator, mel)
