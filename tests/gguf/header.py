"""GGUF files whose header is the point: a few hundred bytes, valid or wrong in one way."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + value


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def entry(name: str | bytes, dims: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0) -> bytes:
    return (
        string(name)
        + struct.pack("<I", len(dims))
        + b"".join(struct.pack("<Q", dim) for dim in dims)
        + struct.pack("<IQ", type_id, offset)
    )


def content(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a file's bytes; `data` is how many follow the header and its padding."""
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_keys = len(keys) if n_keys is None else n_keys
    header = magic + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + bytes(data) if data else header


def write(path: Path, metadata: dict[str, Any], tensors: tuple[str, ...] = (), arch: str = "llama") -> Path:
    """Write a valid file with gguf-py: small float tensors, and keys by the type of their values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for no, name in enumerate(tensors):
        writer.add_tensor(name, np.full((2, 8), no, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shards(folder: Path, stem: str = "GLM-5-Q8_0", count: int = 3) -> list[Path]:
    """Write `count` shards, the first without tensors and the others with one each."""
    paths = []
    for no in range(count):
        name = f"{stem}-{no + 1:05d}-of-{count:05d}.gguf"
        metadata = {"split.no": no, "split.count": count, "split.tensors.count": count - 1}
        paths.append(write(folder / name, metadata, (f"blk.{no}.weight",) if no else ()))
    return paths
