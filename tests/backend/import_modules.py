"""Import modules from the working folder as on a GPU machine, and write {name: error} to a JSON file.

    PYTHONPATH=. python tests/backend/import_modules.py results.json vllm.envs ...

The error is empty where there is none. A process of its own, because fake_gpu.py changes vLLM for good.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

import fake_gpu


def error_of_import(name: str, folder: Path) -> str:
    try:
        path = importlib.import_module(name).__file__
    except BaseException as error:  # whatever it raises, the other modules are of interest, too
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}:{frame.lineno}: " for frame in frames if frame.filename.startswith(str(folder))]
        return f"{(places or [''])[-1].removeprefix(f'{folder}/')}{type(error).__name__}: {error}"
    return "" if Path(path).is_relative_to(folder) else f"is {path}"


if __name__ == "__main__":
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    results, *names = sys.argv[1:]
    checkout = Path.cwd()
    fake_gpu.install(Path(importlib.util.find_spec("vllm").origin).parent)
    for package in {name.partition(".")[0] for name in names}:
        fake_gpu.stub_extensions(checkout / package)
    sys.path.insert(0, str(checkout))  # the fake puts the folder of vLLM before it
    Path(results).write_text(json.dumps({name: error_of_import(name, checkout) for name in names}))
