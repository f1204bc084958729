"""Measures steps of the reference trainer with a random model, on a GPU.

    .venv-learn/bin/python tests/benchmarks/bench_trainer.py [--layers 28] [--tokens 32768]
    torchrun --standalone --nproc-per-node 8 tests/benchmarks/bench_trainer.py --cases packed

The model has the shape of Qwen2.5-1.5B (1.5 billion weights, 151,936 tokens), or fewer layers. A
step has rows of 300 to 2,048 tokens, of which a fifth is prompt. --cases: names, separated by ";";
--tiny: to try it on a CPU; --model: made there if it is missing. Out: a JSON line for each case:
tokens a second (padding does not count), memory, and the share of the bfloat16 rate that a large
product reaches on this GPU: 6 operations for each weight and token and those of causal attention
(PaLM, arXiv 2204.02311, appendix B); what is computed again does not count.
"""

import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from api_load import asked as read_arguments
from envserver_clients.training.examples import Example
from envserver_clients.training.learner import Learner, StepSettings
from envserver_clients.training.objectives import LossSettings
from envserver_clients.training.policy import LoraSettings, Policy
from envserver_clients.training.ranks import Ranks
from envserver_records.tasks import Json
from support.tiny_model import tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

CASES: dict[str, Json] = {
    "padded": {},
    "packed": {"packed": True},
    "packed, activations again": {"packed": True, "checkpointed": True},
    "packed, LoRA 32": {"packed": True, "lora": LoraSettings(32)},
    "packed, float32": {"packed": True, "dtype": torch.float32, "checkpointed": True},
}
STEPS = 3


def make_model(folder: Path, layers: int, tiny: bool) -> None:
    """A random model in bfloat16, with the tokenizer of the tests."""
    hidden, between, heads, vocabulary = (64, 128, 2, 4096) if tiny else (1536, 8960, 12, 151936)
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=between,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def rows(tokens: int, vocabulary: int, longest: int) -> list[Example]:
    """Random rows with about so many tokens together, the longest among them."""
    rng = np.random.default_rng(0)
    made: list[Example] = []
    left = tokens
    while left > 0:
        length = longest if not made else int(rng.integers(longest // 7, longest))
        length = min(length, max(left, 16))
        left -= length
        mask = (np.arange(length) >= length // 5).astype(np.uint8)
        logprobs = (rng.uniform(-12, -11, length) * mask).astype(np.float32)
        ids = rng.integers(10, vocabulary, length).astype(np.int32)
        made.append(Example(ids, mask, logprobs, float(len(made) % 2) * 2 - 1, 1e-4))
    return made


def measured(
    model: Path, examples: list[Example], ranks: Ranks, micro_batch_tokens: int, **case: Any
) -> Json:
    packed = case.pop("packed", False)
    dtype = case.pop("dtype", torch.bfloat16)
    begun = time.perf_counter()
    policy = Policy(str(model), dtype=dtype, ranks=ranks, **case)
    rules = StepSettings(
        micro_batch_tokens=micro_batch_tokens,
        packed=packed,
        loss=LossSettings(clip_low=0.999, clip_high=1e6, correction="none"),
    )
    learner = Learner(policy, rules, ranks)
    loading = time.perf_counter() - begun
    on_gpu = ranks.device.type == "cuda"
    seconds = []
    for step in range(1 + STEPS):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        numbers = learner.step(examples)
        if on_gpu:
            torch.cuda.synchronize()
        if step:
            seconds.append(time.perf_counter() - begun)
    one = statistics.median(seconds)
    lengths = np.array([len(row.tokens) for row in examples])
    config = policy.model.config
    weights = sum(value.numel() for value in policy.model.parameters())
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    operations = 6 * weights * int(lengths.sum()) + attention  # causal: half of 12
    found = {
        "weights": weights,
        "rows": len(examples),
        "tokens": int(lengths.sum()),
        "seconds": [round(second, 4) for second in seconds],
        "loading": round(loading, 1),
        "tokens_per_second": round(lengths.sum() / one),
        "tflops": round(operations / one / 1e12, 1),
        "gradient_norm": numbers["gradient_norm"],
        "mismatch_mean": numbers["mismatch_mean"],
    }
    if on_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def gpu_peak() -> float:
    """TFLOP/s of a large bfloat16 product, measured."""
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        one @ two
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        one @ two
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - begun) / 1e12


def main() -> None:
    asked = read_arguments(
        __doc__, layers=28, tokens=32768, longest=2048, micro_batch_tokens=8192, tiny=False,
        cases=";".join(CASES), model=Path,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with Ranks.joined(device) as ranks, contextlib.ExitStack() as stack:
        folder = asked.model or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        folder = ranks.broadcast(folder)
        if ranks.leads and not (folder / "config.json").exists():
            make_model(folder, asked.layers, asked.tiny)
        ranks.broadcast(None)
        peak = gpu_peak() if device == "cuda" else 0.0
        config = Qwen2Config.from_pretrained(folder)
        examples = rows(asked.tokens, min(config.vocab_size, 4000), asked.longest)
        for name in asked.cases.split(";"):
            line = {"case": name, "ranks": ranks.size, "divided": ranks.divided}
            try:
                line |= measured(folder, examples, ranks, asked.micro_batch_tokens, **CASES[name])
                if peak:
                    line["measured_peak_tflops"] = round(peak)
                    line["share_of_peak"] = round(line["tflops"] / peak / ranks.size, 3)
            except torch.OutOfMemoryError as error:
                line["error"] = str(error)[:200]
            if ranks.leads:
                print(json.dumps(line), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
