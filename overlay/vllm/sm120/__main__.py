# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Print the provenance of this vLLM and, if there is one, of the GGUF plugin.

`python -m vllm.sm120 doctor ...` is `vllm doctor ...`.
"""

import argparse
import json
import sys
from typing import Any

from vllm.sm120 import ProvenanceError, plugin_provenance, provenance


def main() -> int:
    if sys.argv[1:2] == ["doctor"]:
        from vllm.sm120.doctor import main as doctor

        return doctor(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m vllm.sm120", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    arguments = parser.parse_args()

    builds = []
    status = 0
    for read in (provenance, plugin_provenance):
        try:
            builds.append(read())
        except ProvenanceError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    builds = [build for build in builds if build is not None]
    if arguments.json:
        print(json.dumps(builds, indent=2))
    else:
        print("\n\n".join(render(build) for build in builds))
    return status


def render(build: dict[str, Any]) -> str:
    """Return one build's provenance as text."""
    upstream = build["upstream"]
    commit = f", commit {upstream['commit']}" if upstream["commit"] else ""
    lines = [
        f"{build['name']} {build['version']} ({build['platform']})",
        f"  upstream: {upstream['repository']} {upstream['tag']}{commit}",
        f"  made from: {upstream['wheel']['file']}",
        f"  tree: {build['tree']}",
        f"  overlay: {len(build['overlay'])} files",
        f"  patches: {len(build['patches'])}",
    ]
    for patch in build["patches"]:
        link = f", {patch['upstream_link']}" if patch["upstream_link"] else ""
        lines += [
            f"    {patch['name']}: {patch['subject']}",
            f"      upstream: {patch['upstream_status']}{link}",
            f"      goes when: {patch['remove_when']}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
