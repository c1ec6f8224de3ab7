# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command line of the doctor: the options of `vllm serve` that change a choice.

They are declared here once more because vLLM's own parser needs a GPU. What they
may hold is checked by vLLM.
"""

import argparse
import re
import shlex
from collections.abc import Mapping
from typing import Any

# What `vllm serve` is given as well, in the order of the command to run.
SERVE_OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": {},
    "kv_cache_dtype": {},
    "tensor_parallel_size": {"type": int, "short": "-tp"},
    "decode_context_parallel_size": {"type": int, "short": "-dcp"},
    "quantization": {"short": "-q"},
    "attention_backend": {"type": str.upper},
    "block_size": {"type": int},
    "max_model_len": {},
    "gpu_memory_utilization": {"type": float},
    "speculative_config": {"metavar": "JSON"},
    "hf_config_path": {},
    "tokenizer": {},
    "revision": {},
    "trust_remote_code": {"action": "store_true"},
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options; those of vLLM that were not given are None.

    Raises:
        SystemExit: The command line is wrong (code 2), or it asked for help (0).
    """
    parser = _parser()
    # vLLM takes --kv_cache_dtype as well.
    argv = [
        re.sub(r"^--[a-z_]+", lambda match: match[0].replace("_", "-"), word)
        for word in argv
    ]
    arguments = parser.parse_args(argv)
    tasks = [arguments.model, arguments.log, arguments.selftest]
    if sum(map(bool, tasks)) != 1:
        parser.error("give a MODEL, or --log FILE, or --selftest")
    return arguments


def flag(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def command(verb: str, model: str, options: Mapping[str, object]) -> str:
    """Return `vllm VERB MODEL` with the options that are set, for a shell."""
    words = ["vllm", verb, model]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(flag(name))
        if value is not True:
            words.append(str(value))
    return shlex.join(words)


def _capability(text: str) -> tuple[int, int]:
    """Parse 12.0, and sm_120 or 120 as compilers write it."""
    digits = text.lower().removeprefix("sm").lstrip("_")
    major, dot, minor = digits.partition(".")
    if not dot:
        major, minor = digits[:-1], digits[-1:]
    if not (major.isdecimal() and minor.isdecimal() and len(minor) == 1):
        raise argparse.ArgumentTypeError(f"{text!r} is none, expected e.g. 12.0")
    return int(major), int(minor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm doctor",
        description="Which attention backend fits a model on a GPU, why the others "
        "do not, and what to do if none does. Needs no GPU and no weights.",
        epilog="Exit codes: 0 it fits, 3 nothing fits, 2 the question is not "
        "understood. With --log: 0 no known failure, 3 one was found. With "
        "--selftest: 0 passed, 3 failed.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="as for vllm serve (folder, repository id, .gguf), or a config.json",
    )
    gpu = parser.add_argument_group("the GPU (by default the one of this machine)")
    either = gpu.add_mutually_exclusive_group()
    either.add_argument(
        "--capability", type=_capability, help="its compute capability, e.g. 12.0"
    )
    either.add_argument("--gpu", metavar="NAME", help='e.g. "RTX PRO 6000"')
    gpu.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of one GPU in GiB"
    )

    serve = parser.add_argument_group("options of vllm serve")
    for name, settings in SERVE_OPTIONS.items():
        flags = [flag(name), *filter(None, [settings.get("short")])]
        settings = {key: settings[key] for key in settings if key != "short"}
        serve.add_argument(*flags, **settings)

    other = parser.add_argument_group("in place of a model")
    other.add_argument("--log", metavar="FILE", help="explain the log of a vLLM")
    other.add_argument(
        "--selftest", action="store_true", help="test and time this machine's GPU"
    )
    other.add_argument(
        "--output",
        metavar="FILE",
        help="with --selftest: where its JSON goes (by default vllm-selftest-GPU.json)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, schema 1")
    return parser
