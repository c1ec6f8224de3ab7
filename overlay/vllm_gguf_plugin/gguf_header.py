# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read the header of a GGUF file, trusting nothing in it.

Whatever is wrong ends in a `GGUFFileError` that names the file, says what was expected
and what to do. Nothing is mapped into memory, no length is followed before it is
checked, nothing recurses: a header that passes can be handed to gguf-py.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

# Bounds on what one file may ask for. GLM-5 has 9 MB of header, 480000 array values,
# 69 keys and 1809 tensors; the largest vocabularies in use double that.
MAX_HEADER_BYTES = 64 << 20
MAX_ARRAY_VALUES = 1 << 22
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_LENGTH = 1 << 10
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4  # GGML_MAX_DIMS

_DAMAGED = (
    "The file is damaged or incomplete: download it again, and compare its size with "
    "the repository's."
)


class GGUFFileError(ValueError):
    """A file, or a set of files, is not the GGUF model that it should be."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in a header.

    `shape` is in torch's order (ggml's reversed), in elements; `offset` is where its
    `size` bytes begin in `file`.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    file: Path
    offset: int
    size: int


def show(name: object) -> str:
    """Return a name as it can be printed anywhere: no control characters, short."""
    text = ascii(str(name))
    return text if len(text) <= 200 else text[:197] + "...'"


_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4


class _Reader:
    """Reads one header; every length is checked before it is followed."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0
        self.array_values = 0

    def fail(self, what: str, cure: str = _DAMAGED) -> NoReturn:
        raise GGUFFileError(f"{show(self.path)}: {what}. {cure}")

    def read(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > self.size:
            self.fail(
                f"the file ends at byte {self.size}, within {what}, which would reach "
                f"byte {end}"
            )
        if end > MAX_HEADER_BYTES:
            self.fail(
                f"{what} would make the header longer than {MAX_HEADER_BYTES} bytes"
            )
        data = self.file.read(count)
        if len(data) != count:
            self.fail(f"the file became shorter while {what} was read")
        self.position = end
        return data

    def unpack(self, code: str, what: str) -> Any:
        data = self.read(struct.calcsize("<" + code), what)
        return struct.unpack("<" + code, data)[0]

    def string(self, what: str) -> str:
        data = self.read(self.unpack("Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {data[:40]!r}")

    def name(self, what: str) -> str:
        name = self.string(what)
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            self.fail(f"{what} is {show(name)}, which is no name")
        return name

    def value(self, type_id: int, what: str) -> Any:
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self.array(what)
        if type_id not in _SCALARS:
            self.fail(f"{what} has the unknown type {type_id}")
        value = self.unpack(_SCALARS[type_id], what)
        return self.boolean(value, what) if type_id == _BOOL else value

    def boolean(self, value: int, what: str) -> bool:
        if value > 1:
            self.fail(f"{what} is a boolean of {value}")
        return bool(value)

    def array(self, what: str) -> list:
        type_id = self.unpack("I", f"the type of {what}")
        count = self.unpack("Q", f"the length of {what}")
        if type_id != _STRING and type_id not in _SCALARS:
            kind = "arrays" if type_id == _ARRAY else f"the unknown type {type_id}"
            self.fail(f"{what} is an array of {kind}")
        self.array_values += count
        if self.array_values > MAX_ARRAY_VALUES:
            self.fail(
                f"{what} has {count} values, and a header may have "
                f"{MAX_ARRAY_VALUES} in all its arrays"
            )
        if type_id == _STRING:
            return [self.string(what) for _ in range(count)]
        code = f"{count}{_SCALARS[type_id]}"
        data = self.read(struct.calcsize("<" + code), what)
        values = list(struct.unpack("<" + code, data))
        if type_id == _BOOL:
            return [self.boolean(value, what) for value in values]
        return values

    def start(self) -> tuple[int, int]:
        """Read up to the counts of tensors and keys."""
        magic = self.read(4, "the magic number")
        if magic != b"GGUF":
            if magic == b"vers":
                self.fail("a git-lfs pointer, not the file", "Run `git lfs pull`.")
            self.fail(f"starts with {magic!r} where a GGUF file has b'GGUF'")
        version = self.unpack("I", "the version")
        if version not in (2, 3):
            if version and version & 0xFFFF == 0:
                self.fail(
                    "a big-endian file",
                    "Convert it with gguf-py's gguf_convert_endian.py.",
                )
            self.fail(
                f"GGUF version {version}, and 2 and 3 are known",
                "Convert the model with a current llama.cpp.",
            )
        tensors = self.unpack("Q", "the number of tensors")
        keys = self.unpack("Q", "the number of metadata keys")
        for count, limit, what in (
            (tensors, MAX_TENSORS, "tensors"),
            (keys, MAX_KEYS, "metadata keys"),
        ):
            if count > limit:
                self.fail(f"the header announces {count} {what}, more than {limit}")
        return tensors, keys

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for no in range(count):
            key = self.name(f"the name of metadata key {no}")
            if key in metadata or key.startswith("GGUF."):
                self.fail(f"the metadata key {show(key)} is there twice or reserved")
            what = f"metadata key {show(key)}"
            type_id = self.unpack("I", f"the type of {what}")
            metadata[key] = self.value(type_id, what)
            if key == "general.alignment":
                alignment = metadata[key]
                if (
                    type_id != _UINT32
                    or not 8 <= alignment <= MAX_ALIGNMENT
                    or alignment & (alignment - 1)
                ):
                    self.fail(f"{what} is {alignment!r}, not a power of two from 8 on")
        return metadata

    def tensor_entries(self, count: int) -> list[Tensor]:
        """Read the entries; their offsets count from the data's beginning."""
        entries: dict[str, Tensor] = {}
        for no in range(count):
            name = self.name(f"the name of tensor {no}")
            if name in entries:
                self.fail(f"tensor {show(name)} is there twice")
            what = f"the entry of tensor {show(name)}"
            ndim = self.unpack("I", what)
            if not 1 <= ndim <= MAX_DIMS:
                self.fail(f"{what} has {ndim} dimensions, not 1 to {MAX_DIMS}")
            dims = [self.unpack("Q", what) for _ in range(ndim)]
            type_id = self.unpack("I", what)
            offset = self.unpack("Q", what)
            try:
                ggml_type = GGMLQuantizationType(type_id)
                block, block_bytes = GGML_QUANT_SIZES[ggml_type]
            except (ValueError, KeyError):
                self.fail(
                    f"tensor {show(name)} has the unknown type {type_id}",
                    "Types of llama.cpp's forks cannot be read: take a file that "
                    "llama.cpp itself has made, or update gguf-py.",
                )
            elements = 1
            for dim in dims:
                elements *= dim
            if not elements or dims[0] % block:
                self.fail(
                    f"tensor {show(name)} of type {ggml_type.name} has the "
                    f"dimensions {dims}, and rows must be whole blocks of {block}"
                )
            entries[name] = Tensor(
                name=name,
                shape=tuple(reversed(dims)),
                type=ggml_type,
                file=self.path,
                offset=offset,
                size=elements // block * block_bytes,
            )
        return list(entries.values())

    def place(self, entries: list[Tensor], alignment: int) -> list[Tensor]:
        """Return the tensors with offsets that count from the file's beginning."""
        begin = -(-self.position // alignment) * alignment
        placed = []
        for entry in entries:
            if entry.offset % alignment:
                self.fail(
                    f"tensor {show(entry.name)} begins at {entry.offset} of the data, "
                    f"which is no multiple of {alignment}"
                )
            placed.append(replace(entry, offset=begin + entry.offset))
        if placed:
            last = max(placed, key=lambda tensor: tensor.offset + tensor.size)
            if last.offset + last.size > self.size:
                self.fail(
                    f"the file has {self.size} bytes, and tensor {show(last.name)} "
                    f"would reach byte {last.offset + last.size}"
                )
        by_offset = sorted(placed, key=lambda tensor: tensor.offset)
        for before, after in pairwise(by_offset):
            if before.offset + before.size > after.offset:
                self.fail(f"tensors {show(before.name)} and {show(after.name)} overlap")
        return placed


def read_header(path: str | os.PathLike) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the metadata and the tensors of one file, in the file's order."""
    path = Path(path)
    try:
        # A pipe or a device would block, or never end.
        if not path.is_file():
            raise GGUFFileError(f"{show(path)} is not a file.")
        with path.open("rb") as file:
            reader = _Reader(path, file, os.fstat(file.fileno()).st_size)
            n_tensors, n_keys = reader.start()
            metadata = reader.metadata(n_keys)
            entries = reader.tensor_entries(n_tensors)
            tensors = reader.place(entries, metadata.get("general.alignment", 32))
    except OSError as e:
        raise GGUFFileError(f"{show(path)} cannot be read: {e.strerror}.") from e
    return metadata, tensors
