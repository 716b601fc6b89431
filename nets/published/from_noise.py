"""StyleGAN2's and R3GAN's published networks as ours, and ours as such. Sizes follow from the weights."""

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Size, nn

from gan.files.errors import UserError, explained
from nets.blocks import taps
from nets.published.files import PublishedFile
from nets.published.pickles import Network, write
from nets.r3 import R3Discriminator, R3Generator
from nets.stylegan import StyleDiscriminator, StyleGenerator

FILTER = "resample_filter", "Kernel"
R3 = "Model."  # what the published names of R3GAN's weights begin with
KINDS = {kind.__name__: kind for kind in (R3Generator, R3Discriminator, StyleGenerator, StyleDiscriminator)}

Shapes = Mapping[str, Size]  # of the weights, by their names in our networks
Rule = dict[str, Any]  # what one of our networks is made with


def ours(network: Network) -> nn.Module:
    """One of our networks with the weights of a published one, in evaluation mode."""
    weights = {name.removeprefix(R3): value for name, value in network.weights.items()}
    if any(name.endswith(FILTER) and not taps().equal(value.float().cpu()) for name, value in weights.items()):
        raise UserError(f"a {network.kind} whose low-pass filter is not [1, 3, 3, 1]; our networks have no other")
    found = made(rule_of(network))
    with _refusing(f"a {network.kind}"):
        found.load_state_dict(weights)
    return found.eval()


def rule_of(network: Network) -> Rule:
    """What one of our networks is made with to have the weights of a published one, and its `kind`: JSON's values."""
    shapes = {name.removeprefix(R3): value.shape for name, value in network.weights.items()}
    drawer = network.kind == "Generator"
    with _refusing(f"a {network.kind}"):
        if any(name.startswith(R3) for name in network.weights):
            return _r3(shapes, drawer) | {"kind": "R3Generator" if drawer else "R3Discriminator"}
        # What no weight tells: the limit of activations, and the groups of the deviation.
        clamp = network.settings.get("synthesis_kwargs", network.settings).get("conv_clamp")
        beside: Rule = {"clamp": None if clamp is None else float(clamp)}
        if not drawer:
            beside["group"] = int(network.settings.get("epilogue_kwargs", {}).get("mbstd_group_size", 4))
        return _style(shapes, drawer) | beside | {"kind": "StyleGenerator" if drawer else "StyleDiscriminator"}


def made(rule: Any) -> nn.Module:
    """One of our networks, without weights, of what `rule_of` says. A person may have changed that."""
    with _refusing("a network"):
        arguments = dict(rule)
        return KINDS[arguments.pop("kind")](**arguments)


def _refusing(what: str) -> AbstractContextManager[None]:
    """Inside the `with`, sizes that make none of our networks are an error of the file."""
    kinds = KeyError, IndexError, TypeError, ValueError, RuntimeError
    return explained(f"{what} that is neither StyleGAN2's nor R3GAN's: {{why}}", *kinds)


def published(net: nn.Module) -> Network:
    """The published network that one of ours is, with the arguments that its class takes."""
    weights = {name: value.detach() for name, value in net.state_dict().items()}
    shapes = {name: value.shape for name, value in weights.items()}
    match net:
        case R3Generator() | R3Discriminator():
            weights = {R3 + name: value for name, value in weights.items()}
            arguments = _r3_arguments(_r3(shapes, isinstance(net, R3Generator)))
        case StyleGenerator():
            arguments = _style_arguments(_style(shapes, True), net.get_submodule("synthesis.b4.conv1").clamp)
        case StyleDiscriminator():
            arguments = _style_arguments(_style(shapes, False), net.b4.conv.clamp)
            arguments["epilogue_kwargs"] = {"mbstd_group_size": net.b4.deviation.group}
        case _:
            raise UserError(f"{type(net).__name__} has no published pickle; StyleGAN2's and R3GAN's networks have")
    side = arguments["img_resolution"]
    height, width = getattr(net, "size", None) or (side, side)
    if (height, width) != (side, side):
        raise UserError(f"published networks draw {side}x{side}, and this one {width}x{height}")
    kind = "Generator" if isinstance(net, R3Generator | StyleGenerator) else "Discriminator"
    return Network(kind, arguments, weights)


def snapshot(generator: nn.Module, discriminator: nn.Module) -> PublishedFile:
    """The file of a training. The generator is there twice, also as its average."""
    drawer = published(generator)
    found = {"G": drawer, "D": published(discriminator), "G_ema": drawer}
    return PublishedFile("network-snapshot.pkl", {}, others=found, save=lambda content, path: write(path, content))


def _r3(shapes: Shapes, drawer: bool) -> Rule:
    found: dict[int, list[Size]] = defaultdict(list)  # by stage: of each block the 1x1 and the grouped 3x3
    for name, shape in sorted(shapes.items()):
        if at := re.fullmatch(r"MainLayers\.(\d+)\.Layers\.\d+\.LinearLayer[12]\.Layer\.weight", name):
            found[int(at[1])].append(shape)
    stages = [found[number] for number in sorted(found, reverse=not drawer)]
    widths, groups = [stage[0][1] for stage in stages], [stage[1][0] // stage[1][1] for stage in stages]
    embedding, classes = shapes.get("EmbeddingLayer.weight", (0, 0))
    rule = dict(widths=widths, groups=groups, blocks=len(stages[0]) // 2, expansion=stages[0][0][0] // widths[0])
    rule |= dict(classes=classes, embedding=embedding)
    if not drawer:
        return rule | {"channels": shapes["ExtractionLayer.Layer.weight"][1]}
    latent = shapes["MainLayers.0.Layers.0.LinearLayer.weight"][1] - embedding
    return rule | {"latent": latent, "channels": shapes["AggregationLayer.Layer.weight"][0]}


def _r3_arguments(rule: Rule) -> dict[str, Any]:
    order = 1 if "latent" in rule else -1
    stages = {"WidthPerStage": rule["widths"][::order], "CardinalityPerStage": rule["groups"][::order]}
    stages |= {"BlocksPerStage": [rule["blocks"]] * len(rule["widths"]), "FP16Stages": []}
    side = 4 * 2 ** (len(rule["widths"]) - 1)
    arguments = stages | {"ExpansionFactor": rule["expansion"], "c_dim": rule["classes"], "img_resolution": side}
    arguments |= {"ConditionEmbeddingDimension": rule["embedding"]} if rule["classes"] else {}
    return arguments | ({"NoiseDimension": rule["latent"]} if "latent" in rule else {})


def _style(shapes: Shapes, drawer: bool) -> Rule:
    prefix = "synthesis." if drawer else ""
    sides = sorted({int(found[1]) for name in shapes if (found := re.match(rf"{prefix}b(\d+)\.", name))})
    if drawer:
        widths = {side: shapes[f"synthesis.b{side}.conv1.weight"][0] for side in sides}
    else:
        widths = {4: shapes["b4.conv.weight"][0]} | {side: shapes[f"b{side}.conv1.weight"][1] for side in sides[1:]}
    _, classes = shapes.get("mapping.embed.weight", (0, 0))
    # The least number that, divided by each side and rounded down, gives its width.
    base = max(side * width for side, width in widths.items())
    rule = dict(size=sides[-1], classes=classes, base=base, most=max(widths.values()))
    if not drawer:
        top = f"b{sides[-1]}"
        return rule | {"channels": shapes[f"{top}.fromrgb.weight"][1], "skip": f"{top}.skip.weight" in shapes}
    (style,) = shapes["mapping.w_avg"]
    latent = shapes["mapping.fc0.weight"][1] - (style if classes else 0)
    mapping = sum(bool(re.fullmatch(r"mapping\.fc\d+\.weight", name)) for name in shapes)
    return rule | dict(channels=shapes["synthesis.b4.torgb.weight"][0], latent=latent, style=style, mapping=mapping)


def _style_arguments(rule: Rule, clamp: object) -> dict[str, Any]:
    about = {"c_dim": rule["classes"], "img_resolution": rule["size"], "img_channels": rule["channels"]}
    layers = {"channel_base": rule["base"], "channel_max": rule["most"], "num_fp16_res": 0, "conv_clamp": clamp}
    if "latent" not in rule:
        return about | layers | {"architecture": "resnet" if rule["skip"] else "orig"}
    about |= {"z_dim": rule["latent"], "w_dim": rule["style"], "mapping_kwargs": {"num_layers": rule["mapping"]}}
    return about | {"synthesis_kwargs": layers}
