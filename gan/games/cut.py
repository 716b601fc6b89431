"""CUT and FastCUT, Park et al. 2020: from one kind of pictures to another, without pairs and without a way back."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan import Phase, Player, noise, ranks
from gan.games.from_noise import Compared
from gan.games.translation import Translation, of_generator
from gan.losses import least_squares_discriminator, least_squares_generator
from nets.discriminator import PatchGan, PatchVectors
from nets.published.files import PublishedFile, latest_nets
from nets.resnet import ResnetGenerator

LAYERS = (0, 4, 8, 12, 16)  # of the generator, whose features are compared: the padded picture is the first
TEMPERATURE = 0.07


class Cut(Compared):
    """Learns to translate pictures "a" into the kind of "b". A batch is {"a", "b"}, for validation perhaps "truth_b".

    A patch of the translation must be more like the same patch of its source than like `patches` others, in the
    features of the generator's own first half. With `identity` so must pictures of the kind "b", which are translated
    too. With `flips` half of the batches are translated mirrored, and compared with the features of unmirrored ones.
    The negatives of a patch come from the same picture, or with `all_negatives` from the batch of all ranks.
    """

    def __init__(
        self,
        generator: ResnetGenerator,
        vectors: PatchVectors,
        discriminator: PatchGan,
        decay: Callable[[Optimizer], LRScheduler],
        *,
        rate: float = 2e-4,
        nce: float = 1.0,
        identity: bool = True,
        flips: bool = False,
        patches: int = 256,
        all_negatives: bool = False,
    ) -> None:
        super().__init__()
        self.generator, self.vectors, self.discriminator = generator, vectors, discriminator
        self.decay, self.rate, self.nce = decay, rate, nce
        self.identity, self.flips, self.patches, self.all_negatives = identity, flips, patches, all_negatives

    def configure_players(self) -> Iterator[Player]:
        adam = partial(Adam, lr=self.rate, betas=(0.5, 0.999), fused=True)
        yield Player("generator", self.generator, adam, self.decay)
        yield Player("vectors", self.vectors, adam, self.decay)
        yield Player("discriminator", self.discriminator, adam, self.decay)

    def configure_phases(self) -> Iterator[Phase]:
        """The discriminator's turn comes first, on the fakes that the generator then learns from."""
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, ["generator", "vectors"])

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell fakes from pictures of the kind that is wanted."""
        fake = self.made(batch)[0][: len(batch["a"])].detach()
        return {"gan": least_squares_discriminator(*self.discriminator(torch.cat([batch["b"], fake])).chunk(2))}

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminator, and keep what is in each patch."""
        made, keys, flipped = self.made(batch)
        count = len(batch["a"])
        losses = {"gan": least_squares_generator(self.discriminator(made[:count]))}
        queries = self.generator.encoded(made, LAYERS, paint=False)[1]
        if flipped:
            queries = [each.flip(3) for each in queries]
        names = ("nce", "nce_identity")[: 1 + self.identity]
        for start, name in zip((0, count), names, strict=False):
            rows = slice(start, start + count)
            found = self.contrast([each[rows] for each in queries], [each[rows] for each in keys])
            losses[name] = self.nce * torch.stack(found).mean() / len(names)
        return losses

    def made(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], bool]:
        """What the generator makes, the features of its sources, and whether it was mirrored; once for both turns.

        The published code computes the features of the sources again. They are constants, and the generator has not
        learned since: so these are the same numbers.
        """
        return self.shared("made", self._made, batch)

    def _made(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], bool]:
        source = torch.cat([batch["a"], batch["b"]]) if self.identity else batch["a"]
        if self.flips and noise.rand((), common=True).item() < 0.5:
            with torch.no_grad():
                keys = self.generator.encoded(source, LAYERS, paint=False)[1]
            return self.generator(source.flip(3)), keys, True
        made, keys = self.generator.encoded(source, LAYERS)
        return made, [each.detach() for each in keys], False

    def contrast(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        places = [self.places(each.shape[2] * each.shape[3], each) for each in keys]
        with torch.no_grad():
            known = self.vectors(keys, places)
        return [patch_nce(*each, self.all_negatives) for each in zip(self.vectors(queries, places), known, strict=True)]

    def places(self, pixels: int, like: Tensor) -> Tensor:
        """Random places, no one twice: the same ones for all pictures of the batch of all ranks."""
        draws = noise.rand((pixels,), like=like.new_empty(0, dtype=torch.float32), common=True)
        return draws.topk(min(self.patches, pixels)).indices

    def translate(self, a: Tensor) -> Tensor:
        return self.generator(a)

    def published(self) -> list[PublishedFile]:
        return latest_nets({"G": self.generator, "F": self.vectors, "D": self.discriminator})

    def translations(self) -> dict[str, Translation]:
        return {"AtoB": of_generator(self.generator)}

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Compare translations with their truth, in 0..1; without one, with pictures of that kind."""
        self.score_translations(batch, b=self.translate(batch["a"]))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        columns = {"a": batch["a"], "as b": self.translate(batch["a"]), "truth b": batch.get("truth_b")}
        return {title: each for title, each in columns.items() if each is not None} | {"b": batch["b"]}


def patch_nce(queries: Tensor, keys: Tensor, all_negatives: bool = False) -> Tensor:
    """The cross entropy of finding each query's key among those of its picture: both are [B, P, length].

    With `all_negatives`, among the keys of all pictures of all ranks.
    """
    # Park et al. 2020, equation 3. As published, there is one more negative, whose likeness is -10.
    number = torch.arange(queries.shape[1], device=queries.device)
    if all_negatives:
        every, own = ranks.gather(keys.flatten(0, 1), own=True)
        queries, keys = queries.flatten(0, 1)[None], every[None]
        number = torch.arange(own.start, own.stop, device=queries.device)
    likeness = F.pad(queries @ keys.transpose(1, 2), (0, 1), value=-10.0) / TEMPERATURE
    return F.cross_entropy(likeness.flatten(0, 1), number.repeat(len(likeness)))
