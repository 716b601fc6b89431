"""`python -m gan.fit`."""

from gan.fit.command import main

__all__ = ["main"]
