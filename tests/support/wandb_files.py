"""Reads what Weights & Biases writes without a connection: records of protobuf in the format of LevelDB's log."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # bytes; a header is a checksum, a length and the kind of a piece: 1 whole, 4 the last


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""
