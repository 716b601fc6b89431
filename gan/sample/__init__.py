"""`python -m gan.sample`."""

from gan.sample.command import main

__all__ = ["main"]
