"""SEAN's generator and style encoder, and the fused operations that make them fast."""

from nets.sean.generator import SeanGenerator, StyleEncoder

__all__ = ["SeanGenerator", "StyleEncoder"]
