"""`make bisect`: every part is named that can break a command or mend it.

A golden folder has the `command`, a `before/` that is committed and an `after/` that is the working tree, where it is
pinned to another release the upstream files that differ there (`release/`), and in expected.txt what is said when the
command is bisected in the working tree alone and since the commit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from scripts import prefix
from scripts.errors import ApplyError
from tests.tool.miniature import SERIES, UPSTREAM, Checkout, Outcome, read_files, sha256
from tests.tool.test_interrupt import leftovers
from tests.tool.test_show_change import commit, release
from tests.tool.test_verify_prefixes import change, install
from tests.wheel.synthetic import TAGS, UpstreamWheel

pytestmark = pytest.mark.slow

START, CONFIG, HOOK = SERIES
SCENARIOS = sorted(Path(__file__).with_name("bisect_scenarios").iterdir())
INSTALLED = prefix.installed_package


@pytest.fixture(autouse=True)
def sources_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed beside the tests, the miniature is not."""
    monkeypatch.setattr(prefix, "installed_package", lambda _: None)


def bisect(checkout: Checkout, command: str, *options: str) -> Outcome:
    return checkout.run("bisect", f"--test={command}", *options)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_scenario(own_cache: Checkout, scenario: Path) -> None:
    checkout = own_cache
    checkout.put(scenario / "before")
    revision = commit(checkout, "before")
    checkout.put(scenario / "after")
    theirs = {path: data.decode() for path, (data, _) in read_files(scenario / "release").items()}
    if theirs:
        release(checkout, "0.34.0", {path: (UPSTREAM[path], text) for path, text in theirs.items()})
    before = read_files(checkout.root)
    said = ""
    for options in ((), ("--rev=HEAD",)):
        outcome = bisect(checkout, (scenario / "command").read_text().strip(), *options)
        told = outcome.err.replace(revision[:12], "<commit>").replace(f"{checkout.root}/", "")
        said += f"$ bisect {' '.join(options)}\n{told}{outcome.out}exit code {outcome.code}\n"
    assert said == (scenario / "expected.txt").read_text()
    assert {path: kept for path, kept in read_files(checkout.root).items() if path != "build/.lock"} == before


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


def test_python_is_that_of_the_environment_of_the_tool(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    outcome = bisect(checkout, f"""python -c 'import sys; sys.exit(sys.executable != "{sys.executable}")'""")
    assert "the command passes with upstream alone and with the whole series" in outcome.err


def test_what_the_command_says_there_is_shown(checkout: Checkout) -> None:
    outcome = bisect(checkout, "cat patches/vllm/series; ! grep 'B2' vllm/config.py")
    assert outcome.out == f"{START}\n{CONFIG}\nB2 = 21\n{CONFIG} breaks it\n"


def test_the_package_is_imported_with_what_only_the_wheel_has(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled modules, for one, come from the installed wheel."""
    monkeypatch.setattr(prefix, "installed_package", INSTALLED)
    install(checkout, tmp_path / "site", monkeypatch)
    monkeypatch.setattr("zipfile.ZipFile.namelist", lambda _: ["vllm/compiled.py", "vllm/engine.py"])
    (tmp_path / "site" / "vllm" / "compiled.py").write_text("ONE = 1\n")
    (tmp_path / "site" / "vllm" / "stray.py").write_text("")
    command = (
        f"cd / && {sys.executable} -c 'from vllm import compiled, engine; import importlib.util as u, sys; "
        'sys.exit(engine.start(5) != compiled.ONE or u.find_spec("vllm.stray") is not None)\''
    )
    assert bisect(checkout, command).out == f"{START} mends it\n"


def test_sources_only_where_it_is_not_installed(checkout: Checkout) -> None:
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


def test_another_release_has_the_compiled_modules_of_its_own_wheel(
    own_cache: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a wheel is installed, which has those of one release only."""
    checkout = own_cache
    monkeypatch.setattr(prefix, "installed_package", INSTALLED)
    package = {path: text.encode() for path, text in UPSTREAM.items() if path.startswith("vllm/")}
    made = UpstreamWheel(
        package={**package, "vllm/_C.abi3.so": b"of 0.33.0"},
        info="vllm-0.33.0.dist-info",
        file_name=f"vllm-0.33.0-{TAGS}.whl",
    ).write(checkout.files)
    kept = checkout.cache / "files" / sha256(made) / made.name
    kept.parent.mkdir()
    shutil.copy(made, kept)
    text = checkout.layout.pins.read_text()
    checkout.layout.pins.write_text(text.replace(checkout.project.wheels["x86_64"], sha256(made)))
    install(checkout, tmp_path / "site", monkeypatch)
    commit(checkout, "before")
    release(checkout, "0.34.0", {"README.md": ("vLLM", "vLLM, new")})
    (info,) = (tmp_path / "site").glob("vllm-*.dist-info")
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("Version: 0.33.0", "Version: 0.34.0"))
    info.rename(info.with_name("vllm-0.34.0.dist-info"))
    (tmp_path / "site" / "vllm" / "_C.abi3.so").write_bytes(b"of 0.34.0")
    outcome = bisect(checkout, "grep -q 'of 0.33.0' vllm/_C.abi3.so", "--rev=HEAD")
    assert outcome.out == "the pin (vllm 0.33.0 -> 0.34.0) breaks it\n", outcome.err


def test_unknown_revision(checkout: Checkout) -> None:
    commit(checkout, "before")
    outcome = bisect(checkout, "false", "--rev=nothing")
    assert outcome.code == 29
    assert "'nothing' is not a revision of this repository\ncure: " in outcome.err


def test_between_two_revisions(checkout: Checkout) -> None:
    """The working tree plays no part."""
    commit(checkout, "before")
    change(checkout, START, "+    result = 1\n", "+    result = 2\n")
    commit(checkout, "after")
    (checkout.patches / START).write_text("spoilt")
    assert bisect(checkout, "grep -q 'result = 1$' vllm/engine.py", "--rev=HEAD~1..HEAD").out == f"{START} breaks it\n"


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
