"""The file to which a rank writes its pieces of tensors: a safetensors file with checksums.

    8 bytes       the length of the header
    header        JSON: the kind, number and place of each piece's elements; in its metadata, where each piece begins in
                  the whole tensor, and the crc32 of each MiB of its bytes
    elements      of one piece after the other

A reader of some elements reads and checks the MiBs that they lie in, so it needs memory for one MiB. The header's own
crc32 is kept elsewhere, in the checkpoint's digests.json, with the length of the file.

safetensors and torch's distributed checkpoint (DCP) read these files too. They know nothing of the checksums.
"""

import functools
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from gan.files.errors import UserError

CHUNK = 2**20  # bytes that have one checksum
CHECKSUMS = "CRC32_OF_EACH_MIB"  # 8 hexadecimal digits each
STARTS, START = "DCP_SHARDING_INFO", "saved_offsets"  # the names in torch's distributed checkpoint


class Damaged(UserError):
    """A file is not as it was written."""


class Digest(NamedTuple):
    """What is known of a file elsewhere: its length, and the crc32 of its header or of all of it."""

    length: int
    crc32: str


class Piece(NamedTuple):
    """A range of the elements of a flat tensor, to be written. It begins at element `start` of the tensor."""

    tensor: Tensor
    start: int


@dataclass(frozen=True)
class SavedPiece:
    """A piece in a file. `place` is that of its first byte. Files of earlier versions have no checksums."""

    file: Path
    key: str
    kind: str
    start: int
    count: int
    place: int
    nbytes: int
    checksums: str | None

    @property
    def stop(self) -> int:
        return self.start + self.count

    def read(self, file: BinaryIO, first: int, last: int, room: Tensor, dtype: torch.dtype) -> None:
        """Read the elements of the whole tensor from `first` to `last`, which lie in this piece, into a flat tensor."""
        begin, end = ((number - self.start) * dtype.itemsize for number in (first, last))
        buffer = torch.empty(min(CHUNK, self.nbytes), dtype=torch.uint8)
        for number in range(begin // CHUNK, -(-end // CHUNK)):
            offset = number * CHUNK
            self._read_chunk(file, number, memoryview(buffer.numpy()))
            low, high = max(begin, offset), min(end, offset + CHUNK)
            elements = buffer[low - offset : high - offset].view(dtype)
            room[(low - begin) // dtype.itemsize : (high - begin) // dtype.itemsize].copy_(elements)

    def check(self, first: int, last: int) -> None:
        """Read the chunks with these numbers, and raise if one is not as it was written."""
        with self.file.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(CHUNK, self.nbytes)))
            for number in range(first, min(last, self.chunks)):
                self._read_chunk(file, number, buffer)

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // CHUNK)

    def _read_chunk(self, file: BinaryIO, number: int, buffer: memoryview) -> None:
        offset = number * CHUNK
        content = buffer[: min(CHUNK, self.nbytes - offset)]
        file.seek(self.place + offset)
        fill(file, content, self.file)
        if self.checksums is not None and crc32(content) != self.checksums[8 * number : 8 * number + 8]:
            raise Damaged(f"{self.file.name} is damaged: '{self.key}' in it is not what was written")


def crc32(content: Any, before: int = 0) -> str:
    return f"{zlib.crc32(content, before):08x}"


def fill(file: BinaryIO, content: memoryview, path: Path) -> None:
    """Read exactly so many bytes. Raise if the file ends before."""
    while content:
        size = file.readinto(content)
        if not size:
            raise Damaged(f"{path.name} is damaged: it ends too early")
        content = content[size:]


def write(path: Path, pieces: Mapping[str, Piece]) -> Digest:
    """Write a file and flush it. Returns its length, and the crc32 of its header.

    It writes one piece after the other, so a rank needs memory for the copy of one piece only. safetensors' own
    `save_file` copies all tensors of a GPU to the CPU before it writes the first. The checksums of a piece are known
    when it is written, so the header is written twice: they have a fixed length.
    """
    header: dict[str, Any] = {}
    # Tensors with wide elements first: then each piece begins at a multiple of its element size.
    ordered = sorted(pieces.items(), key=lambda item: -item[1].tensor.itemsize)
    end = 0
    for key, (tensor, _) in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": kind_of(tensor.dtype), "shape": [tensor.numel()], "data_offsets": [begin, end]}
    starts = {key: {START: [start]} for key, (_, start) in pieces.items()}
    checksums = {key: "0" * 8 * -(-tensor.nbytes // CHUNK) for key, (tensor, _) in ordered}
    with path.open("wb") as file:
        room = _header(header, starts, checksums)
        file.write(room)
        for key, (tensor, _) in ordered:
            content = memoryview(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy())
            found = []
            for first in range(0, len(content), CHUNK):
                chunk = content[first : first + CHUNK]
                file.write(chunk)
                found.append(crc32(chunk))
            checksums[key] = "".join(found)
        written = _header(header, starts, checksums)
        assert len(written) == len(room)
        file.seek(0)
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    return Digest(len(written) + end, crc32(written))


def _header(header: Mapping[str, Any], starts: Mapping[str, Any], checksums: Mapping[str, str]) -> bytes:
    metadata = {"DCP_VERSION": "1.0", STARTS: json.dumps(starts), "format": "pt", CHECKSUMS: json.dumps(checksums)}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@functools.cache
def kind_of(dtype: torch.dtype) -> str:
    """safetensors' name for a dtype, read from the header of an empty tensor."""
    return json.loads(safetensors.torch.save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"]


def saved_pieces(path: Path, digest: Digest | None) -> list[SavedPiece]:
    """The pieces in a file, from its header. Raises if the header is not as it was written, or is none.

    `digest` is None for files of earlier versions, in which nothing has a checksum.
    """
    length = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        lead = file.read(8)
        size = int.from_bytes(lead, "little")
        if len(lead) < 8 or 8 + size > length:
            raise Damaged(f"{path.name} is damaged: it has no header")
        text = bytearray(size)
        fill(file, memoryview(text), path)
    if digest is not None and crc32(text, zlib.crc32(lead)) != digest.crc32:
        raise Damaged(f"{path.name} is damaged: its header is not what was written")
    try:
        return _pieces(path, json.loads(text), 8 + size, length, digest is not None)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path.name} is damaged: its header is not that of a checkpoint's file") from error


def _pieces(path: Path, header: dict[str, Any], begin: int, length: int, checked: bool) -> list[SavedPiece]:
    metadata = header.pop("__metadata__", {})
    starts = json.loads(metadata.get(STARTS, "{}"))
    checksums = json.loads(metadata[CHECKSUMS]) if checked else {}
    found, end = [], 0
    for key, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (count,), (first, last) = about["shape"], about["data_offsets"]
        start = starts[key][START][0] if key in starts else 0
        numbers = count, first, last, start
        if any(type(number) is not int or number < 0 for number in numbers) or first != end or last < first:
            raise Damaged(f"{path.name} is damaged: '{key}' in it has no place of its own")
        if checked and len(checksums[key]) != 8 * -(-(last - first) // CHUNK):
            raise Damaged(f"{path.name} is damaged: '{key}' in it has no checksums")
        own = checksums[key] if checked else None
        end = last
        if key in starts:
            found.append(SavedPiece(path, key, about["dtype"], start, count, begin + first, last - first, own))
    if begin + end != length:
        raise Damaged(f"{path.name} is damaged: it has {length} bytes, and its header says {begin + end}")
    return found
