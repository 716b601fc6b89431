"""StyleGAN2's and R3GAN's published networks as ours, and ours as published ones. Sizes follow from the weights."""

import re
from typing import Any

from torch import nn

from gan.files.errors import UserError
from nets.published.files import PublishedFile
from nets.published.pickles import Network, write
from nets.r3 import R3Discriminator, R3Generator
from nets.stylegan import StyleDiscriminator, StyleGenerator

R3 = "Model."  # what the published names of R3GAN's weights begin with


def ours(network: Network) -> nn.Module:
    """One of our networks with the weights of a published one, in evaluation mode."""
    weights = network.weights
    style = not any(name.startswith(R3) for name in weights)
    try:
        made = (_style if style else _r3)(network)
        found = {name if style else name.removeprefix(R3): value for name, value in weights.items()}
        made.load_state_dict(found)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        first = " ".join(str(error).split())[:200]
        raise UserError(f"a {network.kind} that is neither StyleGAN2's nor R3GAN's: {first}") from error
    return made.eval()


def published(net: nn.Module) -> Network:
    """The published network that one of ours is, with the arguments that its class takes."""
    weights = {name: value.detach() for name, value in net.state_dict().items()}
    settings: dict[str, Any] = {}
    kind = "Generator" if isinstance(net, R3Generator | StyleGenerator) else "Discriminator"
    if isinstance(net, R3Generator | R3Discriminator):
        weights = {R3 + name: value for name, value in weights.items()}
        arguments = _r3_arguments(Network(kind, {}, weights))
    elif isinstance(net, StyleGenerator | StyleDiscriminator):
        first = net.get_submodule("synthesis.b4.conv1" if kind == "Generator" else "b4.conv")
        settings["conv_clamp"] = first.clamp
        if isinstance(net, StyleDiscriminator):
            settings["epilogue_kwargs"] = {"mbstd_group_size": net.b4.deviation.group}
        arguments = _style_arguments(Network(kind, settings, weights))
    else:
        raise UserError(f"{type(net).__name__} has no published pickle; StyleGAN2's and R3GAN's networks have")
    side = arguments["img_resolution"]
    height, width = getattr(net, "size", None) or (side, side)
    if (height, width) != (side, side):
        raise UserError(f"published networks draw {side} x {side}, and this one {height} x {width}")
    return Network(kind, arguments, weights)


def snapshot(generator: nn.Module, discriminator: nn.Module) -> PublishedFile:
    """The file of a training. The generator is there twice, also as its average."""
    drawer = published(generator)
    found = {"G": drawer, "D": published(discriminator), "G_ema": drawer}
    return PublishedFile("network-snapshot.pkl", {}, others=found, save=lambda content, path: write(path, content))


# ---- R3GAN ----


def _r3_arguments(network: Network) -> dict[str, Any]:
    shapes = {name.removeprefix(R3): value.shape for name, value in network.weights.items()}
    widths, groups, blocks = [], [], []
    stages = {found[1] for name in shapes if (found := re.match(r"MainLayers\.(\d+)\.", name))}
    for stage in range(len(stages)):
        prefix = rf"MainLayers\.{stage}\.Layers\.\d+\.LinearLayer2\.Layer\.weight"
        convolutions = [shape for name, shape in shapes.items() if re.fullmatch(prefix, name)]
        first = 1 if network.kind == "Generator" else 0  # the layer that is a block
        widths.append(shapes[f"MainLayers.{stage}.Layers.{first}.LinearLayer3.Layer.weight"][0])
        groups.append(convolutions[0][0] // convolutions[0][1])
        blocks.append(len(convolutions))
    classes, embedding = shapes["EmbeddingLayer.weight"][::-1] if "EmbeddingLayer.weight" in shapes else (0, 0)
    arguments = {
        "WidthPerStage": widths,
        "CardinalityPerStage": groups,
        "BlocksPerStage": blocks,
        "ExpansionFactor": convolutions[0][0] // widths[-1],
        "FP16Stages": [],
        "c_dim": classes,
        "img_resolution": 4 * 2 ** (len(widths) - 1),
    }
    if classes:
        arguments["ConditionEmbeddingDimension"] = embedding
    if network.kind == "Generator":
        arguments["NoiseDimension"] = shapes["MainLayers.0.Layers.0.LinearLayer.weight"][1] - embedding
    return arguments


def _r3(network: Network) -> nn.Module:
    found = _r3_arguments(network)
    step = 1 if network.kind == "Generator" else -1
    rule = dict(
        widths=found["WidthPerStage"][::step],
        blocks=found["BlocksPerStage"][0],
        expansion=found["ExpansionFactor"],
        groups=found["CardinalityPerStage"][::step],
        classes=found["c_dim"],
        embedding=found.get("ConditionEmbeddingDimension", 0),
    )
    if network.kind == "Generator":
        channels = network.weights[f"{R3}AggregationLayer.Layer.weight"].shape[0]
        return R3Generator(found["NoiseDimension"], channels=channels, **rule)
    return R3Discriminator(channels=network.weights[f"{R3}ExtractionLayer.Layer.weight"].shape[1], **rule)


# ---- StyleGAN2 ----


def _style_arguments(network: Network) -> dict[str, Any]:
    """What follows from the weights, and from the file: the limit of activations, and the groups of the deviation."""
    shapes, drawer = {name: value.shape for name, value in network.weights.items()}, network.kind == "Generator"
    prefix = "synthesis." if drawer else ""
    sides = sorted({int(found[1]) for name in shapes if (found := re.match(rf"{prefix}b(\d+)\.", name))})
    widths = {side: shapes[f"{prefix}b{side}.conv1.weight"][1] for side in sides[1:]}
    widths[4] = shapes["synthesis.b4.const" if drawer else "b4.conv.weight"][0]
    if drawer:
        widths = {side: shapes[f"synthesis.b{side}.conv1.weight"][0] for side in sides}
    most = max(widths.values())
    layers = {
        # The least number that, divided by each side and rounded down, gives its width.
        "channel_base": max(side * width for side, width in widths.items()),
        "channel_max": most,
        "num_fp16_res": 0,
        "conv_clamp": network.settings.get("synthesis_kwargs", network.settings).get("conv_clamp"),
    }
    classes = shapes["mapping.embed.weight"][1] if "mapping.embed.weight" in shapes else 0
    about = {"c_dim": classes, "img_resolution": sides[-1]}
    if not drawer:
        group = network.settings.get("epilogue_kwargs", {}).get("mbstd_group_size", 4)
        top = f"b{sides[-1]}"
        about |= {"img_channels": shapes[f"{top}.fromrgb.weight"][1], "epilogue_kwargs": {"mbstd_group_size": group}}
        return {**about, "architecture": "resnet" if f"{top}.skip.weight" in shapes else "orig", **layers}
    style = shapes["mapping.w_avg"][0]
    mapping = {"num_layers": sum(bool(re.fullmatch(r"mapping\.fc\d+\.weight", name)) for name in shapes)}
    about |= {"z_dim": shapes["mapping.fc0.weight"][1] - (style if classes else 0), "w_dim": style}
    about["img_channels"] = shapes["synthesis.b4.torgb.weight"][0]
    return {**about, "mapping_kwargs": mapping, "synthesis_kwargs": layers}


def _style(network: Network) -> nn.Module:
    found = _style_arguments(network)
    layers = found.get("synthesis_kwargs", found)
    rule = dict(channels=found["img_channels"], classes=found["c_dim"], clamp=layers["conv_clamp"])
    rule |= dict(base=layers["channel_base"], most=layers["channel_max"])
    if network.kind != "Generator":
        group, skip = found["epilogue_kwargs"]["mbstd_group_size"], found["architecture"] == "resnet"
        return StyleDiscriminator(found["img_resolution"], skip=skip, group=group, **rule)
    sizes = dict(latent=found["z_dim"], style=found["w_dim"], mapping=found["mapping_kwargs"]["num_layers"])
    return StyleGenerator(found["img_resolution"], **sizes, **rule)
