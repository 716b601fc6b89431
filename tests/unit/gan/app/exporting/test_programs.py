"""A program of a network takes any number of samples; what a card says. Its lines: tests/system/test_export.py."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.app.exporting import card
from gan.app.exporting.card import needs_of
from gan.files.errors import UserError
from nets.biggan import BigGenerator
from nets.resnet import ResnetGenerator, UNet
from nets.sean import SeanGenerator
from nets.stylegan import StyleGenerator
from nets.vqgan import Attention
from tests.support import opening


def masks(count: int) -> Tensor:
    return F.one_hot(torch.randint(0, 3, (count, 4, 4)), 3).permute(0, 3, 1, 2).float()


def label(count: int) -> Tensor:
    return F.one_hot(torch.arange(count) % 2, 2).float()


class Passes(nn.Module):
    """In the place of a block."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


def sean() -> nn.Module:
    """With two of its four blocks, which are alike: each takes as long to write."""
    network = SeanGenerator(3, 8, 2, 4, 2, gain=1.0)
    network.G_middle_0 = network.G_middle_1 = Passes()
    return network


NETWORKS = {
    "stylegan2": (
        lambda: StyleGenerator(8, latent=8, style=8, mapping=1, base=32, most=4),
        lambda count: {"z": torch.randn(count, 8)},
    ),
    "biggan": (
        lambda: BigGenerator((16, 16), 1, 8, classes=2),
        lambda count: {"z": torch.randn(count, 8), "label": label(count)},
    ),
    "attention": (lambda: Attention(4, 2), lambda count: {"x": torch.randn(count, 4, 2, 2)}),
    "sean": (sean, lambda count: {"onehot": masks(count), "codes": torch.randn(count, 3, 8)}),
}


@pytest.mark.parametrize("name", ["stylegan2", pytest.param("biggan", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_program_of_torch_takes_any_number_of_samples(name, tmp_path):
    """A SEAN is written as one of ONNX, below."""
    make, inputs = NETWORKS[name]
    network = make().eval()
    program = opening.program(card.Call(network, inputs(2)), tmp_path / "network.pt2")
    for count in (1, 2, 5):
        given = inputs(count).values()
        wanted = network(*given)
        assert len(wanted) == count and (program(*given) - wanted).abs().max() < 1e-4 < 1e-2 < wanted.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "sean"])
@torch.no_grad()
def test_an_onnx_program_takes_any_number_of_samples(name, tmp_path):
    from onnxruntime import InferenceSession

    make, inputs = NETWORKS[name]
    network = make().eval()
    path = tmp_path / "network.onnx"
    card.write("onnx", name, card.Call(network, inputs(2)), path)
    session = InferenceSession(path)
    for count in (1, 5):
        given = inputs(count)
        wanted = network(*given.values())
        (got,) = session.run(["output"], {name: value.numpy() for name, value in given.items()})
        assert (torch.from_numpy(got) - wanted).abs().max() < 1e-4 < 1e-2 < wanted.std()


@torch.no_grad()
def test_an_onnx_program_of_a_resnet_takes_other_sizes_and_any_number_of_samples(tmp_path):
    from onnxruntime import InferenceSession

    network = ResnetGenerator(3, 3, 2, blocks=0).eval()  # a block is of layers that the network has too
    card.write("onnx", "to_b", card.Call(network, {"x": torch.randn(2, 3, 12, 8)}), path := tmp_path / "b.onnx")
    for x in (torch.randn(1, 3, 16, 24), torch.randn(5, 3, 16, 24)):
        (got,) = InferenceSession(path).run(None, {"x": x.numpy()})
        assert (torch.from_numpy(got) - network(x)).abs().max() < 1e-4 < 1e-2 < got.std()
    assert not card.takes_sizes(card.Call(network, {"x": torch.randn(2, 3, 10, 8)}))


def test_a_program_leaves_dropout_out(tmp_path):
    """A pix2pix drops out also where it is not trained."""
    torch.manual_seed(0)
    network = UNet(3, 3, 2, depth=3, dropouts=2).eval()
    x = torch.randn(2, 3, 8, 8)
    assert card.write("torch", "generator", card.Call(network, {"x": x}), tmp_path / "generator.pt2") < 1e-6
    one, other = network(x), network(x)
    assert (one - other).abs().max() > card.FAR * one.abs().max()


class Sorted(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z[z > 0] if bool(z.sum() > 0) else z


class Fixed(nn.Module):
    """A network whose forward has a number of samples as a constant."""

    def forward(self, z: Tensor) -> Tensor:
        return z.view(len(z), 2, -1)


@pytest.mark.parametrize(
    ("network", "words"),
    [(Sorted, "cannot write 'mine' so: .*data-dependent"), (Fixed, r"fixes the number of samples; write x.shape\[0\]")],
)
def test_a_network_that_is_no_program_is_refused_with_the_reason(network, words, tmp_path):
    with pytest.raises(UserError, match=words):
        card.write("torch", "mine", card.Call(network(), {"z": torch.randn(2, 8)}), tmp_path / "mine.pt2")


def test_a_card_names_the_module_that_makes_a_network():
    assert "the packages `nets` and `gan`" in needs_of("nets.stylegan.Generator")
    assert "its module `my_gan`, on Python's path" in needs_of("my_gan.Generator")
