"""`make bisect`: every part is named that can break a command or mend it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.errors import ApplyError
from tests.tool.miniature import SERIES, Checkout, Outcome, read_files
from tests.tool.test_interrupt import leftovers
from tests.tool.test_verify_prefixes import change, install

pytestmark = pytest.mark.slow

START, CONFIG, HOOK = SERIES


def bisect(checkout: Checkout, command: str) -> Outcome:
    return checkout.run("bisect", f"--test={command}")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("grep -q 'result = 1$' vllm/engine.py", f"{START} mends it"),
        ("! grep -q 'result = 1$' vllm/engine.py", f"{START} breaks it"),
        ("grep -q 'B2' vllm/config.py", f"{CONFIG} mends it"),
        ("! grep -q 'B2' vllm/config.py", f"{CONFIG} breaks it"),
        ("grep -q 'result = None' vllm/engine.py", f"{HOOK} mends it"),
        ("! grep -q 'result = None' vllm/engine.py", f"{HOOK} breaks it"),
        ("test -e vllm/ours/backend.py", "the overlay mends it"),
        ("! test -e vllm/ours/backend.py", "the overlay breaks it"),
        ("grep -q 'no such thing' vllm/engine.py", "the pin (vllm 0.33.0) breaks it"),
        # Mended by one patch and broken by a later one: it is that one that has to be named.
        ("grep -q 'result = 1$' vllm/engine.py && ! grep -q B2 vllm/config.py", f"{CONFIG} breaks it"),
        ("test -e vllm/ours/backend.py && ! grep -q 'result = None' vllm/engine.py", f"{HOOK} breaks it"),
    ],
)
def test_culprit(checkout: Checkout, command: str, said: str) -> None:
    outcome = bisect(checkout, command)
    assert (outcome.code, outcome.out) == (0, f"{said}\n")


def test_few_runs_and_each_is_told(checkout: Checkout) -> None:
    outcome = bisect(checkout, "! grep -q 'B2' vllm/config.py")
    told = [line for line in outcome.err.splitlines() if "passes" in line or "fails" in line]
    assert told == [f"{HOOK}: fails (1)", "upstream: passes", f"{START}: passes", f"{CONFIG}: fails (1)"]


def test_what_the_command_says_there_is_shown(checkout: Checkout) -> None:
    outcome = bisect(checkout, "cat patches/vllm/series; ! grep 'B2' vllm/config.py")
    assert outcome.out == f"{START}\n{CONFIG}\nB2 = 21\n{CONFIG} breaks it\n"


def test_the_package_is_imported_with_what_only_the_wheel_has(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled modules, for one, come from the installed wheel."""
    install(checkout, tmp_path / "site", monkeypatch)
    monkeypatch.setattr("zipfile.ZipFile.namelist", lambda _: ["vllm/compiled.py", "vllm/engine.py"])
    (tmp_path / "site" / "vllm" / "compiled.py").write_text("ONE = 1\n")
    (tmp_path / "site" / "vllm" / "stray.py").write_text("")
    command = (
        f"cd / && {sys.executable} -c 'from vllm import compiled, engine; import importlib.util as u, sys; "
        'sys.exit(engine.start(5) != compiled.ONE or u.find_spec("vllm.stray") is not None)\''
    )
    assert bisect(checkout, command).out == f"{START} mends it\n"


def test_sources_only_where_it_is_not_installed(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.prefix.installed_package", lambda _: None)
    outcome = bisect(checkout, "test -e vllm/ours/backend.py")
    assert outcome.out == "the overlay mends it\n"
    assert "vllm 0.33.0 is not installed: there are its sources only\n" in outcome.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (" ", "no command is given"),
        ("true", "passes with upstream alone and with the whole series"),
        ("no-such-program vllm/engine.py", "the command cannot be run: "),
    ],
)
def test_refused(checkout: Checkout, command: str, said: str) -> None:
    outcome = bisect(checkout, command)
    assert outcome.code == 28
    assert said in outcome.err
    assert "\ncure: " in outcome.err


def test_series_that_does_not_apply(checkout: Checkout) -> None:
    change(checkout, CONFIG, "-B = 2\r\n", "-B = 3\r\n")
    outcome = bisect(checkout, "false")
    assert outcome.code == ApplyError.exit_code
    assert f"{CONFIG}: conflict(vllm/config.py)" in outcome.err


def test_what_the_command_changes_ends_with_it(own_cache: Checkout) -> None:
    (own_cache.root / "notes.txt").write_text("mine\n")
    before = read_files(own_cache.root)
    command = (
        "echo spoilt | tee notes.txt overlay/x patches/vllm/series vllm/engine.py > vllm/new.py; test -e vllm/ours"
    )
    assert bisect(own_cache, command).out == "the overlay mends it\n"
    assert read_files(own_cache.root) == before
    assert leftovers(own_cache) == []
