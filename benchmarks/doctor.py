"""CPU time of `vllm doctor`: new processes, a warm page cache, two cores.

    python -m benchmarks.doctor [--repetitions 5]

After `make install`. Each question is asked once to warm the cache, and its answer is checked; a wrong one ends the
run. CPU time is user and system time of the process and of what it starts. The load average beside it tells whether
something else ran: shared caches and cores make CPU times longer, too. The last rows measure imports alone: no answer
can be faster than `import vllm`, half of which is `import torch`, and one about a model needs transformers as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.build import hardware

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/doctor.json"
TESTS = ROOT / "tests/doctor"
LIMIT = 8.0  # CPU seconds that a question about a local config may take
CORES = 2
DOCTOR = ["-m", "vllm.sm120", "doctor", "--json"]
CONFIGS = {
    "GLM-5 in float16 on 12.0": ["glm5", "--capability", "12.0", "--dtype", "float16", "-tp", "8"],
    "GLM-5 in bfloat16 on an H200": ["glm5", "--gpu", "H200", "--dtype", "bfloat16", "-tp", "8"],
    "DeepSeek-V3.2 on 8.0": ["deepseek_v32", "--capability", "8.0", "--dtype", "bfloat16"],
    "a dense Llama on an RTX 5090": ["llama", "--gpu", "RTX 5090"],
}
FLOORS = ("import torch", "import vllm", "import vllm, transformers")


@dataclass(frozen=True)
class Question:
    arguments: list[str]  # of Python
    exit: int | None = None  # the exit codes that are right; None for those of a verdict, 0 and 3


def questions() -> dict[str, Question]:
    asked = {
        name: Question([*DOCTOR, str(TESTS / "configs" / model), *options])
        for name, (model, *options) in CONFIGS.items()
    }
    asked["a log"] = Question([*DOCTOR, "--log", str(TESTS / "logs/no-backend-upstream.log")], exit=3)
    return asked | {f"floor: {code}": Question(["-c", code], exit=0) for code in FLOORS}


def ask(question: Question, output: Path) -> tuple[float, float]:
    """Return the CPU and the elapsed seconds of one process; its answer goes to `output`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 1, output, flags, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, output.with_suffix(".err"), flags, 0o600),
    ]
    start = os.times().elapsed
    child = os.posix_spawn(sys.executable, [sys.executable, *question.arguments], os.environ, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    elapsed = os.times().elapsed - start
    code = os.waitstatus_to_exitcode(status)
    if code not in ((0, 3) if question.exit is None else (question.exit,)):
        sys.exit(f"{question.arguments} ended with {code}:\n{output.with_suffix('.err').read_text()[-4000:]}")
    return usage.ru_utime + usage.ru_stime, elapsed


def check(answer: str) -> str | None:
    """Return the backend that the doctor chose."""
    report = json.loads(answer)
    chosen = report["chosen"]
    unknown = [
        row["why"]
        for section in ("indexer", "kernels", "memory")
        for row in report[section]
        if row["value"] == "not found out"
    ]
    if chosen is None or unknown:
        sys.exit(f"wrong answer, no time: chosen {chosen}, not found out: {unknown}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    load = os.getloadavg()[0]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answer"
        for name, question in questions().items():
            ask(question, output)
            row: dict[str, object] = {"chosen": check(output.read_text())} if question.exit is None else {}
            runs = [ask(question, output) for _ in range(arguments.repetitions)]
            for what, values in zip(("cpu_seconds", "elapsed_seconds"), zip(*runs, strict=True), strict=True):
                row[what] = [round(value, 2) for value in values]
                row[f"median_{what}"] = round(statistics.median(values), 2)
            if question.exit is None:
                row["within_limit"] = row["median_cpu_seconds"] <= LIMIT
            rows[name] = row
            print(f"{row['median_cpu_seconds']:6.2f} s CPU  {name}", flush=True)
    packages = ("vllm", "torch", "transformers")
    result = {
        "what": f"a new process with a warm page cache on {len(cores)} cores; a local config may take {LIMIT} s of CPU",
        "hardware": hardware(),
        "load_average_before": round(load, 2),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if load > 0.5:
        print(f"the load average was {load:.1f} before this began: with nothing else running the times are shorter")


if __name__ == "__main__":
    main()
