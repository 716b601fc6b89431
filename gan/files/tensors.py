"""Safetensors files, of which ranges of tensors are written and read, with checksums where we have written them.

    8 bytes       the length of the header
    header        JSON: the kind, shape and place of each tensor's elements; in its metadata, where a piece of a tensor
                  begins in the whole one, and the crc32 of each MiB of its bytes
    elements      of one tensor after the other

A reader of some elements reads and checks the MiBs that they lie in, so it needs memory for one MiB. The header's own
crc32 is kept elsewhere. Files of others have no checksums, and of those only the bytes that are wanted are read.

The package safetensors and torch's distributed checkpoint (DCP) read these files too. They know nothing of the
checksums. The package reads none here: it maps a whole file into memory, which counts in full under `ulimit -v`.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gan.files.errors import Damaged, UserError, reading

CHUNK = 2**20  # bytes that are read at a time, and that have one checksum
CHECKSUMS = "CRC32_OF_EACH_MIB"  # 8 hexadecimal digits each
STARTS, START = "DCP_SHARDING_INFO", "saved_offsets"  # the names in torch's distributed checkpoint
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,  # the package safetensors does not read it
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Share:
    """One rank's part of a tensor of this `shape`: the elements of the flat tensor from `start` on, in `tensor`."""

    tensor: Tensor
    shape: torch.Size
    start: int = 0

    @classmethod
    def whole(cls, tensor: Tensor) -> "Share":
        return cls(tensor.detach(), tensor.shape)

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()

    @contextmanager
    def filled(self) -> Iterator[Tensor]:
        """Flat memory to fill. A tensor that is not contiguous has no flat view, so a copy of it is filled first."""
        room = self.tensor.detach().contiguous()
        yield room.view(-1)
        if not self.tensor.is_contiguous():
            self.tensor.detach().copy_(room)


@dataclass(frozen=True)
class Piece:
    """A tensor in a file, or a piece of one that begins at element `start`. `place` is that of its first byte."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    place: int
    checksums: str | None

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self, file: FileIO, share: Share, room: Tensor) -> None:
        """Read those elements that they have in common. `room` is the share's flat memory, of any dtype."""
        first, last, size = max(self.start, share.start), min(self.stop, share.stop), self.dtype.itemsize
        place = first - share.start
        for content in self._contents(file, (first - self.start) * size, (last - self.start) * size):
            elements = torch.frombuffer(content, dtype=torch.uint8).view(self.dtype)
            room[place : place + elements.numel()].copy_(elements)
            place += elements.numel()

    def check(self) -> None:
        """Read all of it, and raise if it is not as it was written."""
        assert self.checksums is not None, "only what we have written is checked"
        with self.file.open("rb", buffering=0) as file:
            for _ in self._contents(file, 0, self.nbytes):
                pass

    def _contents(self, file: FileIO, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes from `begin` to `end`, in parts, of which each lies in one MiB that is checked, if it can be."""
        buffer = memoryview(bytearray(min(CHUNK, self.nbytes)))
        for number in range(begin // CHUNK, -(-end // CHUNK)):
            offset = number * CHUNK
            low, high = max(begin, offset), min(end, offset + CHUNK)
            first, last = (low, high) if self.checksums is None else (offset, min(offset + CHUNK, self.nbytes))
            content = buffer[: last - first]
            file.seek(self.place + first)
            fill(file, content)
            if self.checksums is not None and crc32(content) != self.checksums[8 * number : 8 * number + 8]:
                raise Damaged(f"{self.file.name} is damaged: '{self.key}' in it is not what was written")
            yield content[low - first : high - first]


def crc32(content: Any, before: int = 0) -> str:
    return f"{zlib.crc32(content, before):08x}"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor. One of a single element may have any stride, and torch views only stride 1."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def fill(file: FileIO, content: memoryview) -> None:
    """Read exactly so many bytes. Raise if the file ends before."""
    while content:
        size = file.readinto(content)
        if not size:
            raise Damaged(f"{Path(file.name).name} is damaged: it ends too early")
        content = content[size:]


def pieces(path: Path, digest: str | None = None) -> dict[str, Piece]:
    """What is in a file, by name, from its header. `digest` is what `write` returned; else nothing has a checksum."""
    length = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        lead = file.read(8)
        size = int.from_bytes(lead, "little")
        if len(lead) < 8 or 8 + size > length:
            raise Damaged(f"{path.name} is damaged: it has no header")
        text = bytearray(size)
        fill(file, memoryview(text))
    if digest is not None and crc32(text, zlib.crc32(lead)) != digest:
        raise Damaged(f"{path.name} is damaged: its header is not what was written")
    with reading(path.name, "its header is not that of a safetensors file"):
        return _pieces(path, json.loads(text), 8 + size, length, digest is not None)


def _pieces(path: Path, header: dict[str, Any], begin: int, length: int, checked: bool) -> dict[str, Piece]:
    metadata = header.pop("__metadata__", {})
    starts = json.loads(metadata.get(STARTS, "{}")) if checked else {}
    checksums = json.loads(metadata[CHECKSUMS]) if checked else {}
    found, end = {}, 0
    for key, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if (kind := about["dtype"]) not in DTYPES:
            raise UserError(f"'{key}' in {path.name} has numbers of kind {kind}; known are {', '.join(DTYPES)}")
        first, last = about["data_offsets"]
        start = starts[key][START][0] if key in starts else 0
        dtype, shape = DTYPES[kind], about["shape"]
        numbers = all(type(number) is int and number >= 0 for number in (first, last, start, *shape))
        if not numbers or first != end or last - first != math.prod(shape) * dtype.itemsize:
            raise Damaged(f"{path.name} is damaged: '{key}' in it has no place of its own")
        shape = torch.Size(shape)
        found[key] = Piece(path, key, dtype, shape, start, begin + first, checksums[key] if checked else None)
        if checked and len(checksums[key]) != 8 * -(-found[key].nbytes // CHUNK):
            raise Damaged(f"{path.name} is damaged: '{key}' in it has no checksums")
        end = last
    if begin + end != length:
        raise Damaged(f"{path.name} is damaged: it has {length} bytes, and its header says {begin + end}")
    return found


def write(path: Path, shares: Mapping[str, Share]) -> str:
    """Write a file and flush it. Returns the crc32 of its header.

    It writes one piece after the other, so a rank needs memory for the copy of one piece only. The package's own
    `save_file` copies all tensors of a GPU to the CPU before it writes the first. The checksums of a piece are known
    when it is written, so the header is written twice: they have a fixed length.
    """
    header: dict[str, Any] = {}
    # Tensors with wide elements first: then each piece begins at a multiple of its element size.
    ordered = sorted(shares.items(), key=lambda item: -item[1].tensor.itemsize)
    end = 0
    for key, share in ordered:
        begin, end = end, end + share.tensor.nbytes
        kind, count = NAMES[share.tensor.dtype], share.tensor.numel()
        header[key] = {"dtype": kind, "shape": [count], "data_offsets": [begin, end]}
    starts = {key: {START: [share.start]} for key, share in shares.items()}
    checksums: dict[str, str] = {key: "0" * 8 * -(-share.tensor.nbytes // CHUNK) for key, share in ordered}
    with path.open("wb") as file:
        room = _header(header, starts, checksums)
        file.write(room)
        for key, share in ordered:
            content = as_bytes(share.tensor.detach().reshape(-1).contiguous().cpu()).numpy().data
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
    return crc32(written)


def _header(header: Mapping[str, Any], starts: Mapping[str, Any], checksums: Mapping[str, str]) -> bytes:
    metadata = {"DCP_VERSION": "1.0", STARTS: json.dumps(starts), "format": "pt", CHECKSUMS: json.dumps(checksums)}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
