"""Real engines: what to run, several at a time on each GPU, and what came out."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.gpu.nvcc import change_nvcc

HERE = Path(__file__).parent

# A cold start with CUDA graphs takes two minutes, longer beside others.
TIMEOUT = 480

# The KV cache has a fixed size, so engines that start side by side do not measure each other's memory.
COMMON_OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 2 << 30,
    "enable_prefix_caching": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    "jit_monitor_verbose": True,
}

# The indexer's logits by Triton's kernels where DeepGEMM could serve as well.
TRITON_INDEXER = {"VLLM_SPARSE_INDEXER_LOGITS": "triton"}

# What uses NVLink multicast, which not every host with NVLink permits.
_NO_MULTICAST = {
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@dataclass(frozen=True, eq=False)
class Run:
    """One engine in processes of its own, and what it is asked."""

    name: str
    dtype: str
    backend: str | None  # None: the selection chooses
    rounds: list[list[dict[str, Any]]]  # requests of run_engine.py
    options: dict[str, Any] = field(default_factory=dict)  # of vllm.LLM
    kv: str = "auto"
    model: str = "tiny-glm"
    capability: str | None = None  # that vLLM is made to believe in
    needs_capability: int | None = None  # major version of the GPU that the backend needs
    logprobs: bool = True
    recompile: bool = False
    select: dict[str, Any] | None = None  # a request for which to keep what the indexers select; without CUDA graphs
    drafts: list[dict[str, Any]] | None = None  # requests for which to keep the draft model's logits; likewise
    stock: bool = False  # of the unpatched vLLM
    environment: dict[str, str] = field(default_factory=dict)
    nvcc: str = "as it is"  # or "missing", or the release that it is to say
    deep_gemm: bool = True  # False: its functions raise

    def __str__(self) -> str:
        return self.name

    @property
    def num_gpus(self) -> int:
        return self.options.get("tensor_parallel_size", 1) * self.options.get("pipeline_parallel_size", 1)

    def job(self, model: Path) -> dict[str, Any]:
        backend = {"attention_backend": self.backend} if self.backend else {}
        return {
            "engine": {
                "model": str(model),
                "dtype": self.dtype,
                "kv_cache_dtype": self.kv,
                **backend,
                **COMMON_OPTIONS,
                **self.options,
            },
            "rounds": self.rounds,
            "logprobs": self.logprobs,
            "recompile": self.recompile,
            "select": self.select,
            "drafts": self.drafts,
        }


@dataclass
class Outcome:
    """How a run ended."""

    returncode: int
    log: str
    result: dict[str, Any] | None  # see run_engine.py

    @property
    def excerpt(self) -> str:
        """Where the log first speaks of an error, and its end: what an engine says of the others' errors is long."""
        first = re.search(r"^.*(?:ERROR|Traceback|Segmentation)", self.log, re.MULTILINE)
        start = first.start() if first else len(self.log)
        return f"{self.log[start : start + 6000]}\n[...]\n{self.log[-4000:]}"

    @property
    def indexer(self) -> str:
        """Whose kernels compute the sparse indexer's logits, and why, as the log says."""
        lines = set(re.findall(r"Sparse indexer logits: (.*?\))", self.log))
        assert len(lines) == 1, f"the log names {sorted(lines)}:\n{self.excerpt}"
        return lines.pop()


class Engines:
    """Executes runs, `workers` at a time, spread over the GPUs; those that take more than one of them one by one."""

    def __init__(self, models: dict[str, Path], folder: Path, workers: int, stock_site: Path | None) -> None:
        self._stock_site = stock_site
        self._models = models
        self._folder = folder
        self._executors = {1: ThreadPoolExecutor(workers), 2: ThreadPoolExecutor(1)}
        self._gpus: queue.SimpleQueue[str] = queue.SimpleQueue()  # a place on a GPU for each worker
        for worker in range(workers):
            self._gpus.put(visible_gpus()[worker % len(visible_gpus())])
        self._futures: dict[Run, Future[Outcome]] = {}
        self._processes: set[subprocess.Popen] = set()

    def can_run(self, run: Run) -> bool:
        """Return whether this machine has what a run needs."""
        if run.stock and self._stock_site is None:
            return False
        return run.needs_capability in (None, torch.cuda.get_device_capability()[0])

    def start(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run not in self._futures:
                self._futures[run] = self._executors[run.num_gpus].submit(self._execute, run)

    def outcome(self, run: Run) -> Outcome:
        """Return how a run ended, once it has."""
        self.start([run])
        return self._futures[run].result()

    def result(self, run: Run) -> dict[str, Any]:
        """Return what a run wrote; fail with its log if it did not."""
        outcome = self.outcome(run)
        assert outcome.result is not None, f"{run} ended with {outcome.returncode}:\n{outcome.excerpt}"
        return outcome.result

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            _kill(process)

    def _execute(self, run: Run) -> Outcome:
        if run.num_gpus > 1:
            return self._serve(run, {})
        gpu = self._gpus.get()
        try:
            return self._serve(run, {"CUDA_VISIBLE_DEVICES": gpu})
        finally:
            self._gpus.put(gpu)

    def _serve(self, run: Run, environment: dict[str, str]) -> Outcome:
        folder = self._folder / "".join(c if c.isalnum() else "-" for c in run.name)
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(run.job(self._models[run.model])))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, HERE / "run_engine.py", "request.json", "result.json"],
                cwd=folder,
                env=self._environment(run, folder) | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.add(process)
            try:
                process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                log.write(f"\nended after {TIMEOUT} s")
            finally:
                _kill(process)
                self._processes.discard(process)
        result = folder / "result.json"
        return Outcome(
            returncode=process.returncode,
            log=(folder / "log").read_text(errors="replace"),
            result=json.loads(result.read_text()) if process.returncode == 0 else None,
        )

    def _environment(self, run: Run, folder: Path) -> dict[str, str]:
        env = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "1", **run.environment}
        path = [str(self._stock_site)] if run.stock else []
        if run.capability is not None:
            path.append(str(HERE / "fake_capability"))
            env["FAKE_CAPABILITY"] = run.capability
        if not run.deep_gemm:
            path.append(str(HERE / "raising_deep_gemm"))
        if run.nvcc != "as it is":
            change_nvcc(env, folder, None if run.nvcc == "missing" else run.nvcc)
        if run.num_gpus > 1:
            env |= _NO_MULTICAST
        env["PYTHONPATH"] = os.pathsep.join([*path, env.get("PYTHONPATH", "")])
        return env


def visible_gpus() -> list[str]:
    """Return the GPUs of this process as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(max(1, torch.cuda.device_count()))]


def _kill(process: subprocess.Popen) -> None:
    """End a run's processes, those that its engine started included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
