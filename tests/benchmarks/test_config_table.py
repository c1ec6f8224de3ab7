"""From measured times to the rows of the kernel's table."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.config_table import Candidate, Cell, choose, merge, render, with_rows, write
from tests.kernels.overlay import OVERLAY, load_overlay

TABLE = OVERLAY / "vllm" / "v1" / "attention" / "ops" / "triton_mla_sparse_configs.json"
A = Candidate(8, 32, 4, 3, 2)
B = Candidate(16, 64, 4, 2, 1)
C = Candidate(16, 64, 8, 3, 2, group=2)


def small_table() -> dict[str, Any]:
    rows = [{"heads": 128, **A.row()}]
    return {"default": {name: {"decode": rows, "prefill": rows} for name in ("16-bit", "fp8")}}


def test_the_fastest_is_chosen_where_nothing_else_is_good_enough() -> None:
    times = {(8, 1): {A: 10.0, B: 12.0}, (8, 64): {A: 30.0, B: 20.0}}
    assert choose(times, tolerance=0.02) == {(8, 1): A, (8, 64): B}


def test_one_kernel_serves_where_it_is_good_enough() -> None:
    times = {(8, 1): {A: 10.0, B: 10.1, C: 10.2}, (8, 64): {A: 30.0, B: 20.0}, (8, 128): {B: 40.3, C: 40.0}}
    assert set(choose(times, tolerance=0.02).values()) == {B}
    assert choose(times, tolerance=0.0) == {(8, 1): A, (8, 64): B, (8, 128): C}


def test_other_program_counts_are_the_same_kernel() -> None:
    more = Candidate(16, 64, 4, 2, 4)
    times = {(8, 1): {A: 10.0, more: 10.1}, (8, 64): {B: 20.0, more: 25.0, A: 20.1}}
    # B and `more` share a kernel, as good as A: each cell takes its faster launch.
    chosen = choose(times, tolerance=0.02)
    assert chosen in ({(8, 1): more, (8, 64): B}, {(8, 1): A, (8, 64): A})


def test_what_served_fewer_tokens_stays_while_it_is_good_enough() -> None:
    more = Candidate(16, 64, 4, 2, 4)
    times = {(8, 1): {B: 10.0, more: 12.0}, (8, 2): {B: 10.1, more: 10.0}, (8, 4): {B: 12.0, more: 10.0}}
    assert choose(times, tolerance=0.02) == {(8, 1): B, (8, 2): B, (8, 4): more}


def test_cells_without_times_are_left_out() -> None:
    assert choose({(8, 1): {}, (8, 2): {A: 1.0}}, tolerance=0.02) == {(8, 2): A}


def test_equal_neighbours_become_one_row_and_the_last_has_no_limit() -> None:
    chosen = {(8, 1): A, (8, 8): A, (8, 64): B, (16, 1): B, (16, 64): B, (64, 1): B}
    assert merge(chosen) == [
        {"heads": 8, "tokens": 8, **A.row()},
        {"heads": 8, **B.row()},
        {"heads": 128, **B.row()},
    ]


def test_a_row_names_only_what_is_unusual() -> None:
    assert A.row().keys() == {"block_h", "block_n", "num_warps", "num_stages", "programs_per_sm"}
    assert C.row()["group"] == 2
    assert Candidate(8, 32, 4, 3, 2, maxnreg=128).row()["maxnreg"] == 128


def check_kernel_reads(chosen: dict[Cell, Candidate], path: Path) -> None:
    """`get_config` of the kernel gives what was chosen, and above the last token count the last choice."""
    configs = load_overlay("vllm.v1.attention.ops.triton_mla_sparse_config")
    write(path, with_rows(small_table(), "9.0", "16-bit", "decode", merge(chosen), {"gpu": "some GPU"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "_TABLE_FILE", path)
        # The interpreter has a row of its own, as it does not know Gluon.
        patch.setattr(configs.triton.knobs.runtime, "interpret", False)
        forget(configs)
        for (heads, tokens), candidate in chosen.items():
            above = [other for other_heads, other in chosen if other_heads == heads and other > tokens]
            for count in [tokens] if above else [tokens, 10 * tokens]:
                config = configs.get_config(count, heads, configs.KVFormat.MODEL, (9, 0))
                fields = {name: getattr(config, name) for name in candidate.row()}
                assert fields == candidate.row(), (heads, count)
    forget(configs)


def forget(configs: ModuleType) -> None:
    configs._read_table.cache_clear()
    configs.get_config.cache_clear()


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from([8, 16, 128]), st.sampled_from([1, 8, 64, 512])),
        st.sampled_from([A, B, Candidate(16, 64, 4, 2, 4, maxnreg=128)]),
        min_size=1,
    )
)
def test_the_kernel_finds_every_choice(interpreter, tmp_path_factory, chosen):
    interpreter.submit(check_kernel_reads, chosen, tmp_path_factory.mktemp("table") / "table.json").result()


def tuned_fields() -> set[str]:
    configs = load_overlay("vllm.v1.attention.ops.triton_mla_sparse_config")
    return set(configs.SparseMLAConfig.__dataclass_fields__) - {"launch_pdl", "has_e4m3", "alone"}


def test_a_candidate_has_every_tuned_field_of_the_kernel(interpreter):
    assert interpreter.submit(tuned_fields).result() == set(Candidate.__dataclass_fields__)


def test_other_sections_and_formats_stay() -> None:
    table = small_table()
    before = json.dumps(table)
    rows = [{"heads": 128, **B.row()}]
    changed = with_rows(table, "9.0", "fp8", "prefill", rows, {"triton": "3.8.0"})
    assert json.dumps(table) == before
    assert changed["default"] == table["default"]
    assert changed["9.0"]["fp8"] == {"decode": table["default"]["fp8"]["decode"], "prefill": rows}
    assert changed["9.0"]["16-bit"] == table["default"]["16-bit"]
    assert changed["9.0"]["tuned"] == {"fp8": {"triton": "3.8.0"}}
    again = with_rows(changed, "9.0", "16-bit", "decode", rows, {"triton": "3.9.0"})
    assert again["9.0"]["tuned"] == {"fp8": {"triton": "3.8.0"}, "16-bit": {"triton": "3.9.0"}}
    with pytest.raises(ValueError, match="no rows"):
        with_rows(table, "9.0", "fp8", "prefill", [], {})


def test_text_is_stable_sorted_and_has_a_row_a_line(tmp_path: Path) -> None:
    rows = [{"heads": 8, "tokens": 8, **A.row()}, {"heads": 128, **B.row()}]
    table = small_table()
    for section in ("12.1", "9.0", "12.0"):
        table = with_rows(table, section, "fp8", "decode", rows, {"gpu": section})
    text = render(table)
    assert list(json.loads(text)) == ["default", "9.0", "12.0", "12.1"]
    assert json.loads(text)["9.0"] == table["9.0"]
    assert f"        {json.dumps(rows[0])},\n        {json.dumps(rows[1])}\n" in text
    assert render(json.loads(text)) == text
    path = tmp_path / "table.json"
    write(path, table)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_the_shipped_table_is_as_the_tuner_writes_it() -> None:
    """So that tuning changes the rows of one section and nothing else."""
    assert render(json.loads(TABLE.read_text())) == TABLE.read_text()
