"""docs/doctor.md shows what the doctor really prints, and describes all of its JSON."""

import re
from pathlib import Path

from .conftest import CACHED

PAGE = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
OPTIONS = ("--capability", "12.0", "--dtype", "float16", "--tensor-parallel-size", "8")


def test_the_headline_case_is_real(doctor):
    answer = doctor(CACHED, *OPTIONS, sections=("memory",))
    (shown,) = re.findall(rf"<!-- vllm doctor {CACHED} {' '.join(OPTIONS)} -->\n```\n(.*?)\n```", PAGE, re.DOTALL)
    assert all(f"{part}\n" in answer["text"] for part in shown.split("\n\n"))


def test_all_fields_of_the_json_are_described(doctor):
    answer = doctor(CACHED, *OPTIONS)
    section = PAGE.partition("\n## JSON\n")[2].partition("\n## ")[0]
    names = [cell for line in section.splitlines() if line.startswith("| `") for cell in line.split("|")[1:2]]
    described = {name for cell in names for name in re.findall(r"`(\w+)`", cell)}
    assert described == answer.keys() - {"text"}
