# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm doctor`: does an attention backend fit, which, and what to do if none does.

It runs on a machine without a GPU and without the model's weights. Nothing heavy
is imported before the question is understood.
"""

import os
import sys

FITS, BAD_INPUT, NOTHING_FITS = 0, 2, 3


def main(argv: list[str] | None = None) -> int:
    """Answer the question on the command line; returns the exit code.

    That is 0 if something fits (with --log: no known failure was found, with
    --selftest: it passed), 3 if not, 2 if the question is not understood.
    """
    from vllm.sm120.doctor.arguments import parse
    from vllm.sm120.doctor.facts import DoctorError

    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        if arguments.log:
            from vllm.sm120.doctor import log as task
        elif arguments.selftest:
            from vllm.sm120.doctor import selftest as task
        else:
            from vllm.sm120.doctor import diagnosis as task
        code = task.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough: `vllm doctor ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell says SIGPIPE
    except DoctorError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.cure:
            print(f"cure: {error.cure}", file=sys.stderr)
        return BAD_INPUT
