"""`python -m gan.verify`."""

from gan.verify.command import main

__all__ = ["main"]
