"""`python -m gan.bench`."""

from gan.bench.command import main

__all__ = ["main"]
