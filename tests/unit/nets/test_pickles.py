"""Published pickles: networks in and out, and files that would do harm."""

import io
import os
import pickle
import pickletools

import pytest
import torch

from gan.files.errors import UserError
from nets.published.from_noise import made, ours, published
from nets.published.pickles import Network, read, write
from nets.r3 import R3Discriminator, R3Generator
from nets.stylegan import StyleDiscriminator, StyleGenerator

STYLE = dict(channels=1, classes=3, base=64, most=8, clamp=256)
R3 = dict(widths=(8, 8, 4), groups=(2, 1, 1), classes=3, channels=1)
NETWORKS = {
    "stylegan2": lambda: (
        StyleGenerator(16, latent=5, style=6, mapping=2, **STYLE),
        StyleDiscriminator(16, skip=False, group=2, **STYLE),
    ),
    "stylegan2 of a width that no power of two divides": lambda: (
        StyleGenerator(16, latent=5, style=6, mapping=2, **STYLE | {"base": 75, "most": 512}),
        StyleDiscriminator(16, group=2, **STYLE | {"base": 75, "most": 512}),
    ),
    "r3gan": lambda: (R3Generator(5, embedding=6, **R3), R3Discriminator(**R3)),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_come_back_as_they_were_written_in_published_names(kind, tmp_path):
    torch.manual_seed(0)
    nets = [net.eval() for net in NETWORKS[kind]()]
    made = dict(zip("GD", map(published, nets), strict=True))
    write(tmp_path / "nets.pkl", made)
    found = read(tmp_path / "nets.pkl")
    codes = pickletools.genops((tmp_path / "nets.pkl").read_bytes())
    assert {argument for code, argument, _ in codes if code.name == "GLOBAL"} <= {
        "torch_utils.persistence _reconstruct_persistent_obj",
        "torch._utils _rebuild_tensor_v2",
        "torch.storage _load_from_bytes",
        "collections OrderedDict",
    }
    z, label = torch.randn(4, 5), torch.eye(3)[[0, 1, 2, 0]]
    image = nets[0](z, label)
    again = [ours(found[name]) for name in "GD"]
    assert torch.equal(again[0](z, label), image)
    assert torch.equal(again[1](image, label), nets[1](image, label))
    assert {name: each.settings for name, each in found.items()} == {name: each.settings for name, each in made.items()}


@pytest.mark.parametrize(("kind", "name"), [("stylegan2", "resample_filter"), ("r3gan", "Kernel")])
def test_a_network_with_another_low_pass_filter_is_refused(kind, name):
    network = published(NETWORKS[kind]()[1])
    (first, *_) = [key for key in network.weights if key.endswith(name)]
    network.weights[first] = network.weights[first].flip(0).contiguous()
    ours(network)
    network.weights[first] = torch.outer(torch.tensor([1.0, 2, 2, 1]), torch.tensor([1.0, 2, 2, 1])) / 36
    with pytest.raises(UserError, match=r"low-pass filter is not \[1, 3, 3, 1\]"):
        ours(network)


# ---- hostile files ----


class Call:
    """Pickled, it is a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def inside(value):
    state = {"_parameters": {"x": value}, "_buffers": {}, "_modules": {}}
    meta = pickle.dumps(dict(type="class", version=6, module_src="", class_name="Generator", state=state), 3)
    head = b"\x80\x03}\x8c\x01Gctorch_utils.persistence\n_reconstruct_persistent_obj\n"
    return head + meta[2:-1] + b"\x85Rs."


def nested(depth):
    node = b"}"
    for _ in range(depth):
        node = b"(\x8c\x0b_parameters}\x8c\x08_buffers}\x8c\x08_modules}\x8c\x01a" + wrapped(node) + b"sd"
    return b"\x80\x03}\x8c\x01G" + wrapped(node) + b"s."


def wrapped(state):
    start = b"ctorch_utils.persistence\n_reconstruct_persistent_obj\n"
    return start + b"(\x8c\x0aclass_name\x8c\x01G\x8c\x05state" + state + b"d\x85R"


def tensor(size, stride=(1,), offset=0):
    bytes_ = io.BytesIO()
    torch.save(torch.zeros(4).storage(), bytes_, _use_new_zipfile_serialization=False)
    storage = Call(torch.storage._load_from_bytes, bytes_.getvalue())
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, {})


HARM = Call(os.system, "touch ran")
HOSTILE = {
    "a call": (pickle.dumps({"G": HARM}, 3), "posix.system"),
    "a call, protocol 5": (pickle.dumps({"G": HARM}, 5), "posix.system"),
    "getattr": (pickle.dumps({"G": Call(getattr, 1, "real")}, 3), "builtins.getattr"),
    "a dotted name": (b"\x80\x04\x8c\x0ctorch._utils\x8c\x03a.b\x93.", "torch._utils.a.b"),
    "torch itself": (pickle.dumps({"G": Call(torch.load, "x")}, 3), "torch.serialization.load"),
    "a call for a tensor": (inside(HARM), "posix.system"),
    "inside the bytes of a tensor": (inside(Call(torch.storage._load_from_bytes, pickle.dumps(HARM))), "."),
    "numpy objects": (pickle.dumps({"G": Call(__import__("numpy").dtype, "O8")}, 3), "numpy values"),
    "another file's tensors": (b"\x80\x03U\x01xQ.", "another file"),
    "a tensor too large": (inside(tensor((5,))), "larger than"),
    "a tensor beyond the end": (inside(tensor((2,), offset=3)), "larger than"),
    "a tensor of one number often": (inside(tensor((10**12,), (0,))), "larger than"),
    "a negative tensor": (inside(tensor((-1,))), "larger than"),
    "no tensor": (inside("text"), "no tensor"),
    "a huge length": (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "."),
    "a huge memo": (b"\x80\x03}r\xff\xff\xff\x7f.", "counts wrongly"),
    "deep lists": (b"\x80\x03" + b"]" * 100_000 + b"a" * 99_999 + b".", "no networks"),
    "deep modules": (nested(100), "no module"),
    "truncated": (inside(tensor((2,)))[:-20], "."),
    "empty": (b"", "."),
    "a list": (pickle.dumps([1], 3), "no networks by name"),
    "no network": (pickle.dumps({"a": 1}, 3), "no network"),
    "a state of another kind": (b"\x80\x03}\x8c\x01G" + wrapped(b"K\x01") + b"s.", "."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_a_sentence_and_nothing_runs(name, here):
    data, words = HOSTILE[name]
    (here / "bad.pkl").write_bytes(data)
    with pytest.raises(UserError) as caught:
        read(here / "bad.pkl")
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert not (here / "ran").exists()


def test_a_network_of_another_kind_is_refused():
    with pytest.raises(UserError, match="neither StyleGAN2's nor R3GAN's"):
        ours(Network("Generator", {}, {"synthesis.input.freqs": torch.zeros(2)}))
    small = published(R3Generator(5, (8, 4)))
    small.weights["Model.AggregationLayer.Layer.weight"] = torch.zeros(3, 5, 1, 1)
    with pytest.raises(UserError, match="AggregationLayer"):
        ours(small)
    many = published(R3Generator(5, (8, 4)))
    many.weights.update({f"Model.other{k}": torch.zeros(1) for k in range(99)})
    with pytest.raises(UserError, match=r"Unexpected key\(s\) in state_dict: \"other0\", .{100,250} \.\.\.$"):
        ours(many)
    with pytest.raises(UserError, match="16x16, and this one 10x12"):  # the middle of a square
        published(R3Generator(5, (8, 8, 4), size=(12, 10)))
    for kept in (None, {}, {"kind": "Generator"}, {"kind": "R3Generator", "widths": 8}):
        with pytest.raises(UserError, match="neither StyleGAN2's nor R3GAN's"):
            made(kept)
