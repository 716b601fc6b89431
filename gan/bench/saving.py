"""How long a checkpoint holds up training, when it is written at once and in the background.

Ranks of this machine train one network. Windows of equally many steps follow each other in turns: one without a save,
one that begins with a save at once, one that begins with a save in the background, which has ended when the window
ends. So what else slows down this machine slows down all three, and the fastest round of each counts:
  the call      how long the call that saves takes: in the background, the copy and what the ranks agree on
  all of it     how much longer the window takes than one without a save: also the steps that a thread slows down,
                which writes beside them
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan import GanModule, Phase, Player
from gan.app.run.parser import PlainParser
from gan.bench.harness import ONLY_TRAINING
from strategies import PhaseStrategy
from strategies.processes import world

KINDS = ("without", "at once", "in the background")
WIDTH = 512
LIMIT = 1800.0  # seconds


def main(argv: list[str]) -> int:
    """Train, measure, and print a table."""
    parser = PlainParser(prog="python -m gan.bench saving", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="weights, average and Adam's two moments together")
    parser.add_argument("--strategy", default="zero3", help="policy of the network")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=5, help="of a window")
    parser.add_argument("--rounds", type=int, default=10, help="windows of each kind")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the checkpoints go, and are removed")
    settings = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        request = settings.strategy, settings.ranks, settings.megabytes, settings.steps, settings.rounds, Path(folder)
        found = world.call(measure, *request, ranks=settings.ranks, limit=LIMIT, preload=[__name__])[0]
    step = 1000 * min(found["without"][1]) / settings.steps
    print(f"{settings.megabytes} MB of state, {settings.strategy} on {settings.ranks} ranks, {step:.0f} ms a step")
    print(f"\n{'a save':24}{'the call':>12}{'all of it':>12}")
    rows = {kind: costs(found, kind) for kind in KINDS[1:]}
    for kind, (call, whole) in rows.items():
        print(f"{kind:24}{call:10.3f} s{whole:10.3f} s")
    call, whole = (after / before for before, after in zip(*rows.values(), strict=True))
    print(f"{'of that at once':24}{call:12.2f}{whole:12.2f}")
    return 0


def costs(found: dict[str, tuple[list[float], list[float]]], kind: str) -> tuple[float, float]:
    """The seconds of the call, and of all of it."""
    calls, windows = found[kind]
    return min(calls), min(windows) - min(found["without"][1])


class Wide(GanModule):
    """One network of about so many bytes, with as many for its average and twice as many for Adam."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        layers = max(1, round(megabytes * 1e6 / 4 / 4 / WIDTH**2))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def configure_players(self) -> Iterator[Player]:
        yield Player("net", self.net, partial(Adam, lr=1e-6), ema=0.99)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("net", self.loss, "net")

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()


class Windows(Callback):
    """Saves at the beginning of windows of steps, and takes the time. The first round is not counted."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps, self.folder = steps, folder
        self.calls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.windows: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.began: float | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Between two windows."""
        number, rest = divmod(trainer.global_step, self.steps)
        if rest:
            return
        trainer.strategy.background.wait()
        trainer.strategy.barrier()
        if self.began is not None:
            self.windows[KINDS[(number - 2) % len(KINDS)]].append(time.perf_counter() - self.began)
        kind = KINDS[(number - 1) % len(KINDS)]
        save: dict[str, Callable[[Path], None]] = {
            "without": lambda _: None,
            "at once": trainer.save_checkpoint,
            "in the background": trainer.strategy.save_in_background,
        }
        self.began = time.perf_counter()
        save[kind](self.folder / "last.ckpt")
        self.calls[kind].append(time.perf_counter() - self.began)


def measure(
    strategy: str, ranks: int, megabytes: int, steps: int, rounds: int, folder: Path
) -> dict[str, tuple[list[float], list[float]]]:
    """On each rank: the seconds of the calls and of the windows of each kind."""
    windows = Windows(steps, folder)
    count = steps * (1 + len(KINDS) * (1 + rounds))
    trainer = Trainer(
        strategy=PhaseStrategy(strategy, check=False),
        accelerator="cpu",
        devices=ranks,
        max_steps=count,
        callbacks=[windows],
        use_distributed_sampler=False,
        **ONLY_TRAINING,
    )
    batch = torch.randn(4, WIDTH)
    trainer.fit(Wide(megabytes), DataLoader([batch] * count, batch_size=None))
    return {kind: (windows.calls[kind][1 : rounds + 1], windows.windows[kind][1:]) for kind in KINDS}
