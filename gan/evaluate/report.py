"""What an evaluation found, as a table to read and as a JSON file."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from gan.errors import UserError
from gan.files import whole_file

WIDTH = 58  # characters of the table's first column

ROWS = {
    "ssim": "SSIM, data range 1",
    "ssim_range_2": "SSIM, data range 2 (as published; flatters)",
    "rmse": "RMSE, of 0..1",
    "psnr": "PSNR, dB",
    "transfer_error": "style-transfer error, of 0..1",
    "region_error": "style-transfer error in the region, of 0..1",
    "region_spill": "change outside of the region, share of inside",
    "mel_error": "error of log mel spectrograms",
    "fid": "FID",
    "kid": "KID",
    "feature_distance": "Fréchet distance (not FID)",
    "kernel_distance": "kernel distance (not KID)",
    "miou": "mIoU",
    "accuracy": "pixel accuracy",
    "miou_of_truth": "mIoU of the true pictures",
    "accuracy_of_truth": "pixel accuracy of the true pictures",
}


def table(result: dict[str, Any]) -> str:
    """The scores to read: a column a task, and below it which scores are missing and why, and notes."""
    scores = result["scores"]
    network = result["about"].get("features", {}).get("network", "")
    lines = [
        f"{result['folder']}, step {result['step']}: {result['pictures']} "
        + (f"of {result['held_out']} held-out samples" if result["held_out"] else "samples that it trains on"),
        f"{'':{WIDTH}}" + "".join(f"{title:>16}" for title in scores),
    ]
    for name, title in ROWS.items():
        values = [figures.get(name) for figures in scores.values()]
        if any(value is not None for value in values):
            title += f" by {network}" if name.endswith("_distance") else ""
            cells = ("–" if value is None else f"{value:.5g}" for value in values)
            lines.append(f"{title:{WIDTH}}" + "".join(f"{cell:>16}" for cell in cells))
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in result["left_out"].items():
        reasons[reason].append(name)
    lines += [f"without {' and '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def save(result: dict[str, Any], path: Path) -> None:
    """Write the JSON. Infinities and NaN become strings, since JSON has no numbers for them."""
    try:
        with whole_file(path) as part:
            part.write_text(json.dumps(_plain(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; the scores are in the table above") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if isinstance(value, str | int | None) else str(value)
