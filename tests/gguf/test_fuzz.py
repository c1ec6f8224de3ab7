"""Thousands of damaged files: each is refused with a clear error, or is one that gguf-py reads in the same way.

GGUF_FUZZ_CASES says how many mutations of each valid file are tried (1500: about a minute for all).
"""

import json
import math
import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_gguf_plugin import glm_dsa_config
from vllm_gguf_plugin.gguf_files import GGUFModel, find_files, read_headers
from vllm_gguf_plugin.gguf_header import GGUFFileError, read_header

from . import header
from .test_config import GLM_5_2, TOKENS

CASES = int(os.environ.get("GGUF_FUZZ_CASES", "1500"))
SECONDS_A_CASE = 5  # the slowest takes milliseconds; a loaded machine may pause
MEGABYTES = 300  # what one file's header may take, and Python keeps

NUMBERS = (0, 1, 2, 3, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.fixture(autouse=True)
def bounded():
    """No test of this module may take much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"{grown:.0f} MB"


def glm(path: Path) -> Path:
    """A file with keys of all types, and tensors."""
    keys = {f"glm-dsa.{name}": value for name, value in GLM_5_2.items()}
    keys |= {"tokenizer.ggml.tokens": ["a", "bc", "\N{SNOWMAN}", ""], "glm-dsa.attention.indexer.types": 78 * [True]}
    return header.write(path, keys | TOKENS, ("token_embd.weight", "blk.0.attn_norm.weight", "x"), arch="glm-dsa")


def aligned(path: Path) -> Path:
    return header.write(path, {"general.alignment": 64, "a": [1, 2, 3]}, ("one", "two"))


def quantised(path: Path) -> Path:
    entries = (header.entry("k", (256, 2), gguf.GGMLQuantizationType.Q4_K), header.entry("l", (32,), 8, 288))
    path.write_bytes(
        header.content((header.u32("n", 3), header.key("t", header.STRING, header.string("text"))), entries, 322)
    )
    return path


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Damage a file as transfers, editors and attackers do, most often where its numbers are."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0:
                del data[at:]
            case 1 | 2:  # a number of the header
                code = rng.choice(("<I", "<Q"))
                number = rng.choice((*NUMBERS, len(data), rng.randrange(2**20)))
                number &= (1 << 8 * struct.calcsize(code)) - 1
                data[at : at + struct.calcsize(code)] = struct.pack(code, number)
            case 3:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                end = min(at + rng.randrange(64), len(data))
                del data[at:end]
            case 5:
                data[at:at] = data[at : at + rng.randrange(200)]
            case 6:
                data[at:at] = rng.randbytes(rng.randrange(1, 24))
            case 7:
                other = rng.randrange(len(data) + 1)
                length = rng.randrange(40)
                data[at : at + length] = data[other : other + length]
    return bytes(data)


def attempt(use: Callable[[], Any], name: str) -> Any:
    """Return the result, or None where a clear error came that names `name`."""
    try:
        return use()
    except GGUFFileError as error:
        text = str(error)
    assert name in text
    assert text.endswith(".")
    assert len(text) < 2000
    return None


def check(path: Path) -> bool:
    """Return whether the file was accepted; then gguf-py must find the same in it."""
    begin = time.perf_counter()
    result = attempt(lambda: read_header(path), path.name)
    assert time.perf_counter() - begin < SECONDS_A_CASE
    if result is not None:
        metadata, tensors = result
        reader = gguf.GGUFReader(path)
        assert [(tensor.name, tensor.shape, tensor.type, tensor.offset, tensor.size) for tensor in tensors] == [
            (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset, t.n_bytes) for t in reader.tensors
        ]
        assert metadata.keys() == {name for name in reader.fields if not name.startswith("GGUF.")}
    return result is not None


@pytest.mark.parametrize("make", [glm, aligned, quantised])
def test_mutations(tmp_path, make):
    path = make(tmp_path / "fuzz.gguf")
    valid = path.read_bytes()
    assert check(path)
    rng = random.Random(make.__name__)
    accepted = 0
    for _ in range(CASES):
        path.write_bytes(mutate(valid, rng))
        accepted += check(path)
    # Weights and texts may be anything; most of what is left is a number that must be right.
    assert 0 < accepted < 0.9 * CASES


@pytest.mark.parametrize("make", [glm, aligned, quantised])
def test_every_truncation(tmp_path, make):
    path = make(tmp_path / "fuzz.gguf")
    valid = path.read_bytes()
    end = max(tensor.offset + tensor.size for tensor in read_header(path)[1])
    for length in range(end):
        path.write_bytes(valid[:length])
        assert not check(path), length


@pytest.mark.parametrize("make", [glm, quantised])
def test_every_number(tmp_path, make):
    """Each position of the header takes each extreme number once."""
    path = make(tmp_path / "fuzz.gguf")
    valid = path.read_bytes()
    stride = 1 if make is quantised else 7
    for at in range(0, min(t.offset for t in read_header(path)[1]), stride):
        for number in (0, 2**31, 2**63, 2**64 - 1):
            data = bytearray(valid)
            data[at : at + 8] = struct.pack("<Q", number)
            path.write_bytes(data)
            check(path)


def test_mutations_of_one_shard(tmp_path):
    shards = header.write_shards(tmp_path)
    valid = [path.read_bytes() for path in shards]
    rng = random.Random(0)
    for _ in range(CASES // 3):
        no = rng.randrange(3)
        shards[no].write_bytes(mutate(valid[no], rng))
        model = attempt(lambda: read_headers(find_files(tmp_path)), "-of-00003.gguf")
        assert model is None or len(model.tensors) == 2
        shards[no].write_bytes(valid[no])


@settings(max_examples=CASES // 5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=400))
def test_noise_after_the_magic(tmp_path, data):
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + data)
    check(path)


VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-2, 300),
    st.floats(width=32),
    st.text(max_size=8),
    st.lists(st.integers(0, 2), max_size=80),
    st.lists(st.booleans(), min_size=77, max_size=80),
    st.lists(st.sampled_from(["full", "shared", ""]), min_size=77, max_size=80),
    st.lists(st.floats(), max_size=3),
)
NAMES = [f"glm-dsa.{name}" for name in GLM_5_2]
NAMES += ["glm-dsa.attention.indexer.types", "glm-dsa.rope.scaling.type", "glm-dsa.rope.scaling.factor", *TOKENS]
NAMES += ["general.sampling.temp", "general.sampling.top_k", "glm-dsa.rope.scaling.yarn_log_multiplier"]


@settings(max_examples=CASES // 3, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=4))
def test_any_value_of_any_key(changes):
    """A config comes out that JSON can hold, or an error that names the file."""
    keys = {f"glm-dsa.{name}": value for name, value in GLM_5_2.items()}
    metadata = {"general.architecture": "glm-dsa", **keys, **TOKENS, **changes}
    model = GGUFModel([Path("fuzz.gguf")], metadata, [])
    config = attempt(lambda: glm_dsa_config.build(model), "fuzz.gguf")
    if config is not None:
        json.dumps(config, allow_nan=False)
        json.dumps(glm_dsa_config._sampling(model, config), allow_nan=False)
        assert len(config["index_topk_pattern"]) == config["num_hidden_layers"]


FIELDS = ["model_type", "rope_parameters", "rope_theta", "rope_scaling", *glm_dsa_config._INTEGERS]
FIELDS += ["index_topk_pattern", "indexer_types", "index_topk_freq", "index_skip_topk_offset"]
ROPE = st.dictionaries(st.sampled_from(["rope_theta", "rope_type", "type"]), VALUES)


@settings(max_examples=CASES // 3, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES | st.none() | ROPE, max_size=3))
def test_any_value_in_a_config_json(changes):
    keys = {f"glm-dsa.{name}": value for name, value in GLM_5_2.items()}
    model = GGUFModel([Path("fuzz.gguf")], {"general.architecture": "glm-dsa", **keys}, [])
    config = glm_dsa_config.build(model)
    merged = attempt(lambda: glm_dsa_config.merge(model, config | changes, "config.json"), "config.json")
    if merged is not None:
        for name in glm_dsa_config._INTEGERS:
            assert merged[name] == config[name]


# Of keys without a meaning: hypothesis also draws strings from the sources, and few values are an alignment.
PLAIN_NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20).filter(
    "general.alignment".__ne__
)


@settings(max_examples=CASES // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(PLAIN_NAMES, VALUES, max_size=6))
def test_valid_metadata_comes_back(tmp_path, metadata):
    """What gguf-py writes is read as it is."""
    types = {bool: header.BOOL, int: header.I64, float: header.F32, str: header.STRING}
    codes = {bool: "<?", int: "<q", float: "<f"}
    keys = []
    for name, value in metadata.items():
        if isinstance(value, list):
            if not value:
                continue
            kind = type(value[0])
            if kind is float:
                value = metadata[name] = np.array(value, np.float64).tolist()
            data = b"".join(header.string(v) if kind is str else struct.pack({float: "<d"}.get(kind) or codes[kind], v)
                            for v in value)  # fmt: skip
            type_id = header.F64 if kind is float else types[kind]
            keys.append(header.key(name, header.ARRAY, struct.pack("<IQ", type_id, len(value)) + data))
        else:
            kind = type(value)
            data = header.string(value) if kind is str else struct.pack(codes[kind], value)
            keys.append(header.key(name, types[kind], data))
    path = tmp_path / "x.gguf"
    path.write_bytes(header.content(tuple(keys)))
    seen, _ = read_header(path)
    wanted = {name: value for name, value in metadata.items() if value != []}
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert seen[name] == value or (isinstance(value, (float, list)) and _nan_equal(seen[name], value)), name


def _nan_equal(one, other) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(
            a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
        )
    return math.isnan(one) and math.isnan(other)
