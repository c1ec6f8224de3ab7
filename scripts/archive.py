"""Zip archives whose members move from one to another as they lie, compressed bytes and header fields included.

`zipfile` reads; what it cannot do is copy a member without inflating it, so the few records that a plain
archive needs are written here (PKWARE APPNOTE 6.3.10: 4.3.7 local header, 4.3.12 central directory, 4.3.16 end
record). New members are stored, not deflated: deflate's output differs between builds of zlib, and a wheel has to
come out the same on every machine.
"""

from __future__ import annotations

import copy
import hashlib
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from scripts.errors import WheelError

DateTime = tuple[int, int, int, int, int, int]

_CHUNK = 1 << 20  # larger pieces leave the processor's cache between hashing and writing, and take twice the time
_MAX_SIZE = 0xFFFFFFFF
_MAX_MEMBERS = 0xFFFF
_UNIX = 3
_VERSION = 20
_FLAGS = {0x1: "encryption", 0x8: "a data descriptor", 0x40: "strong encryption", 0x800: "a name that is not ASCII"}


class Archive:
    """An archive open for reading; use it as a context manager.

    Attributes:
        members: the directory, in the order of the file.

    Raises:
        WheelError: it is no zip file, is damaged, or has a member in a form that is not copied: encryption, data
            descriptor, zip64, extra field, comment, a name that is not ASCII or comes twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{path}: not readable as a zip file: {error}", cure="fetch it again") from None
        self.members: Mapping[str, zipfile.ZipInfo] = {info.filename: info for info in self._zip.infolist()}
        if len(self.members) != len(self._zip.infolist()):
            self._refuse("it", "a name that comes twice")
        for info in self.members.values():
            self._check(info)
        self._file = path.open("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._file.close()

    def read(self, name: str) -> bytes:
        """The content of a member.

        Raises:
            WheelError: there is none of this name, or it is damaged.
        """
        try:
            return self._zip.read(name)
        except KeyError:
            raise WheelError(
                f"{self.path}: has no member {name}", cure="expected a wheel as upstream releases it"
            ) from None
        except (zipfile.BadZipFile, zlib.error) as error:
            raise WheelError(f"{self.path}: {name} is damaged: {error}", cure="fetch the wheel again") from None

    def raw(self, name: str) -> Iterator[bytes]:
        """The compressed bytes of a member, in pieces."""
        info = self.members[name]
        header = _local_header(info)
        self._file.seek(info.header_offset)
        if self._file.read(len(header)) != header:
            self._refuse(name, "a local header that differs from the directory's entry")
        left = info.compress_size
        while left:
            piece = self._file.read(min(left, _CHUNK))
            if not piece:
                raise WheelError(f"{self.path}: ends in the middle of {name}", cure="fetch the wheel again")
            left -= len(piece)
            yield piece

    def _check(self, info: zipfile.ZipInfo) -> None:
        for bit, what in _FLAGS.items():
            if info.flag_bits & bit:
                self._refuse(info.filename, what)
        if info.flag_bits:
            self._refuse(info.filename, f"the flags {info.flag_bits:#x}")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            self._refuse(info.filename, f"the compression method {info.compress_type}")
        if max(info.file_size, info.compress_size, info.header_offset) >= _MAX_SIZE or info.extract_version > _VERSION:
            self._refuse(info.filename, "zip64 or another later extension")
        if info.extra or info.comment or info.volume:
            self._refuse(info.filename, "an extra field, a comment or a volume number")

    def _refuse(self, name: str, what: str) -> None:
        raise WheelError(
            f"{self.path}: {name} has {what}, which this tool does not copy",
            cure="a plain zip as setuptools writes it is expected; scripts/archive.py is where support would go",
        )


class Writer:
    """Writes an archive front to back and hashes it on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._offset = 0
        self._directory: dict[str, bytes] = {}

    def copy(self, source: Archive, name: str, new_name: str | None = None) -> None:
        """Copy a member as it is, under a new name if one is given."""
        info = copy.copy(source.members[name])
        info.filename = new_name or name
        self._begin(info)
        for piece in source.raw(name):
            self._put(piece)

    def add(self, name: str, data: bytes, mode: int, date_time: DateTime) -> None:
        """Store a regular file with the permission bits `mode`.

        Raises:
            WheelError: the name is not ASCII or taken, or the archive grows beyond what zip holds without zip64.
        """
        info = zipfile.ZipInfo(name, date_time)
        info.create_system, info.create_version, info.extract_version = _UNIX, _VERSION, _VERSION
        info.external_attr = (stat.S_IFREG | mode) << 16
        info.file_size = info.compress_size = len(data)
        info.CRC = zlib.crc32(data)
        self._begin(info)
        self._put(data)

    def close(self) -> str:
        """Write the directory.

        Returns:
            The sha256 of the whole file.
        """
        offset = self._offset
        for entry in self._directory.values():
            self._put(entry)
        count = len(self._directory)
        self._put(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, self._offset - offset, offset, 0))
        return self._hash.hexdigest()

    def _begin(self, info: zipfile.ZipInfo) -> None:
        if not info.filename.isascii():
            raise WheelError(f"{info.filename}: the name is not ASCII", cure="rename the file")
        if info.filename in self._directory:
            raise WheelError(f"{info.filename}: would be in the archive twice", cure="see what adds it")
        if self._offset + info.compress_size >= _MAX_SIZE or len(self._directory) + 1 >= _MAX_MEMBERS:
            raise WheelError(f"{info.filename}: the archive grows beyond what zip holds without zip64")
        self._directory[info.filename] = _directory_entry(info, self._offset)
        self._put(_local_header(info))

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)


def _common(info: zipfile.ZipInfo) -> bytes:
    """The fields that local header and directory entry share, from "version needed" to "extra field length"."""
    year, month, day, hour, minute, second = info.date_time
    return struct.pack(
        "<5H3L2H",
        info.extract_version,
        info.flag_bits,
        info.compress_type,
        hour << 11 | minute << 5 | second // 2,
        (year - 1980) << 9 | month << 5 | day,
        info.CRC,
        info.compress_size,
        info.file_size,
        len(info.filename),
        0,
    )


def _local_header(info: zipfile.ZipInfo) -> bytes:
    return b"PK\3\4" + _common(info) + info.filename.encode("ascii")


def _directory_entry(info: zipfile.ZipInfo, offset: int) -> bytes:
    made_by = struct.pack("<2B", info.create_version, info.create_system)
    rest = struct.pack("<3H2L", 0, 0, info.internal_attr, info.external_attr, offset)
    return b"PK\1\2" + made_by + _common(info) + rest + info.filename.encode("ascii")
