"""Measures how long new weights take to reach real vLLMs, by files and over the network.

    python tests/benchmarks/bench_weights.py --python .venv-vllm/bin/python

A random model of 600 MB in bfloat16 is published in turns by `VllmFull` (safetensors on this
machine's disk, synced) and by `Transfer` (gloo). Out: seconds by phase, the median of the rounds.
From "pause" to "compare" engines do not sample all the time; "save" and "copy" are before.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPT, ANSWER = list(range(300, 340)), list(range(400, 432))
TOLERANCE = 0.3
"""In bfloat16, of a random model."""


def main() -> None:
    if sys.argv[1:2] == ["--trainer"]:
        rounds, folder, *urls = sys.argv[2:]
        print(json.dumps(publish_in_turns(Path(folder), urls, int(rounds))))
        return
    from api_load import asked as arguments  # the trainer's Python lacks what these need
    from support.vllm_server import running_vllm

    python = ROOT / ".venv-vllm/bin/python"
    asked = arguments(__doc__, python=python, engines=2, rounds=3, layers=22)
    # Not resolved: what a link names is not a virtual environment.
    python = Path.cwd() / asked.python
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        model = folder / "model"
        make_model(python, model, asked.layers)
        urls = []
        for number in range(asked.engines):
            own = folder / str(number)
            own.mkdir()
            more = ("--dtype", "bfloat16", "--max-num-batched-tokens", "2048")
            engine = running_vllm(python, own, learning=True, model=model, more=more)
            urls.append(stack.enter_context(engine).root_url)
        words = ("--trainer", str(asked.rounds), str(folder), *urls)
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "clients"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [python, __file__, *words], check=True, stdout=subprocess.PIPE, text=True, env=environ
        )
    show(json.loads(done.stdout.splitlines()[-1]), asked.engines)


def make_model(python: Path, folder: Path, layers: int) -> None:
    script = f"""
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
config = Qwen2Config(vocab_size=32768, hidden_size=1024, intermediate_size=2816,
    num_hidden_layers={layers}, num_attention_heads=16, num_key_value_heads=2,
    max_position_embeddings=4096, tie_word_embeddings=False)
Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained({str(folder)!r})
"""
    tiny = folder.with_name("tiny")
    subprocess.run(
        [python, ROOT / "tests/support/tiny_model.py", tiny], check=True, capture_output=True
    )
    subprocess.run([python, "-c", script], check=True, stdout=sys.stderr)
    for path in tiny.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).write_bytes(path.read_bytes())


def publish_in_turns(folder: Path, urls: list[str], rounds: int) -> dict[str, Any]:
    """The trainer: returns the seconds of each round by way, and the size of the model."""
    import torch
    from envserver_clients.weights import PromptCheck, Transfer, VllmFull
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).eval()
    files = VllmFull(urls, folder / "weights", keep=1)
    # The same bytes are in all engines: compared once, after the first round.
    sent = Transfer(urls, compare_every=rounds + 1)
    seconds: dict[str, list[dict[str, float]]] = {"files": [], "gloo": []}
    differences = []
    for version in range(1, 2 * rounds + 1):
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(1.01)
            ids = torch.tensor([PROMPT + ANSWER])
            logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
            scored = logprobs.gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0].tolist()
        check = PromptCheck(PROMPT, ANSWER, scored, TOLERANCE)
        if version % 2:
            published = files.publish(version, model.save_pretrained, check)
            seconds["files"].append(published.seconds)
        else:
            published = sent.publish(version, model.named_parameters(), check)
            seconds["gloo"].append(published.seconds)
        assert not published.failed, published.failed
        differences.append(published.difference)
        print(version, published.seconds, published.difference, file=sys.stderr, flush=True)
    size = sum(value.numel() * value.element_size() for value in model.parameters())
    return {"seconds": seconds, "megabytes": size / 1e6, "differences": differences}


def show(found: dict[str, Any], engines: int) -> None:
    print(f"{found['megabytes']:.0f} MB in bfloat16, {engines} vLLMs; medians of seconds")
    for way, rounds in found["seconds"].items():
        phases = {phase: statistics.median(one[phase] for one in rounds) for phase in rounds[0]}
        standing = ("pause", "load", "send", "check", "compare")
        still = statistics.median(sum(one.get(name, 0.0) for name in standing) for one in rounds)
        total = statistics.median(sum(one.values()) for one in rounds)
        each = ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
        print(f"{way}: {total:.2f} in all, {still:.2f} of them without sampling ({each})")
    print(f"largest difference of a logprob: {max(found['differences']):.2g}")


if __name__ == "__main__":
    main()
