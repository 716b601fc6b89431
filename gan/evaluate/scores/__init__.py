"""Scores: how good the pictures are that a run makes. `gan.evaluate` is the command."""
