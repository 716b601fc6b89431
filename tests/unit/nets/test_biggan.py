"""BigGAN's networks equal the published ones, for pictures of any size and number of channels."""

import numpy
import pytest
import torch
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.biggan import BigDiscriminator, BigGenerator
from tests.support import families


@pytest.fixture(params=["shared", "plain"])
def golden(request):
    figures = families.load("biggan.pt")
    return figures["settings"] | figures[request.param]


def golden_networks(golden):
    """In float64, with the recipe's weights, after the ten passes that bring the singular vectors near."""
    hierarchical = "shared.weight" in dict(golden["keys"]["generator"])
    attention = (int(golden["attn"]),) if hierarchical else ()
    rule = dict(width=golden["ch"], classes=golden["n_classes"], attention=attention)
    shared = golden["shared_dim"] if hierarchical else 0
    generator = BigGenerator(latent=golden["dim_z"], shared=shared, hierarchical=hierarchical, **rule).double()
    discriminator = BigDiscriminator(**rule).double()
    for seed, net in enumerate((generator, discriminator), golden["seed"]):
        net.load_state_dict(families.weights({key: value.shape for key, value in net.state_dict().items()}, seed))
    given = inputs(golden)
    with torch.no_grad():
        scores = [discriminator(given["real"], given["real_labels"]).tolist() for _ in range(10)]
    return generator, discriminator, scores


def inputs(golden):
    rng, batch, classes = numpy.random.default_rng(golden["seed"] + 2), golden["batch"], golden["n_classes"]
    real = torch.from_numpy(rng.uniform(-1, 1, (batch, 3, 32, 32)))
    z = torch.from_numpy(rng.standard_normal((batch, golden["dim_z"])))
    fake, labels = (torch.from_numpy(rng.integers(0, classes, batch)) for _ in range(2))
    assert (fake.tolist(), labels.tolist()) == (golden["labels_fake"], golden["labels_real"])
    vectors = [F.one_hot(each, classes).double() for each in (fake, labels)]
    return {"real": real, "z": z, "numbers": fake, "fake_labels": vectors[0], "real_labels": vectors[1]}


def test_pictures_and_scores_equal_the_published_ones(golden):
    generator, discriminator, scores = golden_networks(golden)
    for net, keys in ((generator, golden["keys"]["generator"]), (discriminator, golden["keys"]["discriminator"])):
        assert [(key, list(value.shape)) for key, value in net.state_dict().items()] == [*dict(keys).items()]
    given, found = inputs(golden), {"warm_up_scores": scores}
    singular = discriminator.state_dict().items()
    found["warm_up_sv0"] = {key: value.item() for key, value in singular if key.endswith("sv0")}
    before = [{key: value.clone() for key, value in net.state_dict().items()} for net in (generator, discriminator)]
    with torch.no_grad():
        image = generator.eval()(given["z"], given["fake_labels"])
        found["eval_image"] = image
        found["eval_scores_fake"] = discriminator.eval()(image, given["fake_labels"]).tolist()
        found["eval_scores_real"] = discriminator(given["real"], given["real_labels"]).tolist()
    assert families.difference(found, {key: golden[key] for key in found}) < 1e-9
    for net, state in zip((generator, discriminator), before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(("side", "attention"), [(64, 32), (128, 64), (256, 64)])
def test_tables_of_larger_sizes(side, attention, monkeypatch):
    """The published tables: resolutions double from 4 to the side, and attention is at one of them in each network."""
    monkeypatch.setattr(torch.nn.init, "orthogonal_", lambda weight: weight)  # takes longer than the rest
    rule = dict(size=(side, side), width=8, classes=2, attention=[attention])
    with torch.device("meta"):
        generator = BigGenerator(latent=20, shared=8, hierarchical=True, **rule)
        discriminator = BigDiscriminator(**rule)
        image = generator(torch.empty(2, generator.latent), torch.empty(2, 2))
        assert image.shape == (2, 3, side, side) and discriminator(image, torch.empty(2, 2)).shape == (2,)
    widths = {
        64: ([128, 64, 32, 16], [8, 16, 32, 64, 128]),
        128: ([128, 64, 32, 16, 8], [8, 16, 32, 64, 128, 128]),
        256: ([128, 64, 64, 32, 16, 8], [8, 16, 32, 64, 64, 128, 128]),
    }[side]
    for net, wanted in zip((generator, discriminator), widths, strict=True):
        assert [block[0].conv2.out_channels for block in net.blocks] == wanted
    assert [len(block) for block in generator.blocks].index(2) == attention.bit_length() - 4
    assert [len(block) for block in discriminator.blocks].index(2) == (side // attention).bit_length() - 2
    assert not hasattr(discriminator.blocks[-1][0], "conv_sc") or side == 64


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="up to 256 pixels, and pictures have 300; type --size 256"):
        BigDiscriminator(size=(200, 300))
    with pytest.raises(UserError, match="type --shared 128 too"):
        BigGenerator(hierarchical=True)
