"""The command line, the command that it becomes, and the names of GPUs."""

import shlex

import pytest
from vllm.sm120.doctor import BAD_INPUT, gpus, main
from vllm.sm120.doctor.arguments import command, parse
from vllm.sm120.doctor.facts import GIB, DoctorError


@pytest.mark.parametrize(
    ("text", "capability"), [("12.0", (12, 0)), ("8.6", (8, 6)), ("sm_121", (12, 1)), ("90", (9, 0))]
)
def test_a_capability_is_read_as_people_write_it(text, capability):
    assert parse(["m", "--capability", text]).capability == capability


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["m", "--log", "server.log"],
        ["m", "--selftest"],
        ["m", "--capability", "twelve"],
        ["m", "--capability", "12.34"],
        ["m", "--gpu", "H200", "--capability", "9.0"],
        ["m", "--tensor-parallel-size", "two"],
        ["m", "--unknown"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == BAD_INPUT
    assert "vllm doctor: error: " in capsys.readouterr().err


def test_flags_are_those_of_serve_with_underscores_and_short_ones():
    arguments = parse(["m", "--kv_cache_dtype", "fp8", "-tp", "4", "-q=fp8", "--speculative_config={}"])
    assert (arguments.kv_cache_dtype, arguments.tensor_parallel_size) == ("fp8", 4)
    assert (arguments.quantization, arguments.speculative_config) == ("fp8", "{}")


def test_a_command_survives_the_shell_and_names_what_is_set_only():
    options = {"dtype": "float16", "block_size": None, "trust_remote_code": True, "speculative_config": '{"n": 1}'}
    words = shlex.split(command("serve", "/a model", options))
    assert words == [
        *("vllm", "serve", "/a model", "--dtype", "float16"),
        *("--trust-remote-code", "--speculative-config", '{"n": 1}'),
    ]


@pytest.mark.parametrize(
    ("name", "capability", "memory"),
    [
        ("RTX PRO 6000", (12, 0), 95),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 95),
        ("rtx5090", (12, 0), 31),
        ("GB10", (12, 1), 119),
        ("NVIDIA GeForce RTX 3090", (8, 6), 24),
        ("A100", (8, 0), 40),  # two boards: the smaller one
        ("NVIDIA A100-SXM4-80GB", (8, 0), 80),
        ("NVIDIA H100 80GB HBM3", (9, 0), 79),
        ("H200", (9, 0), 140),
    ],
)
def test_a_gpu_is_known_by_its_name(name, capability, memory):
    gpu = gpus.find(parse(["m", "--gpu", name]))
    assert (gpu.capability, gpu.memory) == (capability, memory * GIB)


@pytest.mark.parametrize("name", ["6000", "Voodoo", "", "RTX"])
def test_a_gpu_that_is_not_one_of_the_list_is_refused_with_a_choice(name):
    with pytest.raises(DoctorError, match="expected one of: ") as error:
        gpus.find(parse(["m", "--gpu", name]))
    assert "--capability" in error.value.cure


def test_memory_can_be_given():
    assert gpus.find(parse(["m", "--gpu", "H200", "--memory", "100"])).memory == 100 * GIB
    assert gpus.find(parse(["m", "--capability", "9.0"])).memory is None
