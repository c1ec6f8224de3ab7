"""The text of a report and its JSON."""

import io
import json
from dataclasses import replace

import pytest
from vllm.sm120.doctor.facts import GIB, Backend, Fact, Gpu, Model, Risk, Row
from vllm.sm120.doctor.report import Report

COMMAND = "vllm serve /models/a-model-with-a-very-long-name --dtype float16 --kv-cache-dtype fp8_ds_mla " * 2
LONG = "words that go on and on " * 12
FITS = Report(
    Gpu("NVIDIA H200", (9, 0), 140 * GIB, "--gpu"),
    [Row("vllm", "0.33.0+sm120.4", f"patches: {LONG}")],
    Model("m", {"index_topk": Fact(2048, "config.json"), "mla": Fact(True, LONG), "quantization": Fact(None, "-")}),
    backends=[
        Backend("FLASHMLA_SPARSE", False, ["dtype not supported", LONG], ["--dtype bfloat16", LONG]),
        Backend("TRITON_MLA_SPARSE", True, [], []),
        Backend("ANOTHER", True, [], []),
    ],
    chosen="TRITON_MLA_SPARSE",
    why="the first that fits",
    memory=[Row("weights a GPU", 12345.678, unit="MiB")],
    risks=[Risk(LONG, LONG)],
    command=COMMAND,
)
NOTHING = replace(FITS, chosen=None, why="", command=None, reason="nothing fits, and this is why", exit=3)


def test_the_text_is_readable_at_100_columns():
    lines = FITS.as_text().splitlines()
    assert lines[-1] == COMMAND
    assert max(map(len, lines[:-1])) <= 100
    assert "  index topk              2048  (config.json)" in lines
    assert "  quantization            none  (-)" in lines
    assert "      dtype not supported: it does not compute in this dtype" in lines
    assert "      cure: --dtype bfloat16" in lines
    assert f"  {'TRITON_MLA_SPARSE':<30} fits, chosen: the first that fits" in lines
    assert f"  {'ANOTHER':<30} fits" in lines
    assert "  weights a GPU           12,345.7 MiB" in lines


def test_the_last_line_is_the_reason_if_nothing_works():
    assert NOTHING.as_text().splitlines()[-1] == "nothing fits, and this is why"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "colour"), [(Terminal, True), (io.StringIO, False)])
def test_colour_is_for_terminals(stream, colour):
    out = stream()
    FITS.print(out, as_json=False)
    assert ("\033[" in out.getvalue()) is colour


def test_json_is_never_coloured_and_says_the_same():
    out = Terminal()
    NOTHING.print(out, as_json=True)
    content = json.loads(out.getvalue())
    assert {"schema", "capability", "chosen", "backends", "indexer", "command", "exit"} <= content.keys()
    assert (content["schema"], content["capability"], content["exit"]) == (1, "9.0", 3)
    assert content["backends"][0] == {
        "name": "FLASHMLA_SPARSE",
        "fits": False,
        "reasons": ["dtype not supported", LONG],
        "cures": ["--dtype bfloat16", LONG],
    }
    assert content["model"]["facts"]["index_topk"] == {"value": 2048, "source": "config.json"}
    assert content["reason"] == "nothing fits, and this is why"
