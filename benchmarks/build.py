"""Time of a warm `make wheel` beside upstream's own way to a wheel with upstream's binaries.

    python -m benchmarks.build [--repetitions 5]

Both make the same patched vLLM out of the same upstream wheel on this machine, by turns, so that other load hits
both. Upstream's way is its setup.py with VLLM_PRECOMPILED_WHEEL_LOCATION, in an environment with the build
requirements of its pyproject.toml and a stand-in for torch, of which setup.py asks nothing but the CUDA version.
It is given its patched tree ready made and untimed, while `make wheel` applies the series, checks all files and
builds the GGUF plugin's wheel as well. Copying and hashing upstream's wheel is the floor for either.

Before anything is timed the two wheels are compared: members, contents, modes, metadata. A difference that is
not meant ends the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import build, fetch, pins, provenance
from scripts.layout import Layout, default_cache
from scripts.sources import Sources

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "build.json"

REQUIREMENTS = (
    "setuptools==80.10.2",
    "setuptools-scm==10.3.4",
    "setuptools-rust==1.13.0",
    "wheel==0.48.0",
    "packaging==26.4",
    "jinja2==3.1.6",
)
#: All that upstream's setup.py reads of torch.
TORCH = {
    "torch/__init__.py": 'from . import utils, version\n__version__ = "2.14.0"\n',
    "torch/version.py": 'cuda = "13.0"\nhip = None\nxpu = None\n',
    "torch/utils/__init__.py": "from . import cpp_extension\n",
    "torch/utils/cpp_extension.py": "CUDA_HOME = None\nROCM_HOME = None\n",
}


class Upstream:
    """Upstream's way to a wheel, in a folder of its own."""

    def __init__(self, folder: Path, sdist: Path, wheel: Path, sources: Sources, version: str) -> None:
        self.folder, self.sdist, self.wheel, self.sources, self.version = folder, sdist, wheel, sources, version
        self.dist = folder / "dist"
        self.tree = folder / "tree"
        for name, text in TORCH.items():
            path = folder / "stub" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        venv.create(folder / "venv", with_pip=True)
        self.python = folder / "venv" / "bin" / "python"
        run(str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS)

    def prepare(self) -> None:
        """A fresh patched tree: setup.py leaves extracted binaries and a build folder in the one it ran in."""
        for folder in (self.tree, self.dist):
            shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(self.sdist) as archive:
            archive.extractall(self.tree, filter="data")
        (top,) = self.tree.iterdir()
        for name in self.sources.deleted:
            (top / name).unlink()
        for name, file in self.sources.changed.items():
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            path.chmod(0o755 if file.executable else 0o644)

    def __call__(self) -> None:
        (top,) = self.tree.iterdir()
        tags = self.wheel.stem.split("-")
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "stub"),
            "VLLM_TARGET_DEVICE": "cuda",
            "VLLM_VERSION_OVERRIDE": self.version,
            "VLLM_PRECOMPILED_WHEEL_LOCATION": str(self.wheel),
            # The repository around must not be taken for vLLM's.
            "GIT_CEILING_DIRECTORIES": str(self.folder.parent),
        }
        options = (f"--py-limited-api={tags[2]}", f"--plat-name={tags[4]}", f"--dist-dir={self.dist}")
        run(str(self.python), "setup.py", "-q", "bdist_wheel", *options, cwd=top, env=environment)

    def result(self) -> Path:
        (wheel,) = self.dist.glob("*.whl")
        return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()

    layout = Layout(ROOT, default_cache())
    all_pins = pins.load(layout.pins)
    project = all_pins.project("vllm")
    host = build.host_platform()
    upstream_wheel = fetch.wheel(layout, project, host)
    _, sources = build.prepare(layout, project)
    layout.build.mkdir(exist_ok=True)
    folder = layout.build / "benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    upstream = Upstream(folder, fetch.sdist(layout, project), upstream_wheel, sources, project.local_version)

    def ours() -> None:
        run("make", "--silent", "wheel", f"PLATFORM={host}", cwd=ROOT)

    def copy_and_hash() -> None:
        target = folder / "copy.whl"
        with upstream_wheel.open("rb") as source, target.open("wb") as file:
            digest = hashlib.sha256()
            while piece := source.read(1 << 20):
                digest.update(piece)
                file.write(piece)
        target.unlink()

    # The first round warms what both read, and is the one that is compared.
    upstream.prepare()
    upstream()
    ours()
    (finished,) = build.target_folder(layout, host).glob(f"{project.package}-{project.local_version}-*.whl")
    differences = compare(finished, upstream.result(), provenance.path(project))

    seconds: dict[str, list[float]] = {"make_wheel": [], "upstream_setup_py": [], "copy_and_hash": []}
    for number in range(arguments.repetitions):
        upstream.prepare()
        for name, step in (("make_wheel", ours), ("upstream_setup_py", upstream), ("copy_and_hash", copy_and_hash)):
            seconds[name].append(timed(step))
            print(f"{number + 1}/{arguments.repetitions} {name}: {seconds[name][-1]:.2f} s", flush=True)
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    pairs = zip(seconds["upstream_setup_py"], seconds["make_wheel"], strict=True)
    ratios = sorted(theirs / our for theirs, our in pairs)
    result = {
        "what": "seconds for one wheel of the same patched vLLM on the same upstream binaries; make_wheel builds two",
        "hardware": hardware(),
        "versions": {
            "vllm": project.local_version,
            "python": platform.python_version(),
            "upstream_build_requirements": REQUIREMENTS,
        },
        "upstream_wheel": {"file": upstream_wheel.name, "bytes": upstream_wheel.stat().st_size},
        "expected_differences": differences,
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "median_seconds": medians,
        "upstream_over_make_wheel": {
            "median": round(statistics.median(ratios), 2),
            "lowest": round(ratios[0], 2),
            "highest": round(ratios[-1], 2),
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"median_seconds": medians, "ratio": result["upstream_over_make_wheel"]}))
    shutil.rmtree(folder)


def compare(ours: Path, theirs: Path, provenance_path: str) -> dict[str, list[str]]:
    """The differences between both wheels, all of them meant; any other ends the run."""
    with zipfile.ZipFile(ours) as our_zip, zipfile.ZipFile(theirs) as their_zip:
        our, their = ({info.filename: info for info in archive.infolist()} for archive in (our_zip, their_zip))
        (info,) = {name.split("/")[0] for name in our if ".dist-info/" in name}
        added = {provenance_path, f"{info}/licenses/{provenance.NOTICE}", f"{info}/sboms/vllm-sm120.cdx.json"}
        rewritten = {f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD", "vllm/_version.py"}
        differing = {name for name in our.keys() & their.keys() if our[name].CRC != their[name].CRC}
        modes = {name for name in our.keys() & their.keys() if our[name].external_attr != their[name].external_attr}
        metadata = {
            line
            for lines in (
                set(our_zip.read(f"{info}/METADATA").decode().splitlines())
                ^ set(their_zip.read(f"{info}/METADATA").decode().splitlines()),
            )
            for line in lines
        }
        problems = {
            "only in ours": our.keys() - their.keys() - added,
            "only in upstream's": their.keys() - our.keys(),
            "other content": differing - rewritten,
            "other mode": modes - {f"{info}/RECORD"},
            "other metadata": {line for line in metadata if "gguf" not in line and provenance.NOTICE not in line},
        }
    if any(problems.values()):
        text = "\n".join(f"{what}: {sorted(names)[:20]}" for what, names in problems.items() if names)
        sys.exit(f"the wheels differ where they must not:\n{text}")
    return {"added": sorted(added), "rewritten": sorted(differing), "metadata": sorted(metadata)}


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def run(*command: str, **options: Any) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout[-4000:]}{result.stderr[-4000:]}")


def hardware() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "machine": platform.machine(),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    main()
