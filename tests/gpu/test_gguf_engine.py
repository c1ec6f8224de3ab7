"""Tiny GLM-5 models in GGUF, served by the real engine, against transformers in float32 on the dequantised weights.

A run takes one level of each of five factors: the file, the dtype, the backend, eager or CUDA graphs, and for
TRITON_MLA_SPARSE whether the GPU is what it is or claims to be a 12.0. RUNS are seven runs in which every pair of
levels of the first four occurs, and each capability with both dtypes and both modes.

What is compared is logits, but for what all logits of a position have in common, which log-probabilities do not tell:
every position's mean is taken off. The kernels quantise activations to 8 bits for quantised weights, which is most of
the error up to top-k. Past it the indexer's fp8 keys cost as much, so the limit there is what the same engine errs
with the same weights as safetensors.

An argmax is counted where the reference's margin between its two best tokens is more than five times the rms error of
that margin. All experts are active: rounding cannot change the routing.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from tests.gguf.tiny import MIXED
from tests.gpu.engine import Engines, Run
from tests.gpu.prompts import Answer, both, generate, tokens
from tests.gpu.results import gpu_slug, write_results
from tests.gpu.tiny_gguf import GgufReference
from tests.gpu.tiny_glm import INDEX_TOPK, VOCAB_SIZE, Reference

# Of prompts, round by round: the first fit top-k.
LENGTHS = [[17, 900, 2048], [2500, 3000]]
NUM_GREEDY = 48
GREEDY_LENGTHS = [17, 900, 2040, 2500]  # the third one crosses top-k

LEAST_COSINE = 0.999
# How far the rms error of the logits, whose deviation is 1, may be above that of the same weights as safetensors.
# With Triton's kernels, on an H200, it was by 0.0006 and 0.006 at most.
MARGINS = {"float16": 0.002, "bfloat16": 0.01}
# The CUDA kernels quantise activations to 8 bits. Computed on the CPU, that costs 0.03 to 0.04 up to top-k.
QUANTISED_MARGIN = 0.04
# An argmax is decided where the margin is that many times its rms error ...
DECIDED = 5
# ... and this share of all positions at least must be, or the test says nothing.
LEAST_DECIDED = 0.2

TYPES = {"F32": set(), "Q8_0": {Q.Q8_0}, "mixed": {Q.Q8_0, *MIXED.values()}}  # that kernels have to read

FACTORS = {
    "file": ["F32", "Q8_0", "mixed"],
    "dtype": ["float16", "bfloat16"],
    "backend": ["TRITON_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"],
    "mode": ["graphs", "eager"],
}
CHOSEN = {
    ("F32", "float16", "TRITON_MLA_SPARSE", "graphs"): None,
    ("F32", "bfloat16", "FLASH_ATTN_MLA_SPARSE", "eager"): None,
    ("Q8_0", "bfloat16", "TRITON_MLA_SPARSE", "graphs"): "12.0",
    ("Q8_0", "float16", "FLASH_ATTN_MLA_SPARSE", "eager"): None,
    ("mixed", "float16", "TRITON_MLA_SPARSE", "eager"): "12.0",
    ("mixed", "bfloat16", "FLASH_ATTN_MLA_SPARSE", "graphs"): None,
    ("mixed", "bfloat16", "TRITON_MLA_SPARSE", "eager"): None,
}


def make_run(
    file: str, dtype: str, backend: str | None, mode: str, *, name: str = "", form: str = "GGUF", greedy=(), **fields
) -> Run:
    options = {
        "max_model_len": 4096,
        "max_logprobs": VOCAB_SIZE,
        "enforce_eager": mode == "eager",
        **fields.pop("options", {}),
    }
    if "speculative_config" not in options:
        options["enable_trace_replay"] = True
        rounds = [[ask | {"distributions": VOCAB_SIZE} for ask in both(lengths)] for lengths in LENGTHS]
    else:  # whose tokens cannot be forced
        rounds = []
    rounds += [[generate(length, NUM_GREEDY) for length in greedy]] if greedy else []
    name = f"{form} {file}, {dtype}, {backend or 'selected'}, {mode}{name}"
    if backend == "FLASH_ATTN_MLA_SPARSE":
        fields["needs_capability"] = 9
    return Run(name, dtype, backend, rounds, options, model=f"{file}, {form}", **fields)


def make_chosen_run(levels: tuple[str, str, str, str], capability: str | None) -> Run:
    file, dtype, backend, mode = levels
    greedy = GREEDY_LENGTHS if (file, capability) == ("mixed", "12.0") else ()
    if (dtype, capability) == ("float16", "12.0"):
        backend = None  # nothing else fits; in bfloat16 FlashInfer's would, where that is installed
    name = f", as on {capability}" if capability else ""
    return make_run(file, dtype, backend, mode, name=name, capability=capability, greedy=greedy)


RUNS = {levels: make_chosen_run(levels, capability) for levels, capability in CHOSEN.items()}
# The same weights as safetensors, by file and dtype; without CUDA graphs, which replay the same kernels.
TWINS = {
    (file, dtype): make_run(file, dtype, backend, "eager", form="safetensors") for file, dtype, backend, _ in CHOSEN
}
HEADLINE = RUNS["mixed", "float16", "TRITON_MLA_SPARSE", "eager"]
NO_CUDA = make_run(
    "mixed",
    "float16",
    "TRITON_MLA_SPARSE",
    "eager",
    name=", VLLM_GGUF_USE_CUDA=0",
    environment={"VLLM_GGUF_USE_CUDA": "0"},
)
TWO_GPUS = make_run(
    "mixed",
    "float16",
    "TRITON_MLA_SPARSE",
    "graphs",
    name=", TP 2",
    options={"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    greedy=GREEDY_LENGTHS,
)
MTP_OPTIONS = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    "per_request_spec_decode_metrics": "summary",
}
MTP, MTP_TWIN = (
    make_run(
        "mixed",
        "float16",
        "TRITON_MLA_SPARSE",
        "eager",
        name=", MTP",
        form=form,
        capability="12.0",
        options=MTP_OPTIONS,
        greedy=GREEDY_LENGTHS,
        drafts=[generate(length, NUM_GREEDY) for length in GREEDY_LENGTHS],
    )
    for form in ("GGUF", "safetensors")
)


@dataclass
class Positions:
    """Logits of an engine and of the reference at the same positions, fp32 [positions, vocabulary]; means are 0."""

    found: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, found: torch.Tensor, expected: torch.Tensor) -> "Positions":
        assert found.shape == expected.shape
        return cls(*(x - x.mean(dim=-1, keepdim=True) for x in (found.float(), expected.float())))

    @classmethod
    def cat(cls, parts: list["Positions"]) -> "Positions":
        return cls(torch.cat([part.found for part in parts]), torch.cat([part.expected for part in parts]))

    def __getitem__(self, rows: slice) -> "Positions":
        return Positions(self.found[rows], self.expected[rows])

    def __len__(self) -> int:
        return len(self.found)

    def cosine(self) -> float:
        found, expected = (x.double().flatten() for x in (self.found, self.expected))  # in float32 it can exceed 1
        return torch.cosine_similarity(found, expected, dim=0).item()

    def error(self) -> float:
        """Return the rms error of a logit."""
        return (self.found - self.expected).square().mean().sqrt().item()

    def margins(self) -> tuple[torch.Tensor, float]:
        """Return the reference's margins between its two best tokens, fp32 [positions], and their rms error."""
        best = self.expected.topk(2).indices
        expected, found = (-x.gather(1, best).diff(dim=1)[:, 0] for x in (self.expected, self.found))
        return expected, (found - expected).square().mean().sqrt().item()

    def decided(self) -> torch.Tensor:
        """Return where the reference's best token is beyond doubt, bool [positions]."""
        margins, error = self.margins()
        return margins > DECIDED * error

    def wrong(self) -> torch.Tensor:
        """Return where the engine's best token is another one, bool [positions]."""
        return self.expected.argmax(dim=1) != self.found.argmax(dim=1)

    def argmaxes(self) -> "Argmaxes":
        decided, wrong = self.decided(), self.wrong()
        return Argmaxes(decided.float().mean().item(), int((wrong & decided).sum()), int(wrong.sum()))


@dataclass
class Argmaxes:
    decided: float  # share of the positions
    wrong_decided: int
    wrong: int


@dataclass
class Comparison:
    """What an engine answered, up to top-k and past it, in prompts and decoded one by one."""

    prompt: Positions
    prompt_past_topk: Positions
    decoded: Positions
    decoded_past_topk: Positions

    def items(self) -> Iterator[tuple[str, Positions]]:
        return iter(vars(self).items())


def compare(engines: Engines, run: Run, reference: Reference) -> Comparison:
    """Return all that a run answered to `both` of all lengths."""
    parts: dict[str, list[Positions]] = {name: [] for name in Comparison.__dataclass_fields__}
    for served, lengths in zip(engines.result(run)["rounds"], LENGTHS, strict=False):
        for index, length in enumerate(lengths):
            prompt, decoded = (distributions(served["answers"][2 * index + i]) for i in range(2))
            assert served["answers"][2 * index + 1]["generated"] == tokens(length)[length:], "decoding was not forced"
            expected = reference.logprobs(tokens(length))
            of_prompt = Positions.of(prompt["prompt"], expected[: length - 1])
            of_decoded = Positions.of(decoded["generated"], expected[length - 1 :])
            parts["prompt"].append(of_prompt[:INDEX_TOPK])
            parts["prompt_past_topk"].append(of_prompt[INDEX_TOPK:])
            near = max(0, INDEX_TOPK + 1 - length)  # how many of the decoded tokens see top-k others at most
            parts["decoded"].append(of_decoded[:near])
            parts["decoded_past_topk"].append(of_decoded[near:])
    return Comparison(**{name: Positions.cat(each) for name, each in parts.items()})


def distributions(answer: Answer) -> dict[str, torch.Tensor]:
    return torch.load(answer["distributions"])


def check(found: dict[str, Positions], limits: dict[str, Positions], run: Run, rows: list[dict[str, Any]]) -> None:
    """Assert cosines up to top-k, errors past it, and all argmaxes that are decided.

    Past top-k the indexer's 8-bit keys choose others than the reference does here and there, with or without GGUF. So
    an argmax may be wrong there where that of the twin is, too.
    """
    report = "\n".join(map(str, rows))
    quantised = file_of(run) != "F32" and run is not NO_CUDA
    margin = QUANTISED_MARGIN if quantised else MARGINS[run.dtype]
    for name, positions in found.items():
        past_topk = name.endswith("past_topk")
        decided, wrong = positions.decided(), positions.wrong()
        assert decided.float().mean() >= LEAST_DECIDED, f"{name}: too few argmaxes are decided\n{report}"
        differ = decided & wrong & ~limits[name].wrong() if past_topk else decided & wrong
        assert not differ.any(), f"{name}: {int(differ.sum())} argmaxes differ\n{report}"
        if past_topk:
            assert positions.error() <= limits[name].error() + margin, f"{name}\n{report}"
        else:
            assert positions.cosine() >= LEAST_COSINE, f"{name}\n{report}"


def measurement(engines: Engines, run: Run, what: str, found: Positions, twin: Positions) -> dict[str, Any]:
    """Return a row of the results file."""
    worker = engines.result(run)["workers"][0]
    _, margin_error = found.margins()
    row = {
        "run": run.name,
        "model": run.model,
        "dtype": run.dtype,
        "backend": worker["backends"][0],
        "capability": worker["capability"],
        "graphs": worker["graphs"],
        "tensor_parallel": run.num_gpus,
        "cuda_kernels": worker["gguf_cuda"],
        "what": what,
        "positions": len(found),
        "cosine": found.cosine(),
        "cosine_min": torch.cosine_similarity(found.found, found.expected).min().item(),
        "error": found.error(),
        "safetensors_error": twin.error(),
        "margin_error": margin_error,
        **{f"argmax_{name}": value for name, value in asdict(found.argmaxes()).items()},
    }
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def check_run(engines: Engines, gguf_models, rows, run: Run, twin: Run) -> None:
    reference = gguf_models[file_of(run)].reference
    found = dict(compare(engines, run, reference).items())
    limits = dict(compare(engines, twin, reference).items())
    new_rows = [measurement(engines, run, name, found[name], limits[name]) for name in found]
    rows += new_rows
    check(found, limits, run, new_rows)


def file_of(run: Run) -> str:
    return run.model.partition(",")[0]


def require(engines: Engines, run: Run) -> None:
    if not engines.can_run(run):
        pytest.skip(f"needs a GPU of capability {run.needs_capability}.x for {run.backend}")


@pytest.fixture(scope="session")
def gguf_rows() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def rows(request, gguf_rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Measurements, written to --results after each test: an interrupted run keeps what it has."""
    yield gguf_rows
    if (results := request.config.getoption("--results", None)) and gguf_rows:
        write_results(results / f"gguf-{gpu_slug()}.json", gguf_rows)


def with_twin(runs: list[Run]):
    return pytest.mark.parametrize(("run", "twin"), [(run, TWINS[file_of(run), run.dtype]) for run in runs], ids=str)


@pytest.mark.gpu
@with_twin(list(RUNS.values()))
def test_logits_are_those_of_the_dequantised_weights(engines, gguf_models, rows, run, twin):
    require(engines, run)
    require(engines, twin)
    worker = engines.result(run)["workers"][0]
    assert worker["backends"] == [run.backend or "TRITON_MLA_SPARSE"]
    assert worker["capability"] == (run.capability or worker["capability"])
    assert ("FULL" in worker["graphs"]) == (not run.options["enforce_eager"])
    assert set(worker["gguf_types"]) == TYPES[file_of(run)]
    assert worker["gguf_cuda"], "the plugin's compiled kernels cannot be loaded here"
    assert engines.result(twin)["workers"][0]["gguf_types"] == []
    check_run(engines, gguf_models, rows, run, twin)


@pytest.mark.gpu
@with_twin([NO_CUDA])
def test_triton_kernels_serve_without_the_cuda_kernels(engines, gguf_models, rows, run, twin):
    assert not engines.result(run)["workers"][0]["gguf_cuda"]
    check_run(engines, gguf_models, rows, run, twin)


def greedy_answers(engines: Engines, run: Run) -> list[Answer]:
    return engines.result(run)["rounds"][-1]["answers"]


def check_greedy(engines: Engines, gguf_models, run: Run, other: Run, exact: Run) -> None:
    """Assert that two runs choose the same tokens until the reference hardly prefers one to the other.

    `exact` is a run of the same weights whose margins' error counts.
    """
    reference = gguf_models[file_of(run)].reference
    errors = [positions.margins()[1] for _, positions in compare(engines, exact, reference).items()]
    agreed = differed = 0
    answers = (greedy_answers(engines, each) for each in (run, other))
    for length, ours, theirs in zip(GREEDY_LENGTHS, *answers, strict=True):
        pairs = list(zip(ours["generated"], theirs["generated"], strict=True))
        assert len(pairs) == NUM_GREEDY
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        agreed += same
        if same < len(pairs):
            differed += 1
            sequence = tokens(length)[:length] + ours["generated"][: same + 1]
            a, b = reference.logprobs(sequence)[-1][list(pairs[same])]
            assert (a - b).abs() <= DECIDED * max(errors), f"{length} tokens, then {same}: {pairs[same]}"
    print(f"{run} and {other}: {agreed} tokens agree, {differed} of {len(GREEDY_LENGTHS)} texts part")
    assert agreed >= NUM_GREEDY, "too few tokens agree to say anything"


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize(("run", "single", "twin"), [(TWO_GPUS, HEADLINE, TWINS["mixed", "float16"])], ids=str)
def test_two_gpus_compute_what_one_does(engines, gguf_models, rows, run, single, twin):
    workers = engines.result(run)["workers"]
    assert [worker["backends"] for worker in workers] == [[run.backend]] * 2
    assert all(set(worker["gguf_types"]) == TYPES["mixed"] for worker in workers)
    check_run(engines, gguf_models, rows, run, twin)
    check_greedy(engines, gguf_models, run, single, single)


@pytest.mark.gpu
@pytest.mark.parametrize(("run", "off"), [(MTP, HEADLINE)], ids=str)
def test_speculation_changes_no_greedy_text(engines, gguf_models, run, off):
    answers = greedy_answers(engines, run)
    assert sum(answer["num_drafted"] for answer in answers) > 0
    check_greedy(engines, gguf_models, run, off, off)


def compare_drafts(engines: Engines, run: Run, reference: GgufReference) -> dict[str, Positions]:
    """Return what the draft model proposed by, up to top-k and past it.

    In every step a token is sampled and the next one drafted. If the draft is what the target then chooses, two tokens
    are ready after the next step.
    """
    parts: dict[str, list[Positions]] = {"drafts": [], "drafts_past_topk": []}
    for length, answer in zip(GREEDY_LENGTHS, engines.result(run)["drafts"], strict=True):
        generated, found = answer["generated"], torch.load(answer["draft_logits"])
        expected = reference.draft_logits(tokens(length)[:length] + generated)
        ready = 1
        for logits in found:
            if ready >= len(generated):
                break  # steps after the last token
            row = length + ready - 2  # the last token with its successor known
            part = parts["drafts" if row < INDEX_TOPK else "drafts_past_topk"]
            part.append(Positions.of(logits[None], expected[row : row + 1]))
            ready += 1 + int(logits.argmax() == generated[ready])
        assert ready >= len(generated), f"{len(found)} steps for {len(generated)} tokens"
    return {name: Positions.cat(each) for name, each in parts.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("run", "twin"), [(MTP, MTP_TWIN)], ids=str)
def test_drafts_are_those_of_the_dequantised_weights(engines, gguf_models, rows, run, twin):
    reference = gguf_models[file_of(run)].reference
    found, limits = (compare_drafts(engines, each, reference) for each in (run, twin))
    new_rows = [measurement(engines, run, name, found[name], limits[name]) for name in found]
    rows += new_rows
    check(found, limits, run, new_rows)


def test_every_pair_is_run():
    levels = list(FACTORS.values())
    for first, second in itertools.combinations(range(len(levels)), 2):
        run = {(chosen[first], chosen[second]) for chosen in CHOSEN}
        assert run == set(itertools.product(levels[first], levels[second]))
    for factor in ("dtype", "mode"):
        index = list(FACTORS).index(factor)
        run = {(chosen[index], capability) for chosen, capability in CHOSEN.items() if chosen[2] == "TRITON_MLA_SPARSE"}
        assert run == set(itertools.product(FACTORS[factor], [None, "12.0"]))
