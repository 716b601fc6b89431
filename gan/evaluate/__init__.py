"""`python -m gan.evaluate`."""

from gan.evaluate.command import main

__all__ = ["main"]
