"""`python -m gan.export`."""

from gan.export.command import export, main

__all__ = ["export", "main"]
