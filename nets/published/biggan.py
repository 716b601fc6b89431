"""BigGAN's published generator of a file alone. Sizes follow from the weights."""

from collections.abc import Mapping

from torch import Tensor

from gan.files.errors import UserError
from nets.biggan import GENERATOR, BigGenerator


def generator(weights: Mapping[str, Tensor]) -> BigGenerator:
    """A generator of the sizes of published weights. One class is no class."""
    shapes = {name: value.shape for name, value in weights.items()}
    try:
        stages = 1 + len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        side = next(side for side, widths in GENERATOR.items() if len(widths) == stages)
        chunk, scales = shapes["linear.weight"][1], shapes["blocks.0.0.bn1.gain.weight"]
        classes, shared = shapes.get("shared.weight", (scales[0], 0))
        hierarchical = shared > 0 and scales[1] > shared
        return BigGenerator(
            (side, side),
            shapes["output_layer.0.gain"][0] // GENERATOR[side][-1],
            chunk * (stages if hierarchical else 1),
            classes if classes > 1 else 0,
            shared,
            hierarchical,
            [8 << block for block in range(stages - 1) if f"blocks.{block}.1.theta.weight" in shapes],
            shapes["output_layer.2.weight"][0],
        )
    except (KeyError, StopIteration) as error:
        raise UserError(
            f"these are not the weights of a BigGAN's generator: {str(error) or 'other blocks'}; a published network "
            f"that translates is for gan.fit --from"
        ) from error
