"""Which scores there are, which of them can be computed for a run, and how figures come from batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn

from gan.app.scoring import features, pixels
from gan.app.scoring.features import SEED, Extractor, Known, distances, inception_score, kernel_subsets
from gan.app.scoring.names import DRAWN, INCEPTION, MAPS, NEEDS, SEVERAL, SOUNDS, TRUTH
from gan.app.scoring.outputs import Heard, Made
from gan.files.errors import UserError
from nets.vgg import SMALLEST, Lpips

Rows = dict[str, Tensor]

NO_FLOAT64 = ["mps"]  # devices without the numbers in which pixels are compared; a CPU compares them

# The figures that are means of one number a picture.
MEANS = ("ssim", "ssim_range_2", "rmse", "psnr", "lpips", "region_error", "region_spill", "mel_error", "spectral_error")


@dataclass
class Scorer:
    """The scores of an evaluation, with the networks they need; `left_out` says why other scores are missing."""

    scores: tuple[str, ...]
    labels: int = 0
    extractor: Extractor | None = None
    lpips: Lpips | None = None
    segmenter: nn.Module | None = None
    segmenter_file: Path | None = None
    ignore: tuple[int, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> "Scorer":
        for network in (None if self.extractor is None else self.extractor.network, self.lpips, self.segmenter):
            if network is not None:
                network.to(device)
        return self

    def rows(self, made: Made | Heard, truth: bool = True) -> Rows:
        """Numbers for each sample of one batch; with `truth` also of the true pictures by themselves."""
        if isinstance(made, Heard):
            errors = {"mel": (made.mels - made.truth).abs().flatten(1).mean(1), "spectral": made.spectral}
            return {f"{name}_error": rows.cpu().double() for name, rows in errors.items() if name in self.scores}
        rows: Rows = {}
        seen = made
        if made.pictures.device.type in NO_FLOAT64:
            seen = Made(**move_data_to_device(vars(made), torch.device("cpu")))
        if seen.paired:
            if "ssim" in self.scores:
                rows |= pixels.ssim(seen.pictures, seen.truth)
            if "rmse" in self.scores:
                rows["rmse"] = pixels.rmse(seen.pictures, seen.truth)
            if "psnr" in self.scores:
                rows["psnr"] = pixels.psnr(seen.pictures, seen.truth)
            if self.lpips is not None:
                rows["lpips"] = self.lpips(made.pictures, made.truth).flatten().cpu().double()
        if seen.known is not None and "transfer" in self.scores:
            rows["transfer"] = pixels.masked_error(seen.pictures, seen.truth, seen.known)
        if seen.region is not None and "transfer" in self.scores:
            rows["region_error"] = pixels.region_error(seen.pictures, seen.truth, seen.region)
            if seen.before is not None:
                rows["region_spill"] = pixels.region_spill(seen.pictures, seen.before, seen.region)
        if self.extractor is not None:
            rows["features"] = self.extractor.network(features.as_bytes(made.pictures))
            if truth:
                rows["features of truth"] = self.extractor.network(features.as_bytes(made.truth))
        if made.numbers is not None:
            rows["number"], rows["number of truth"] = made.numbers
        return rows

    def sums(self, made: Made | Heard) -> Rows:
        """What one batch adds to sums of whole numbers over all pictures."""
        if self.segmenter is None or isinstance(made, Heard) or made.label is None:
            return {}
        pictures = {"confusion": made.pictures, **({"confusion of truth": made.truth} if made.paired else {})}
        return {
            name: pixels.confusion(self.segmenter, each, made.label, self.labels, self.ignore)
            for name, each in pictures.items()
        }

    def figures(self, rows: Rows, sums: Rows, names: Sequence[str] = (), truth: Known | None = None) -> dict[str, Any]:
        """The scores, by rows and sums. `names` are of labels; `truth` is what is known of true ones beside rows."""
        figures: dict[str, Any] = {name: float(rows[name].mean()) for name in MEANS if name in rows}
        if "transfer" in rows:
            error, pixels_known = rows["transfer"].sum(0).tolist()
            figures["transfer_error"] = error / max(1.0, pixels_known)
        if self.extractor is not None and "features" in rows:
            made, truth = Known.of(rows["features"]), truth or Known.of(rows["features of truth"])
            figures |= distances(made, truth, self.scores, self.extractor.names)
            if "is" in self.scores and self.extractor.head is not None:
                head = self.extractor.head.to(rows["features"].device)
                figures["is"], figures["is_deviation"] = inception_score(rows["features"], head)
        for name, confusion in sums.items():
            found = pixels.intersection_over_union(confusion)
            suffix = name.removeprefix("confusion").replace(" ", "_")
            figures[f"miou{suffix}"] = float(found.nanmean())
            figures[f"accuracy{suffix}"] = pixels.accuracy(confusion)
            labels = names or [str(label) for label in range(self.labels)]
            figures[f"iou{suffix}"] = dict(zip(labels, found.tolist(), strict=True))
        return figures

    def notes(self, count: int) -> list[str]:
        if self.extractor is None or count > self.extractor.size:
            return []
        name = "FID" if self.extractor.fid else "the Fréchet distance"
        return [
            f"{name} of {count} pictures is far above that of many, as its covariances are of {self.extractor.size} "
            f"features; compare it at equal numbers of pictures only, and so precision and recall"
        ]

    def about(self, *counts: int) -> dict[str, Any]:
        """How the scores of so many pictures, and so many true ones, are computed, to be saved with them."""
        about: dict[str, Any] = {}
        if "ssim" in self.scores:
            about["ssim"] = {**pixels.WINDOW, "pictures": "floats in 0..1"}
        if self.extractor is not None:
            about["features"] = {"network": self.extractor.name, **self.extractor.about}
            about["features"] |= {"flips": False, "truncation": "none", "covariance": "divided by N - 1"}
            about["kernel"] = {**kernel_subsets(*counts), "seed": SEED, "degree": 3}
        if self.segmenter is not None:
            about["segmenter"] = {
                "file": str(self.segmenter_file),
                "network": type(self.segmenter).__name__,
                "ignored_labels": list(self.ignore),
            }
        return about


def choose(
    made: Mapping[str, Made | Heard],
    count: int,
    asked: tuple[str, ...] = (),
    *,
    labels: int = 0,
    inception: Path | None = None,
    lpips: Path | None = None,
    segmenter: Path | None = None,
    ignore: tuple[int, ...] = (),
) -> Scorer:
    """A scorer for the scores `asked` for, by default for all that can be computed.

    `made` shows what the game makes. A score that was asked for, by its name or by giving a file for it, and cannot be
    computed is an error. Any other is left out, and only where a file is missing is the reason kept.
    """
    if "features" in asked and {"fid", "kid"} & set(asked):
        raise UserError("--scores: features stand in for fid and kid; ask for the one or the other")
    for label in ignore:
        if not 0 <= label < labels:
            raise UserError(f"--ignore-labels {label}: the labels are {f'0 to {labels - 1}' if labels else 'none'}")
    scorer = Scorer(scores=(), labels=labels, segmenter_file=segmenter, ignore=ignore)
    fits = {name for each in made.values() for name in _fitting(each, count)}
    fits -= {"lpips"} if lpips is None and "lpips" not in asked else set()
    fits -= {"is"} if "is" not in asked else set()  # a score of natural pictures, of ImageNet's classes
    files = {"fid": inception, "kid": inception, "lpips": lpips, "miou": segmenter}
    for name in asked or NEEDS:
        must = asked or files.get(name) is not None
        if name not in fits and not must:
            continue
        try:
            if name not in fits:
                raise UserError(f"it needs {NEEDS[name]}")
            if name == "features" and scorer.extractor is not None:
                continue  # FID or KID are computed already
            if name in ("fid", "kid", "is") and scorer.extractor is None:
                scorer.extractor = features.inception(inception)
            if name == "is" and (scorer.extractor is None or scorer.extractor.head is None):
                raise UserError(f"it needs the weights of Inception's last layer; type --inception {INCEPTION}")
            if name in ("features", "precision", "recall") and scorer.extractor is None:
                scorer.extractor = features.always() if name == "features" else features.best(inception)
            if name == "lpips":
                scorer.lpips = pixels.lpips(lpips)
            if name == "miou":
                scorer.segmenter = pixels.segmenter(segmenter, labels)
        except UserError as error:
            if must:
                raise UserError(f"score {name}: {error}") from error
            scorer.left_out[name] = str(error)
        else:
            scorer.scores += (name,)
    return scorer


def _fitting(made: Made | Heard, count: int) -> set[str]:
    there = {SOUNDS}
    if isinstance(made, Made):
        known = {TRUTH: made.paired, SEVERAL: count >= 2, MAPS: made.label is not None, DRAWN: made.known is not None}
        there = {need for need, has in known.items() if has}
    small = isinstance(made, Made) and min(made.pictures.shape[2:]) < SMALLEST
    return {name for name, need in NEEDS.items() if need in there} - ({"lpips"} if small else set())
