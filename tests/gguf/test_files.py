"""Which files make a model, and what is said when they do not."""

import os
import shutil
import struct
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import pytest
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm_gguf_plugin import gguf_files
from vllm_gguf_plugin.gguf_files import choose, find_files, is_model_folder, read_headers, resolve
from vllm_gguf_plugin.gguf_header import GGUFFileError, read_header

from . import header


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    """Three shards in the folder of their quant, in a repository."""
    return header.write_shards(tmp_path / "repository" / "UD-Q2_K_XL", "GLM-5-UD-Q2_K_XL")


def test_finds_all_shards_from_any_of_their_names(shards):
    folder = shards[0].parent
    for model in (*shards, folder, folder.parent, f"{folder.parent}:UD-Q2_K_XL", f"{folder.parent}:ud-q2_k_xl"):
        assert find_files(model) == shards, model


def test_reads_the_shards_as_one_model(shards):
    model = read_headers(shards)
    assert model.files == shards
    assert model.metadata["general.architecture"] == "llama"
    assert [(tensor.name, tensor.shape, tensor.file) for tensor in model.tensors] == [
        ("blk.1.weight", (2, 8), shards[1]),
        ("blk.2.weight", (2, 8), shards[2]),
    ]
    for no, tensor in enumerate(model.tensors, start=0):
        data = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.size]
        assert data == struct.pack("<f", 0.0) * 16, no


def test_a_single_file_needs_no_number(tmp_path):
    path = header.write(tmp_path / "any name.gguf", {}, ("x",))
    header.write_shards(tmp_path, "other")
    assert find_files(path) == [path]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_names_a_missing_shard(shards, missing):
    shards[missing].unlink()
    left = shards[missing - 1]
    for model in (left, left.parent, f"{left.parent.parent}:UD-Q2_K_XL"):
        with pytest.raises(GGUFFileError, match=f"only 2 are there.*-0000{missing + 1}-of-00003.*Download the missing"):
            find_files(model)


def test_names_a_shard_of_another_split(shards):
    shards[2].rename(shards[2].with_name("GLM-5-UD-Q2_K_XL-00003-of-00004.gguf"))
    with pytest.raises(GGUFFileError, match=r"also has shards of another split, such as .*00003-of-00004"):
        find_files(shards[0])


def test_names_the_quants_of_a_mixed_folder(shards):
    header.write_shards(shards[0].parent, "GLM-5-Q8_0")
    with pytest.raises(GGUFFileError, match=r"2 models.*GLM-5-Q8_0' in 3 shards.*GLM-5-UD-Q2_K_XL.*one is wanted"):
        find_files(shards[0].parent)
    assert find_files(shards[1]) == shards


def test_names_what_there_is_instead_of_a_quant(shards):
    with pytest.raises(GGUFFileError, match=r"no GGUF file for 'Q4_K_M'. It has: 'UD-Q2_K_XL/GLM-5-UD-Q2_K_XL'"):
        find_files(f"{shards[0].parent.parent}:Q4_K_M")


def test_shards_of_two_models_under_one_name(shards, tmp_path):
    other = header.write_shards(tmp_path / "other", "GLM-5-UD-Q2_K_XL", count=4)
    shutil.copy(other[1], shards[1])
    with pytest.raises(GGUFFileError, match=r"is one of 4 shards \(split.count\), and 3 are given"):
        read_headers(shards)


def test_a_shard_under_the_name_of_another(shards):
    shutil.copy(shards[2], shards[1])
    with pytest.raises(GGUFFileError, match=r"shard 2 .* by its content and 1 by its name"):
        read_headers(shards)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"split.tensors.count": 2}, ("blk.2.weight",), "'blk.2.weight' is in .*00003.* and in .*00002.*mixed"),
        ({"split.tensors.count": 2}, ("a", "b"), "announces 2 tensors .*, and its 3 files have 3.*mixed"),
        ({"split.tensors.count": 9}, ("a",), "split.tensors.count is 2 in .*00001.* and 9 in .*00002.*mixed"),
    ],
)
def test_names_mixed_shards(shards, metadata, tensors, message):
    header.write(shards[1], {"split.no": 1, "split.count": 3, **metadata}, tensors)
    with pytest.raises(GGUFFileError, match=message):
        read_headers(shards)


def test_names_shards_of_two_architectures(shards):
    header.write(shards[1], {"split.no": 1, "split.count": 3}, ("blk.1.weight",), arch="qwen3")
    with pytest.raises(GGUFFileError, match=r"general.architecture is 'llama' in .*00001.* and 'qwen3' in .*00002"):
        read_headers(shards)


def test_a_shard_without_its_number(shards, tmp_path):
    path = Path(shutil.copy(shards[0], tmp_path / "model.gguf"))
    with pytest.raises(GGUFFileError, match=r"one of 3 shards .*, and 1 are given. Put all shards"):
        read_headers(find_files(path))


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "q8_0", ["a-Q8_0.gguf"]),
        (["a.Q4_K_M.gguf", "a.Q4_K_S.gguf"], "Q4_K_M", ["a.Q4_K_M.gguf"]),
        (["a-IQ4_NL.gguf", "a-UD-IQ4_NL.gguf"], "IQ4_NL", ["a-IQ4_NL.gguf"]),
        (["a-IQ4_NL.gguf", "a-UD-IQ4_NL.gguf"], "UD-IQ4_NL", ["a-UD-IQ4_NL.gguf"]),
        (["a-UD-Q2_K_XL.gguf", "a-Q2_K.gguf"], "Q2_K_XL", ["a-UD-Q2_K_XL.gguf"]),
        (["BF16/a-00002-of-00002.gguf", "BF16/a-00001-of-00002.gguf", "a-Q8_0.gguf"], "BF16",
         ["BF16/a-00001-of-00002.gguf", "BF16/a-00002-of-00002.gguf"]),
        (["a-Q8_0.gguf", "mmproj-Q8_0.gguf", "a-Q8_0.imatrix.gguf", "config.json"], "Q8_0", ["a-Q8_0.gguf"]),
        (["a.imatrix.Q8_0.gguf", "imatrix-Q8_0.gguf"], "Q8_0", ["a.imatrix.Q8_0.gguf"]),
        (["[x]*?-Q8_0.gguf"], "Q8_0", ["[x]*?-Q8_0.gguf"]),
    ],
)  # fmt: skip
def test_chooses_a_quant(names, quant, expected):
    assert choose(names, quant, "there") == expected


def test_the_folder_of_a_model(shards, tmp_path):
    repository = shards[0].parent.parent
    assert is_model_folder(repository)
    assert is_model_folder(shards[0].parent)
    assert not is_model_folder(tmp_path / "nothing")
    assert not is_model_folder(shards[0])
    (repository / "model.safetensors").touch()
    assert not is_model_folder(repository)
    companion = header.write(tmp_path / "vision" / "mmproj-F16.gguf", {})
    assert not is_model_folder(companion.parent)


def test_leaves_vllms_own_gguf_model_alone(tmp_path):
    path = header.write(tmp_path / "flint.gguf", {})
    assert is_model_folder(tmp_path)
    (path.parent / "config.json").write_text('{"model_type": "flint"}')
    assert not is_model_folder(tmp_path)


def test_odd_names_are_found_and_printed_in_ascii(tmp_path):
    folder = tmp_path / "a[b]*\n\N{SNOWMAN}"
    shards = header.write_shards(folder, "model [1]")
    assert find_files(folder) == shards
    shards[1].unlink()
    with pytest.raises(GGUFFileError) as error:
        find_files(folder)
    assert str(error.value).isascii()
    assert "\n" not in str(error.value)


def test_neither_file_nor_folder(tmp_path):
    with pytest.raises(GGUFFileError, match=r"does not exist. Give a GGUF file, a folder"):
        find_files(tmp_path / "typo.gguf")
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)  # whoever opens it would wait for ever
    for use in (find_files, read_header):
        with pytest.raises(GGUFFileError, match=r"neither a file|is not a file"):
            use(pipe)
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    (tmp_path / "up").symlink_to(tmp_path)
    with pytest.raises(GGUFFileError, match=r"has no GGUF file"):
        find_files(tmp_path)


# ---------------------------------------------------------------- the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A cache of the Hub that has one repository with two quants, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--GLM-5-GGUF"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for quant in ("UD-Q2_K_XL", "Q8_0"):
        header.write_shards(snapshot / quant, f"GLM-5-{quant}")
    return snapshot


def test_finds_a_quant_in_the_hubs_cache(hub):
    files = find_files("owner/GLM-5-GGUF:UD-Q2_K_XL")
    assert [path.relative_to(hub).as_posix() for path in files] == [
        f"UD-Q2_K_XL/GLM-5-UD-Q2_K_XL-0000{no}-of-00003.gguf" for no in (1, 2, 3)
    ]
    assert resolve("owner/GLM-5-GGUF:UD-Q2_K_XL") == str(files[0])


def test_a_partial_download_in_the_hubs_cache(hub):
    next(iter(sorted((hub / "Q8_0").iterdir()))).unlink()
    with pytest.raises(GGUFFileError, match=r"cached copy of owner/GLM-5-GGUF.*only 2 are there"):
        find_files("owner/GLM-5-GGUF:Q8_0")


def test_a_repository_that_is_not_in_the_hubs_cache(hub):
    with pytest.raises(GGUFFileError, match=r"owner/other is not in the Hub's cache, and HF_HUB_OFFLINE is set"):
        find_files("owner/other:Q8_0")


def test_downloads_the_files_of_one_quant_only(hub, monkeypatch):
    names = [path.relative_to(hub).as_posix() for path in sorted(hub.rglob("*.gguf"))]
    asked = {}

    def snapshot_download(repo, *, allow_patterns, **kwargs):
        asked[repo] = allow_patterns
        return str(hub)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(gguf_files, "_repository", lambda repo, revision: [*names, "config.json"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/GLM-5-GGUF:Q8_0") == str(hub / "Q8_0/GLM-5-Q8_0-00001-of-00003.gguf")
    assert asked == {"owner/GLM-5-GGUF": [name for name in names if name.startswith("Q8_0/")]}


def test_a_hub_that_does_not_answer_is_left_to_the_loader(hub, monkeypatch):
    def no_network(repo, revision):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(gguf_files, "_repository", no_network)
    assert resolve("owner/GLM-5-GGUF:Q8_0") == "owner/GLM-5-GGUF:Q8_0"
    assert resolve("owner/name/file.gguf") == "owner/name/file.gguf"


# ---------------------------------------------------------------- vLLM


def test_engine_arguments_take_every_form_offline(hub, monkeypatch):
    """Also owner/name:quant, which vLLM looks up in the cache before anything else."""
    seen = {}
    monkeypatch.setattr("vllm.engine.arg_utils.ModelConfig", lambda **kwargs: seen.update(kwargs))
    first = hub / "UD-Q2_K_XL" / "GLM-5-UD-Q2_K_XL-00001-of-00003.gguf"
    (hub / "config.json").write_text("{}")
    for model in ("owner/GLM-5-GGUF:UD-Q2_K_XL", str(first.parent), f"{hub}:UD-Q2_K_XL"):
        args = EngineArgs(model=model)
        args.create_model_config()
        assert seen["model_weights"] == str(first), model
        assert seen["served_model_name"] == [model]
        assert seen["quantization"] == seen["config_format"] == args.load_format == "gguf"
    # Above the folder of the quant: where the repository has its config.
    assert seen["model"] == str(hub)


def test_the_loader_checks_before_anything_is_read(shards):
    loader = get_model_loader(LoadConfig(load_format="gguf"))
    with shards[2].open("r+b") as file:
        file.truncate(shards[2].stat().st_size - 1)
    for model in (str(shards[0]), str(shards[0].parent)):
        config = SimpleNamespace(model_weights=model, model=model, revision=None)
        with pytest.raises(GGUFFileError, match=r"00003-of-00003.gguf': the file has .* bytes, and tensor .*download"):
            loader._prepare_adapter(config)


# ---------------------------------------------------------------- headers


def test_reads_what_gguf_py_writes(tmp_path):
    metadata = {
        "a.bool": True,
        "a.int": 7,
        "a.float": 0.5,
        "a.text": "\N{SNOWMAN}",
        "a.list": ["x", ""],
        "a.ints": [1, 2],
    }
    own, tensors = read_header(header.write(tmp_path / "x.gguf", metadata, ("one", "two")))
    assert {name: own[name] for name in metadata} == metadata
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert [(t.name, t.offset, t.size) for t in tensors] == [(t.name, t.data_offset, t.n_bytes) for t in reader.tensors]


def array(type_id: int, count: int, data: bytes = b"") -> bytes:
    return header.content((header.key("a", header.ARRAY, struct.pack("<IQ", type_id, count) + data),))


def value(type_id: int, data: bytes, name: str = "a") -> bytes:
    return header.content((header.key(name, type_id, data),))


def tensors(*entries: bytes) -> bytes:
    return header.content(tensors=entries, data=999)


WRONG = {
    "empty": (b"", "ends at byte 0, within the magic number.*download it again"),
    "magic": (header.content(magic=b"GGML"), "starts with b'GGML'"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer.*git lfs pull"),
    "version 1": (header.content(version=1), "version 1, and 2 and 3.*current llama.cpp"),
    "big-endian": (header.content(version=3 << 24), "big-endian.*gguf_convert_endian"),
    "many tensors": (header.content(n_tensors=2**63), "announces 9223372036854775808 tensors"),
    "many keys": (header.content(n_keys=2**40), "announces 1099511627776 metadata keys"),
    "too few keys": (header.content(n_keys=1), "the file ends at byte 24"),
    "huge string": (
        header.content((struct.pack("<Q", 2**64 - 1),), n_keys=1),
        "the file ends at byte 32, within the name",
    ),
    "huge array": (
        array(header.U8, 2**60),
        "has 1152921504606846976 values",
    ),
    "nested array": (
        array(header.ARRAY, 1, struct.pack("<IQ", header.ARRAY, 1) * 10_000),
        "is an array of arrays",
    ),
    "unknown type": (value(13, b""), "'a' has the unknown type 13"),
    "unknown array": (array(99, 1), "array of the unknown type 99"),
    "boolean": (value(header.BOOL, b"\2"), "is a boolean of 2"),
    "key twice": (header.content((header.u32("a", 1), header.u32("a", 2))), "'a' is there twice"),
    "reserved key": (header.content((header.u32("GGUF.version", 1),)), "'GGUF.version' is there twice or reserved"),
    "no key": (header.content((header.u32("", 1),)), "is '', which is no name"),
    "key not UTF-8": (header.content((header.key(b"\xff", header.U8, b"\0"),)), "is not UTF-8"),
    "key with a control character": (header.content((header.u32("a\x1b[2J", 1),)), r"'a\\x1b\[2J', which is no name"),
    "alignment": (header.content((header.u32("general.alignment", 24),)), "is 24, not a power of two"),
    "alignment of 0": (header.content((header.u32("general.alignment", 0),)), "is 0, not a power of two"),
    "alignment as text": (value(header.STRING, header.string("32"), "general.alignment"), "is '32'"),
    "tensor twice": (tensors(header.entry("x"), header.entry("x", offset=32)), "'x' is there twice"),
    "no dimensions": (tensors(header.entry("x", ())), "has 0 dimensions"),
    "many dimensions": (tensors(header.entry("x", (1,) * 5)), "has 5 dimensions"),
    "dimension of 0": (tensors(header.entry("x", (8, 0))), r"dimensions \[8, 0\]"),
    "huge dimensions": (tensors(header.entry("x", (2**63,) * 4)), "'x' would reach byte"),
    "product of 2**64": (tensors(header.entry("x", (2**32, 2**32))), "'x' would reach byte"),
    "part of a block": (tensors(header.entry("x", (40,), 8)), "Q8_0 .* whole blocks of 32"),
    "type of a fork": (tensors(header.entry("x", (256,), 139)), "'x' has the unknown type 139.*forks"),
    "removed type": (tensors(header.entry("x", (32,), 4)), "'x' has the unknown type 4"),
    "unaligned": (tensors(header.entry("x", offset=8)), "no multiple of 32"),
    "beyond the end": (tensors(header.entry("x", offset=2**62)), "'x' would reach byte"),
    "overlap": (tensors(header.entry("x", (16,)), header.entry("y", (8,), 0, 32)), "'x' and 'y' overlap"),
    "same place": (tensors(header.entry("x"), header.entry("y")), "'x' and 'y' overlap"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_what_is_wrong_with_a_header(tmp_path, case):
    data, message = WRONG[case]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFFileError, match=message) as error:
        read_header(path)
    assert "wrong.gguf" in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_header_may_not_fill_the_memory(tmp_path):
    """64 MB at most, whatever the file's size: this one is sparse and promises a text of 1 TB."""
    path = tmp_path / "x.gguf"
    path.write_bytes(header.content((header.key("a", header.STRING, struct.pack("<Q", 1 << 40)),)))
    with path.open("r+b") as file:
        file.truncate(2 << 40)
    with pytest.raises(GGUFFileError, match=r"longer than 67108864 bytes"):
        read_header(path)


def test_a_metadata_only_file_may_end_with_its_header(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(header.content((header.u32("a", 1),)))
    assert read_header(path) == ({"a": 1}, [])


# GLM-5.2-UD-IQ2_XXS as published: tensors and bytes of its shards.
PUBLISHED = [(0, 0), (412, 49105028960), (368, 49143176640), (368, 49143176640), (368, 49143176640), (293, 41914650304)]


def published_entries() -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """Return name, dimensions and type of its 1809 tensors, in the files' order."""
    entries = []
    for line in (Path(__file__).parent / "data" / "glm-5.2-ud-iq2_xxs.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, dims, type_name, blocks = line.split("\t")
        rest = tuple(int(dim) for dim in dims.split("x")), gguf.GGMLQuantizationType[type_name]
        if blocks == "-":
            entries.append((-1, name, name, *rest))
            continue
        for part in blocks.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            entries += [(block, name, f"blk.{block}.{name}", *rest) for block in numbers]
    return [entry[2:] for entry in sorted(entries)]


def byte_size(dims: tuple[int, ...], ggml_type: gguf.GGMLQuantizationType) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    return prod(dims) // block * block_bytes


def test_a_published_file(tmp_path):
    """Its sizes follow from the entries, and 4 KB less at the end of the last shard are noticed."""
    entries = iter(published_entries())
    files = []
    for no, (count, size) in enumerate(PUBLISHED):
        keys = (header.u32("split.no", no), header.u32("split.count", 6), header.u32("split.tensors.count", 1809))
        ours = list(islice(entries, count))
        sizes = [-(-byte_size(dims, ggml_type) // 32) * 32 for _, dims, ggml_type in ours]
        offsets = [0, *accumulate(sizes)]
        own = tuple(header.entry(*entry, offset) for entry, offset in zip(ours, offsets, strict=False))
        files.append(tmp_path / f"GLM-5.2-UD-IQ2_XXS-{no + 1:05d}-of-00006.gguf")
        files[-1].write_bytes(header.content(keys, own))
        if count:
            # split.no and split.count are 16 bits wide there.
            assert files[-1].stat().st_size + offsets[-1] == pytest.approx(size, abs=32)
            os.truncate(files[-1], size)  # sparse
    model = read_headers(find_files(files[3]))
    assert len(model.tensors) == 1809
    os.truncate(files[5], PUBLISHED[5][1] - 4096)
    with pytest.raises(GGUFFileError, match=r"00006-of-00006.gguf': the file has 41914646208 bytes, and tensor 'blk"):
        read_headers(files)
