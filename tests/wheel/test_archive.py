"""Copying members raw, storing new ones, and refusing what is not understood."""

from __future__ import annotations

import hashlib
import io
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import archive
from scripts.archive import Archive, Writer
from scripts.errors import WheelError

DATE_TIME = (2026, 11, 1, 9, 43, 12)
DATA = b"some text, some text, some text\n" * 100


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for number, name in enumerate(("a/deflated.py", "a/large.bin", "a/run.sh", "a/stored.txt", "a/empty")):
            info = zipfile.ZipInfo(name, (2020, 1, 2, 3, number, 58))
            info.external_attr = (stat.S_IFREG | (0o755 if name.endswith(".sh") else 0o640)) << 16
            data = {"a/empty": b"", "a/large.bin": bytes(3 << 20) + hashlib.sha256().digest() * 50_000}.get(name, DATA)
            file.writestr(info, data, zipfile.ZIP_STORED if name == "a/stored.txt" else zipfile.ZIP_DEFLATED)
    return path


def copy_all(source: Path, target: Path) -> str:
    with Archive(source) as members, target.open("wb") as file:
        writer = Writer(file)
        for name in members.members:
            writer.copy(members, name)
        writer.add("b/new.py", DATA, 0o644, DATE_TIME)
        writer.add("b/new.sh", b"", 0o755, DATE_TIME)
        return writer.close()


def raw(path: Path, info: zipfile.ZipInfo) -> bytes:
    """A member as it lies: local header and compressed bytes."""
    data = path.read_bytes()[info.header_offset :]
    return data[: 30 + len(info.filename) + info.compress_size]


def test_copied_members_keep_every_byte(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.zip"
    copy_all(source, target)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target) as new:
        assert new.testzip() is None
        assert new.namelist() == [*old.namelist(), "b/new.py", "b/new.sh"]
        for info in old.infolist():
            copy = new.getinfo(info.filename)
            assert raw(target, copy) == raw(source, info)
            for field in ("external_attr", "internal_attr", "create_system", "create_version", "date_time", "CRC"):
                assert getattr(copy, field) == getattr(info, field)


def test_all_members_copied_give_the_same_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.zip"
    with Archive(source) as members, target.open("wb") as file:
        writer = Writer(file)
        for name in members.members:
            writer.copy(members, name)
        writer.close()
    assert target.read_bytes() == source.read_bytes()


def test_a_copy_may_have_another_name(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.zip"
    with Archive(source) as members, target.open("wb") as file:
        writer = Writer(file)
        writer.copy(members, "a/deflated.py", "c/renamed-much-longer.py")
        writer.copy(members, "a/run.sh")
        writer.close()
        assert "a/deflated.py" in members.members
        assert members.members["a/deflated.py"].filename == "a/deflated.py"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target) as new:
        assert new.read("c/renamed-much-longer.py") == new.read("a/run.sh") == DATA
        before, after = old.getinfo("a/deflated.py"), new.getinfo("c/renamed-much-longer.py")
        size = before.compress_size
        assert raw(target, after)[-size:] == raw(source, before)[-size:]


def test_new_members_are_stored_with_mode_and_time(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.zip"
    copy_all(source, target)
    with zipfile.ZipFile(target) as new:
        for name, data, mode in (("b/new.py", DATA, 0o100644), ("b/new.sh", b"", 0o100755)):
            info = new.getinfo(name)
            assert new.read(name) == data
            assert (info.compress_type, info.external_attr >> 16) == (zipfile.ZIP_STORED, mode)
            assert (info.date_time, info.create_system, info.extra) == (DATE_TIME, 3, b"")


def test_output_is_deterministic_and_hashed(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    assert copy_all(source, first) == copy_all(source, second) == hashlib.sha256(first.read_bytes()).hexdigest()
    assert first.read_bytes() == second.read_bytes()


class Unseekable(io.RawIOBase):
    """Makes zipfile write data descriptors."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += bytes(data)
        return len(data)


def _zip(**changes: object) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        info = zipfile.ZipInfo("a.py", DATE_TIME)
        for name, value in changes.items():
            setattr(info, name, value)
        file.writestr(info, DATA)
    return buffer.getvalue()


def _descriptor() -> bytes:
    stream = Unseekable()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("a.py", DATA)
    return stream.data


def _twice() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a.py", DATA)
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("a.py", DATA)
    return buffer.getvalue()


def _flag(bit: int) -> Callable[[], bytes]:
    def make() -> bytes:
        data = bytearray(_zip())
        directory = data.index(b"PK\1\2")
        for offset in (6, directory + 8):
            struct.pack_into("<H", data, offset, bit)
        return bytes(data)

    return make


def _sizes(value: int) -> bytes:
    """A directory entry whose sizes stand for a zip64 field that is not there."""
    data = bytearray(_zip())
    struct.pack_into("<2L", data, data.index(b"PK\1\2") + 20, value, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: b"no zip", "not readable as a zip", id="no-zip"),
        pytest.param(lambda: _zip()[:-30], "not readable as a zip", id="truncated"),
        pytest.param(_flag(0x1), "encryption", id="encrypted"),
        pytest.param(_descriptor, "data descriptor", id="data-descriptor"),
        pytest.param(_flag(0x2), "flags 0x2", id="other-flag"),
        pytest.param(lambda: _zip(filename="ä.py"), "not ASCII", id="name"),
        pytest.param(lambda: _zip(compress_type=zipfile.ZIP_BZIP2), "compression method 12", id="bzip2"),
        pytest.param(lambda: _zip(extra=b"\x75\x70\1\0x"), "extra field", id="extra"),
        pytest.param(lambda: _zip(comment=b"x"), "a comment", id="comment"),
        pytest.param(lambda: _zip(extract_version=45), "zip64", id="zip64-version"),
        pytest.param(lambda: _sizes(0xFFFFFFFF), "zip64", id="zip64-sizes"),
        pytest.param(_twice, "comes twice", id="twice"),
    ],
)
def test_refuses(make: Callable[[], bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.zip"
    path.write_bytes(make())
    with pytest.raises(WheelError, match=message) as raised:
        Archive(path)
    assert str(path) in str(raised.value)
    assert raised.value.cure


def test_refuses_a_local_header_that_contradicts_the_directory(tmp_path: Path) -> None:
    data = bytearray(_zip())
    struct.pack_into("<H", data, 28, 4)  # the local header alone claims an extra field
    path = tmp_path / "odd.zip"
    path.write_bytes(data)
    with Archive(path) as source, pytest.raises(WheelError, match=r"a\.py has a local header that differs"):
        Writer(io.BytesIO()).copy(source, "a.py")


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    data = bytearray(_zip())
    data[40] ^= 1
    path = tmp_path / "damaged.zip"
    path.write_bytes(data)
    with Archive(path) as source:
        with pytest.raises(WheelError, match=r"a\.py is damaged"):
            source.read("a.py")
        with pytest.raises(WheelError, match=r"has no member b\.py"):
            source.read("b.py")


def test_refuses_to_write_what_readers_would_trip_over(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(io.BytesIO())
    writer.add("a.py", b"", 0o644, DATE_TIME)
    with pytest.raises(WheelError, match="twice"):
        writer.add("a.py", b"", 0o644, DATE_TIME)
    with pytest.raises(WheelError, match="not ASCII"):
        writer.add("ä.py", b"", 0o644, DATE_TIME)
    monkeypatch.setattr(archive, "_MAX_SIZE", 50)
    with pytest.raises(WheelError, match="beyond what zip holds"):
        writer.add("b.py", DATA, 0o644, DATE_TIME)
    monkeypatch.undo()
    monkeypatch.setattr(archive, "_MAX_MEMBERS", 2)
    with pytest.raises(WheelError, match="beyond what zip holds"):
        writer.add("b.py", b"", 0o644, DATE_TIME)
