"""How fast a GGUF file is loaded beside how fast the disk is read, and GLM-5's widths in float16 beside bfloat16.

    python -m benchmarks.gguf load --folder /fast/disk --results benchmarks/results
    python -m benchmarks.gguf dtypes --folder /fast/disk --results benchmarks/results

Both use a synthetic file with a few layers of GLM-5's widths and as many experts as `--size` allows, half of the
layers in Q8_0 and half in Q4_K. It is made when it is not there yet, of random blocks. Its text means nothing.

`load` empties the page cache, times `cat` of the file, empties the cache again and times the plugin's loader as an
engine calls it. Meanwhile the anonymous memory of that process is sampled: the file's own pages do not count.

`dtypes` times an engine in each dtype, with CUDA graphs, and adds how far off the tests' models were, where the results
of tests/gpu/test_gguf_engine.py are in the same folder. The engines start side by side, on one GPU if there is but one,
and are timed in turns, one measurement after the other. With each goes the share of the time in which the GPU works
(`..._gpu_share`, by a profiled round): where it is low, the host is timed. All that the engines print is shown at once,
and what they have measured is kept in a `.partial.json` until both have ended.
"""

import argparse
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from tests.gguf import tiny

GIB = 1 << 30
ALIGNMENT = 32
EXPERT_STEP = 16
NUM_LAYERS = 5  # the first one is dense
CHUNK_VALUES = 1 << 23  # random blocks that repeat
DEVIATION = 0.02
SAMPLE_SECONDS = 0.02

CONFIG = tiny.CONFIG | {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_experts_per_tok": 8,
    "q_lora_rank": 2048,
}

# By name: requests, tokens of a prompt, tokens generated. The prefill is as many tokens as one step takes.
MEASUREMENTS = {"prefill": (2, 4096, 1), "decode_1": (1, 16, 64), "decode_32": (32, 16, 64)}
ROUNDS = 5  # at most, of each measurement ...
ROUND_SECONDS = 8  # ... of which none starts later than that
ENGINE = {
    "skip_tokenizer_init": True,
    "max_model_len": 8192,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 4 * GIB,
    "enable_prefix_caching": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 32]},
}


def tensors(config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Q]]:
    """Return shapes, in torch's order, and types by name, in the order of a file."""
    from vllm_gguf_plugin.weights_adapter.glm_dsa_tensors import target_tensors

    found = {}
    for entry in target_tensors(SimpleNamespace(**config), 0):
        layer = int(entry.name.split(".")[1]) if entry.name.startswith("blk.") else 0
        weight_type = Q.Q8_0 if layer % 2 else Q.Q4_K
        if len(entry.shape) == 1 or any(part in entry.name for part in tiny.STORED_AS_FLOAT):
            weight_type = Q.F32
        elif entry.shape[-1] % gguf.GGML_QUANT_SIZES[weight_type][0]:
            weight_type = Q.Q8_0
        found[entry.name] = entry.shape, weight_type
    return found


def num_bytes(shape: tuple[int, ...], weight_type: Q) -> int:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[weight_type]
    return int(np.prod(shape, dtype=np.int64)) // block_size * block_bytes


def choose_config(size: int) -> dict[str, Any]:
    """Return the configuration with the most experts whose file has at most `size` bytes."""

    def total(experts: int) -> int:
        config = CONFIG | {"n_routed_experts": experts}
        return sum(num_bytes(*tensor) for tensor in tensors(config).values())

    experts = EXPERT_STEP
    while experts < 256 and total(experts + EXPERT_STEP) <= size:
        experts += EXPERT_STEP
    return CONFIG | {"n_routed_experts": experts}


def write(path: Path, config: dict[str, Any]) -> None:
    """Write a file of random blocks, and see it to the disk."""
    rng = np.random.default_rng(0)
    values = DEVIATION * rng.standard_normal(CHUNK_VALUES, np.float32)
    chunks = {
        weight_type: memoryview(tiny.quantize(values, weight_type, rng).tobytes())
        for weight_type in (Q.F32, Q.Q8_0, Q.Q4_K)
    }
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "glm-dsa")
    tiny._add_metadata(writer, "glm-dsa", SimpleNamespace(**config))
    for name, (shape, weight_type) in tensors(config).items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes(shape, weight_type), weight_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with unfinished.open("ab") as file:
        for shape, weight_type in tensors(config).values():
            file.write(bytes(-file.tell() % ALIGNMENT))
            left, chunk = num_bytes(shape, weight_type), chunks[weight_type]
            while left:
                left -= file.write(chunk[: min(left, len(chunk))])
        file.write(bytes(-file.tell() % ALIGNMENT))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def ensure_file(folder: Path, size: int) -> Path:
    config = choose_config(size)
    path = folder / f"synthetic-glm-{config['n_routed_experts']}-experts.gguf"
    if not path.exists():
        start = time.perf_counter()
        write(path, config)
        print(f"{path}: {path.stat().st_size / GIB:.1f} GiB made in {time.perf_counter() - start:.0f} s", flush=True)
    return path


def drop_cache(path: Path) -> str:
    """Take a file out of the page cache; return by which means."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return "posix_fadvise"
    return "drop_caches"


def cat_seconds(path: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def rss_anon(pid: int) -> int:
    """Return a process's anonymous memory in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s*(\d+) kB", status)  # a process that has ended has none
    return int(found[1]) << 10 if found else 0


def run_loader(path: Path, dtype: str, read_ahead: bool) -> None:
    """In a process of its own: start an engine, print when loading began and ended, and end."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm_gguf_plugin.read_ahead
    from vllm import LLM
    from vllm_gguf_plugin.loader import GGUFModelLoader

    if not read_ahead:
        vllm_gguf_plugin.read_ahead.NUM_THREADS = 0
    load_model = GGUFModelLoader.load_model

    def timed(*args, **kwargs):
        start = time.time()
        load_model(*args, **kwargs)
        torch.cuda.synchronize()
        print(json.dumps({"start": start, "end": time.time()}), flush=True)
        sys.stderr.flush()
        os._exit(0)

    GGUFModelLoader.load_model = timed
    LLM(str(path), dtype=dtype, **ENGINE | {"enforce_eager": True})


def measure_load(path: Path, dtype: str, read_ahead: bool) -> dict[str, Any]:
    """Load a file that is not in the page cache, and sample the memory of the process that does."""
    from vllm_gguf_plugin.gguf_files import find_files, read_headers

    dropped = drop_cache(path)
    disk_seconds = cat_seconds(path)
    print(f"cat: {disk_seconds:.1f} s", flush=True)
    drop_cache(path)
    command = [sys.executable, "-m", "benchmarks.gguf", "run-loader", path, "--dtype", dtype]
    command += [] if read_ahead else ["--no-read-ahead"]
    samples: list[tuple[float, int]] = []
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                samples.append((time.time(), rss_anon(process.pid)))
                time.sleep(SAMPLE_SECONDS)
        finally:
            interrupted = process.poll() is None
            process.kill()
            process.wait()
            output.seek(0)
            log = output.read()
            if interrupted:
                print(log[-10_000:], flush=True)
    found = re.findall(r'^\{"start".*\}$', log, re.MULTILINE)
    if process.returncode or len(found) != 1:
        sys.exit(f"the loader ended with {process.returncode}:\n{log[-10_000:]}")
    times = json.loads(found[0])
    seconds = times["end"] - times["start"]
    before = [memory for moment, memory in samples if moment < times["start"]][-1]
    peak = max(memory for moment, memory in samples if times["start"] <= moment <= times["end"])
    size = path.stat().st_size
    largest = max(tensor.size for tensor in read_headers(find_files(str(path))).tensors)
    return {
        "dtype": dtype,
        "read_ahead": read_ahead,
        "gib": round(size / GIB, 2),
        "largest_tensor_gib": round(largest / GIB, 2),
        "cache_emptied_by": dropped,
        "cat_seconds": round(disk_seconds, 2),
        "cat_gib_per_s": round(size / GIB / disk_seconds, 2),
        "load_seconds": round(seconds, 2),
        "load_gib_per_s": round(size / GIB / seconds, 2),
        "ratio": round(disk_seconds / seconds, 3),
        "rss_anon_before_gib": round(before / GIB, 2),
        "rss_anon_peak_gib": round(peak / GIB, 2),
        "progress_bar": "Loading GGUF tensors: 100%" in log,
    }


def used_memory(worker) -> dict[str, float]:
    """Return the GPU memory of a worker in GiB: its weights, and the most that it has had beside the KV cache."""
    import torch

    return {
        "weights_gib": round(worker.model_runner.model_memory_usage / 2**30, 2),
        "peak_gib": round(
            (torch.cuda.max_memory_allocated() - worker.vllm_config.cache_config.kv_cache_memory_bytes) / 2**30, 2
        ),
    }


def run_engine(path: Path, dtype: str) -> None:
    """In a process of its own: start an engine, and print what is measured, a measurement for each line of input."""

    def report(**fields: Any) -> None:
        print(json.dumps({"dtype": dtype, **fields}), flush=True)

    from vllm import LLM

    from benchmarks import profile
    from tests.gpu.run_engine import describe, serve

    llm = LLM(str(path), dtype=dtype, **ENGINE)
    worker = llm.collective_rpc(describe)[0]
    report(backend=worker["backends"][0], graphs=worker["graphs"], cuda_kernels=worker["gguf_cuda"])

    def seconds(count: int, length: int, num_tokens: int) -> float:
        rng = random.Random(length)
        prompts = [[rng.randrange(CONFIG["vocab_size"]) for _ in range(length)] for _ in range(count)]
        start = time.perf_counter()
        serve(llm, [{"prompt": prompt, "num_generated": num_tokens} for prompt in prompts], logprobs=False)
        return time.perf_counter() - start

    def measure(name: str, count: int, length: int, num_tokens: int) -> None:
        """Report tokens per second: of prompts, or, if more than one is generated, of those after the first."""
        print(f"{dtype}: {name}: {seconds(count, length, num_tokens):.1f} s the first time", flush=True)
        times: list[float] = []
        whole: list[float] = []
        end = time.perf_counter() + ROUND_SECONDS
        while not times or (len(times) < ROUNDS and time.perf_counter() < end):
            first = 0.0 if num_tokens == 1 else seconds(count, length, 1)
            whole.append(seconds(count, length, num_tokens))
            times.append(whole[-1] - first)
        llm.collective_rpc(profile.start)
        seconds(count, length, num_tokens)
        gpu_share = llm.collective_rpc(profile.stop)[0] / median(whole)
        tokens = count * (length if num_tokens == 1 else num_tokens - 1)
        report(
            **{
                f"{name}_tokens_per_s": round(tokens / median(times), 1),
                f"{name}_rounds": len(times),
                f"{name}_gpu_share": round(gpu_share, 3),
            }
        )

    for name, sizes in MEASUREMENTS.items():
        sys.stdin.readline()
        measure(name, *sizes)
    report(**llm.collective_rpc(used_memory)[0])


class Child:
    """A process that prints fields of a row as JSON and anything else, all of which is shown at once."""

    def __init__(self, name: str, command: list[Any], environment: dict[str, str]) -> None:
        self.name = name
        self.row: dict[str, Any] = {}
        self._reported: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the process has ended
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            print(f"[{self.name}] {line.rstrip()}", flush=True)
            if line.startswith('{"dtype"'):
                self.row |= json.loads(line)
                self._reported.put(True)
        self._reported.put(False)

    def wait(self) -> bool:
        """Wait until fields are reported; return False if the process has ended instead, or exit if it has failed."""
        if self._reported.get():
            return True
        if self._process.wait():
            sys.exit(f"the engine in {self.name} ended with {self._process.returncode}")
        return False

    def go(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """End the process and those that it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


def accuracy(results: Path | None, dtype: str) -> dict[str, float | None]:
    """Return the largest rms errors of a logit of the tests' quantised files, up to top-k and past it."""
    from tests.gpu.results import gpu_slug

    path = results and results / f"gguf-{gpu_slug()}.json"
    rows = json.loads(path.read_text())["rows"] if path and path.exists() else []
    errors = {}
    for what, name in (("prompt", "error"), ("prompt_past_topk", "error_past_topk")):
        found = [
            row["error"]
            for row in rows
            if (row["dtype"], row["what"]) == (dtype, what) and row["model"] in ("mixed, GGUF", "Q8_0, GGUF")
        ]
        errors[name] = max(found, default=None)
    return errors


def measure_dtypes(path: Path, results: Path | None, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measure a row for each dtype, and `keep` the rows after each step."""
    from tests.gpu.engine import visible_gpus

    gpus = visible_gpus()
    children: list[Child] = []
    try:
        for index, dtype in enumerate(("float16", "bfloat16")):
            command = [sys.executable, "-m", "benchmarks.gguf", "run-engine", path, "--dtype", dtype]
            environment = {
                "CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)],
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `describe` and `used_memory`
            }
            children.append(Child(dtype, command, environment))
        for child in children:  # until all have started
            child.wait()
        for _ in MEASUREMENTS:
            for child in children:
                child.go()
                child.wait()
                keep([each.row | accuracy(results, each.name) for each in children])
        for child in children:  # what it reports at the end
            while child.wait():
                keep([each.row | accuracy(results, each.name) for each in children])
    finally:
        for child in children:
            child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("load", "dtypes"):
        part = parts.add_parser(name)
        part.add_argument("--folder", type=Path, required=True, help="where the synthetic file is, or is made")
        part.add_argument("--size", type=float, default=20, help="of the file, in GB (10^9 bytes) at most")
        part.add_argument("--results", type=Path, help="folder to write the JSON file to")
    parts.choices["load"].add_argument("--dtype", default="float16")
    for name in ("run-loader", "run-engine"):  # what the other two start
        part = parts.add_parser(name)
        part.add_argument("path", type=Path)
        part.add_argument("--dtype", required=True)
    for name in ("load", "run-loader"):
        parts.choices[name].add_argument("--no-read-ahead", action="store_true", help="to see what it is good for")
    args = parser.parse_args()
    if args.part == "run-loader":
        return run_loader(args.path, args.dtype, not args.no_read_ahead)
    if args.part == "run-engine":
        return run_engine(args.path, args.dtype)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    from tests.gpu.results import gpu_slug, write_results

    rows: list[dict[str, Any]] = []
    results = args.results and args.results / f"gguf-{args.part}-{gpu_slug()}.json"
    partial = results and results.with_suffix(".partial.json")

    def keep(measured: list[dict[str, Any]]) -> None:
        rows[:] = measured
        if partial:
            write_results(partial, rows)

    path = ensure_file(args.folder, int(args.size * 1e9))
    if args.part == "load":
        keep([measure_load(path, args.dtype, not args.no_read_ahead)])
    else:
        measure_dtypes(path, args.results, keep)
    for row in rows:
        print(row)
    if partial:
        partial.replace(results)
    return None


if __name__ == "__main__":
    main()
