"""SEAN's generator, or its whole step with --whole, against the published way of computing it.

The published way is a plain reference: loops over pictures and labels, whole style maps, nothing recomputed. Tests own
it, so only a checkout has it. All ways have the same weights and see the same pictures. Each has a process of its own,
for a turn that does not count and one that does. On a CPU all keep freed memory: see strategies/processes/heap.py.
  kept        what a forward pass keeps for the backward pass, without the weights
  difference  from the picture of the reference; with --whole between the generator's losses, as a share
With --whole, a step is what a training waits for: the generator's turn and the discriminator's turn, forward,
backward and update, without VGG. Ours trains by Lightning and PhaseStrategy, and the reference keeps no freed memory;
encoder and discriminator are the same in both.
  peak        the most memory that the process had, or that it had of the GPU
  of limit    the time that the step's multiplications take at the machine's own rate, as a share of the time that
              it took; the rate is that of a plain convolution, measured in the same process
"""

import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, product, repeat
from operator import truediv
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn
from torch.optim import Adam

from datasets.drawn.faces import Faces
from gan.app.fitting.pace import peak_memory
from gan.bench.device import Counter, Measuring, convolution_rate, multiplications, now, place, train
from gan.bench.harness import Benchmark, Column, Figures, in_world
from gan.files.errors import UserError
from gan.games.sean import Sean
from nets.blocks import onehot
from nets.discriminator import MultiScaleDiscriminator
from nets.published.sean import generator_file
from nets.sean import SeanGenerator, StyleEncoder
from nets.sean.generator import ACE
from strategies import PhaseStrategy
from strategies.accelerator import best_device
from strategies.processes.heap import keep_freed_memory

REFERENCE = Path(__file__).parents[2] / "tests/support/sean_reference.py"
PUBLISHED, OURS = "the plain reference", "ours"
MASKS = ("faces", "blocks", "random")
MATCHING = 10.0
Sizes = Mapping[str, int]  # "size", "labels", "width", "hidden", "style"


class Way(NamedTuple):
    """What computes, on so many pictures with masks of that kind."""

    masks: str
    batch: int
    way: str


@contextmanager
def keeping(weights: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Gives the bytes of what is kept inside the `with`, by its place in memory; weights do not count."""
    own, kept = {weight.untyped_storage().data_ptr() for weight in weights}, dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def reference() -> SimpleNamespace:
    """The published SEAN as functions of a state dict, with which tests of the networks compare as well."""
    if not REFERENCE.exists():
        raise UserError(f"there is no {REFERENCE}, which only a checkout of this project has")
    return SimpleNamespace(**runpy.run_path(str(REFERENCE)))


class Plain(nn.Module):
    """A network of the published code: a function of a state dict, of which this module has the weights."""

    def __init__(self, function: Callable[..., Any], state: dict[str, Tensor]) -> None:
        super().__init__()
        self.function, self.state, ends = function, state, reference().LEARNED
        for key in (key for key in state if key.rpartition(".")[2] in ends):
            state[key] = weight = nn.Parameter(state[key])
            self.register_parameter(key.replace(".", "-"), weight)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.state, *inputs, training=True)


def generator_of(sizes: Sizes) -> SeanGenerator:
    return SeanGenerator(sizes["labels"], sizes["style"], sizes["width"], sizes["hidden"])


# ---- the generator ----


def masks_of(kind: str, batch: int, size: int, labels: int) -> Tensor:
    """One-hot masks of drawn faces, of blocks of random labels, or of random pixels."""
    if kind == "faces":
        faces = Faces(batch, size, seed=0)
        label = torch.stack([faces.label_map(face).as_subclass(Tensor).long() for face in range(batch)])
    else:
        draw = torch.Generator().manual_seed(0)
        cell = 16 if kind == "blocks" else 1
        label = torch.randint(0, labels, (batch, -(-size // cell), -(-size // cell)), generator=draw)
        label = label.repeat_interleave(cell, 1).repeat_interleave(cell, 2)[:, :size, :size]
    return onehot(label, labels, like=torch.zeros(()))


def painter(way: str, sizes: Sizes, device: torch.device) -> nn.Module:
    """The generator in this way, which paints masks and codes; all ways have the same weights."""
    torch.manual_seed(0)
    generator = generator_of(sizes).to(device)
    if way == PUBLISHED:
        published = generator_file(StyleEncoder(sizes["style"], 1).to(device), generator)
        return Plain(reference().generator, published.content())
    for module in generator.modules():
        if isinstance(module, ACE):
            module.recompute = "nothing recomputed" not in way
    return generator


def paint(cell: Way, sizes: Sizes) -> Figures:
    """Paint, forward and backward, once to count what is kept and once to take the time."""
    device = torch.device(best_device())
    if device.type == "cpu":
        keep_freed_memory()
    form = torch.channels_last if "channels last" in cell.way else torch.contiguous_format
    net = painter(cell.way, sizes, device).to(memory_format=form)
    torch.manual_seed(1)
    planes = masks_of(cell.masks, cell.batch, sizes["size"], sizes["labels"]).to(device, memory_format=form)
    codes = torch.randn(cell.batch, sizes["labels"], sizes["style"], device=device)

    def turn() -> Tensor:
        net.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in cell.way):
            picture = net(planes, codes).float()
        picture.square().mean().backward()
        return picture.detach()

    with keeping(net.parameters()) as kept:
        picture = turn()
    began = now(device)
    turn()
    return {"seconds": now(device) - began, "kept": sum(kept.values()), "result": picture.cpu(), "place": place(device)}


# ---- the whole step ----


class Timed(Sean):
    """SEAN that notes when its turns begin, and what the generator's forward pass keeps and gives."""

    times: list[float]
    kept: int
    loss: Tensor

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.times = [now(self.device)]
        with keeping(self.parameters()) as kept:
            losses = super().fool(batch)
        self.kept, self.loss = sum(kept.values()), sum(losses.values(), torch.zeros(())).detach()
        return losses

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.times.append(now(self.device))
        return super().judge(batch)


def opened(cell: Way, sizes: Sizes) -> tuple[Timed, dict[str, Tensor]]:
    torch.manual_seed(0)
    discriminator = MultiScaleDiscriminator(sizes["labels"] + 3)
    encoder = StyleEncoder(sizes["style"])
    game = Timed(encoder, generator_of(sizes), discriminator, labels=sizes["labels"], matching=MATCHING)
    faces = Faces(cell.batch, sizes["size"], seed=0)
    samples = [faces[number] for number in range(cell.batch)]
    image, label = (torch.stack([sample[key].as_subclass(Tensor) for sample in samples]) for key in ("image", "label"))
    return game, {"image": image.float() / 127.5 - 1, "label": label.long()}


def figures_of(times: Sequence[float], kept: int, loss: Tensor, device: torch.device) -> Figures:
    """By the times at which the counted step began, came to its second turn and ended; kept and loss of the first."""
    first, second = (end - began for began, end in pairwise(times))
    turns = {"seconds": first + second, "generator": first, "discriminator": second}
    return {**turns, "kept": kept, "peak": peak_memory(device), "result": loss.cpu(), "place": place(device)}


def train_ours(cell: Way, sizes: Sizes) -> Figures:
    """Train by Lightning and PhaseStrategy, a step that does not count and one that does."""
    game, batch = opened(cell, sizes)

    def measuring() -> Measuring:
        with Counter(multiplications) as counter:
            yield
        seen = game.kept, game.loss
        yield
        return figures_of([*game.times, now(game.device)], *seen, game.device), counter.total

    figures, flops = train(game, repeat(batch), PhaseStrategy(), measuring(), devices=1, max_steps=2)
    rate = convolution_rate(game.device)
    return {**figures, "GFLOP/s": rate / 1e9, "of limit": flops / rate / figures["seconds"]}


def train_published(cell: Way, sizes: Sizes) -> Figures:
    """Train with the published generator in a plain loop, a step that does not count and one that does."""
    device, plain = torch.device(best_device()), reference()
    game, batch = opened(cell, sizes)
    batch = {name: value.to(device) for name, value in batch.items()}
    mask = game.to(device).mask(batch["label"])
    game.mask = lambda label, edges=None: mask
    game.set_submodule("generator", Plain(plain.generator, generator_file(game.encoder, game.generator).content()))
    generating, judging = (
        [weight for net in nets for weight in net.parameters()]
        for nets in ((game.encoder, game.generator), (game.discriminator,))
    )
    adams = [Adam(weights, lr, betas=(0.0, 0.9)) for weights, lr in ((generating, 1e-4), (judging, 4e-4))]
    seen: list[tuple[int, Tensor]] = []
    for _ in range(2):
        for turn, adam, learns in ((game.fool, adams[0], False), (game.judge, adams[1], True)):
            for weight in judging:
                weight.requires_grad_(learns)
            loss = sum(turn(batch).values(), torch.zeros(()))
            adam.zero_grad()
            loss.backward()
            adam.step()
        seen.append((game.kept, game.loss))
    return figures_of([*game.times, now(device)], *seen[0], device)


def farthest(one: Tensor, other: Tensor | float) -> float:
    return (one - other).abs().max().item()


KEPT = Column("kept MB", ".0f", 2**20, "kept"), Column("share", ".2f", key="kept", against=truediv)
FASTER = Column("times as fast", ".2f", key="seconds", against=lambda own, published: published / own)
PAINTED = Column("seconds", ".2f"), FASTER, *KEPT, Column("difference", ".1e", key="result", against=farthest)
TRAINED = (
    *(Column(title, ".2f") for title in ("seconds", "generator", "discriminator")),
    *(FASTER, *KEPT),
    *(Column("peak MB", ".0f", 2**20, "peak"), Column("share", ".2f", key="peak", against=truediv)),
    *(Column("of limit", ".0%"), Column("difference", ".1e", key="result", against=lambda a, b: farthest(a / b, 1.0))),
)


class SeanBenchmark(Benchmark[Way]):
    name, places = "sean", Way._fields

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--whole", action="store_true", help="the whole step, in place of the generator")
        add("--size", type=PositiveInt, default=256, help="height and width of the pictures")
        add("--batches", type=PositiveInt, nargs="+", default=[1, 4], help="pictures at a time")
        add("--masks", nargs="+", choices=MASKS, help="drawn faces, random blocks of 16 px, random pixels (all)")
        add("--repeats", type=PositiveInt, default=3, help="turns of each that count")
        add("--labels", type=PositiveInt, default=19, help="labels of the random masks")
        add("--width", type=PositiveInt, default=64, help="channels of the last block")
        add("--hidden", type=PositiveInt, default=128, help="channels of the mask branch")
        add("--style", type=PositiveInt, default=512, help="length of a style code")

    def parse(self, argv: Sequence[str]) -> Namespace:
        settings = super().parse(argv)
        if settings.whole and settings.masks not in (None, ["faces"]):
            raise UserError(f"--whole trains on drawn faces; leave out --masks {' '.join(settings.masks)}")
        settings.masks = ["faces"] if settings.whole else settings.masks or MASKS
        if "faces" in settings.masks and settings.labels != Faces.num_labels:
            advice = "leave out --labels" if settings.whole else "type --masks blocks random"
            raise UserError(f"the drawn faces have {Faces.num_labels} labels; {advice}")
        return settings

    @property
    def rounds(self) -> int:
        return self.settings.repeats

    @property
    def columns(self) -> Sequence[Column]:
        return TRAINED if self.settings.whole else PAINTED

    @property
    def sizes(self) -> Sizes:
        return {name: getattr(self.settings, name) for name in ("size", "labels", "width", "hidden", "style")}

    def cells(self) -> Iterator[Way]:
        ways = [PUBLISHED, OURS]
        if not self.settings.whole:
            ways += ["ours, nothing recomputed"]
            ways += ["ours, bf16", "ours, bf16 channels last"] if best_device() == "cuda" else []
        return (Way(*each) for each in product(self.settings.masks, self.settings.batches, ways))

    def base(self, cell: Way) -> Way:
        return cell._replace(way=PUBLISHED)

    def measure(self, cell: Way) -> Figures:
        trained = train_published if cell.way == PUBLISHED else train_ours
        return in_world(trained if self.settings.whole else paint, cell, self.sizes, device=best_device())[0]

    def heading(self) -> str:
        where = f"at {self.settings.size} px, on {self.known('place', best_device())}"
        if self.settings.whole:
            rate = self.known("GFLOP/s", None)  # which ours measures
            return f"SEAN's whole step {where}" + (f"; a plain convolution has {rate:.0f} GFLOP/s" if rate else "")
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in generator_of(self.sizes).parameters())
        return f"generator of {weights / 1e6:.1f} M parameters, forward and backward, {where}"
