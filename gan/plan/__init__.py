"""`python -m gan.plan`: what a run would need and move on many devices, found out without them."""

from gan.plan.command import main

__all__ = ["main"]
