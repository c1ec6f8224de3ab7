#!/usr/bin/env python3
"""Join result files of parts of a benchmark, run one by one, or at the same time on a GPU each. Needs no GPU.

    python -m benchmarks.join bfloat16.json float16.json --output benchmarks/results/sparse-mla-h200.json

The parts must be of the same hardware, versions, commit and day, and no row may be in two of them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.workload import DTYPES, ROW_BYTES
from tests.gpu.results import write_result

#: What makes a row another one.
IDENTITY = ("kv", "dtype", "tokens", "indices", "heads", "capability")
SAME = ("hardware", "versions", "commit", "date")


class PartsError(Exception):
    """The files are not parts of one run."""


def join(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return header and rows of one result, of those of sparse MLA by the names of their files.

    Raises:
        PartsError: they differ in what one run has in common, or have a row in common.

    """
    names = list(parts)
    first = parts[names[0]]
    rows: list[dict[str, Any]] = []
    seen: dict[tuple[Any, ...], str] = {}
    rates: dict[str, float] = {}
    for name, part in parts.items():
        for field in SAME:
            if part.get(field) != first.get(field):
                raise PartsError(f"{name}: its {field} is {part.get(field)}, that of {names[0]} {first.get(field)}")
        for row in part["rows"]:
            identity = tuple(row[field] for field in IDENTITY)
            if identity in seen:
                raise PartsError(f"{name}: its row {identity} is in {seen[identity]} as well")
            seen[identity] = name
            rates[row["dtype"]] = part["matmul_tflops"][row["dtype"]]  # of the GPU that the rows were measured on
        rows += part["rows"]
    order = list(ROW_BYTES), list(DTYPES)
    rows.sort(key=lambda row: (order[0].index(row["kv"]), order[1].index(row["dtype"])))  # stable within a part
    joined = {key: value for key, value in first.items() if key != "rows"}
    joined["parts"] = len(parts)
    joined["matmul_tflops"] = rates
    joined["peers_left_out"] = {name: why for part in parts.values() for name, why in part["peers_left_out"].items()}
    joined["failures"] = [failure for part in parts.values() for failure in part["failures"]]
    return joined, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+", help="files that benchmarks.sparse_mla --output wrote")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        header, rows = join({str(path): json.loads(path.read_text()) for path in args.parts})
    except PartsError as problem:
        sys.exit(f"error: {problem}\ncure: join parts that were run together")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        sys.exit(f"error: not a result of benchmarks.sparse_mla: {problem}\ncure: name the files its --output wrote")
    write_result(args.output, header, rows)
    print(f"written: {args.output}, {len(rows)} rows")


if __name__ == "__main__":
    main()
