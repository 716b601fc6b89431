"""dp: ddp in ranks that the process which a person has started starts itself. It is for all players or for none."""

from strategies.policies.ddp import Ddp


class Dp(Ddp):
    """A rank of dp trains as a rank of ddp, and communicates the same.

    What differs is around the training: see [Note: ranks of one process] in processes/launcher.py, and `DealtLoader` in
    ../loaders.py, which deals the batches of a plain loader out.
    """

    name = "dp"
