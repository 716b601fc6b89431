"""SEAN's generator and style encoder, and the fused operations that make them fast."""

from nets.sean.encoder import StyleEncoder
from nets.sean.generator import SeanGenerator

__all__ = ["SeanGenerator", "StyleEncoder"]
