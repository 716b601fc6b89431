"""SEAN's generator, forward and backward, in the published way and in ours.

Both have the same weights and see the same masks. They run in turns, and the fastest turn of each counts. In both,
freed memory is kept: see strategies/processes/heap.py.
"""

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from datasets.drawn.faces import Faces
from gan.bench.harness import now, place
from gan.bench.sean import reference
from nets.blocks import onehot
from nets.published import export_generator
from nets.sean.ace import ACE
from nets.sean.encoder import StyleEncoder
from nets.sean.generator import SeanGenerator
from strategies.accelerator import best
from strategies.processes.heap import give_freed_memory_back, keep_freed_memory


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what is kept inside the `with`: shared memory once, weights not at all."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.memory: dict[int, int] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self) -> "Kept":
        super().__enter__()
        return self

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.memory[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())


MASKS = ("faces", "blocks", "random")


@dataclass(frozen=True)
class Way:
    """One way to compute the same picture from mask and codes, with its weights; `dtype` is for autocast."""

    title: str
    paint: Callable[[Tensor, Tensor], Tensor]
    weights: Iterable[Tensor]
    dtype: torch.dtype | None = None


def measure(settings: argparse.Namespace) -> None:
    """Run the published generator in every way on every kind of mask, and print a table."""
    device = torch.device(best())
    if device.type == "cpu":
        keep_freed_memory()

    torch.manual_seed(0)
    generator = SeanGenerator(settings.labels, settings.style, settings.width, settings.hidden).to(device)
    weights = sum(parameter.numel() for parameter in generator.parameters())
    print(
        f"generator of {weights / 1e6:.1f} M parameters, {settings.size} px, forward and backward, on {place(device)}"
    )
    print(
        f"{'':10}{'batch':>6}  {'':24}{'seconds':>9}{'times as fast':>15}{'kept MB':>10}{'share':>8}{'difference':>12}"
    )
    for kind in settings.masks:
        for batch in settings.batches:
            planes = masks(kind, batch, settings.size, settings.labels).to(device)
            codes = torch.randn(batch, settings.labels, settings.style, device=device)
            report(kind, planes, codes, list(ways(generator, settings.style, device)), settings.repeats)
    if device.type == "cpu":
        give_freed_memory_back()


def masks(kind: str, batch: int, size: int, labels: int) -> Tensor:
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


def ways(generator: SeanGenerator, style: int, device: torch.device) -> Iterator[Way]:
    """The plain reference first, then ours; on a GPU also ours in half precision and with channels last."""
    yield published(generator, style)
    weights = list(generator.parameters())
    ours = partial(paint, generator, {name: buffer.clone() for name, buffer in generator.named_buffers()})
    yield Way("ours", ours, weights)
    yield Way("ours, nothing recomputed", partial(ours, recompute=False), weights)
    if device.type == "cuda":
        yield Way("ours, bf16", ours, weights, torch.bfloat16)
        yield Way("ours, bf16 channels last", partial(ours, last=True), weights, torch.bfloat16)


def published(generator: SeanGenerator, style: int) -> Way:
    """The published way, with this generator's weights."""
    state = export_generator(StyleEncoder(style, 1).to(generator.paint.weight.device), generator)
    weights = [tensor for key, tensor in state.items() if key.rpartition(".")[2] in reference.LEARNED]

    def paint(planes: Tensor, codes: Tensor) -> Tensor:
        for tensor in weights:
            tensor.requires_grad_().grad = None
        return reference.generator(state, planes, codes, training=True)

    return Way("the plain reference", paint, weights)


def paint(
    generator: SeanGenerator,
    buffers: dict[str, Tensor],
    planes: Tensor,
    codes: Tensor,
    recompute: bool = True,
    last: bool = False,
) -> Tensor:
    """A picture of our generator, always from the same buffers, which training changes."""
    generator.load_state_dict(buffers, strict=False)
    for module in generator.modules():
        if isinstance(module, ACE):
            module.recompute = recompute
    generator.zero_grad()
    form = torch.channels_last if last else torch.contiguous_format
    return generator.to(memory_format=form)(planes.contiguous(memory_format=form), codes)


def report(kind: str, planes: Tensor, codes: Tensor, compared: list[Way], repeats: int) -> None:
    """Print a line for each way, compared with the first way."""
    seconds = {way.title: float("inf") for way in compared}
    kept, pictures = {}, {}
    for turn in range(repeats + 1):
        for way in compared:
            gc.collect()
            torch.manual_seed(1)
            began = now(planes.device)
            count = Kept(way.weights) if turn == 0 else nullcontext()
            with count, torch.autocast(planes.device.type, way.dtype, enabled=way.dtype is not None):
                picture = way.paint(planes, codes)
            picture.float().square().mean().backward()
            if turn == 0:
                kept[way.title], pictures[way.title] = count.bytes, picture.detach().float()
            else:
                seconds[way.title] = min(seconds[way.title], now(planes.device) - began)
            del picture
    first = compared[0].title
    for way in compared:
        faster, share = seconds[first] / seconds[way.title], kept[way.title] / kept[first]
        apart = (pictures[way.title] - pictures[first]).abs().max().item()
        relation = f"{faster:15.2f}{kept[way.title] / 2**20:10.0f}{share:8.2f}{apart:12.1e}"
        print(f"{kind:10}{len(planes):6}  {way.title:24}{seconds[way.title]:9.2f}{relation}", flush=True)
