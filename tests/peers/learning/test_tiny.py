"""The tiny model's making: what is said is marked, and the same again gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from envserver_local.tiny.conversations import read_conversations
from envserver_local.tiny.making import make
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOL = {
    "type": "function",
    "function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}},
}


def lines() -> Iterator[str]:
    """Groups as `envserver process` writes them, with what is read of them."""
    for number in range(8):
        asked = {"role": "user", "content": f"What is {number}+1?"}
        arguments = json.dumps({"expression": f"{number}+1"})
        call = {"id": "a", "function": {"name": "calculate", "arguments": arguments}}
        messages = [
            asked,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": str(number + 1)},
            {"role": "assistant", "content": f"\\boxed{{{number + 1}}}"},
        ]
        rollout = {"rollout_id": f"{number}-r0", "rows": [0], "reward": 1.0, "tools": [TOOL]}
        yield json.dumps({"messages": [messages], "envserver": {"rollouts": [rollout]}})


def test_same_seed_same_bytes_and_transformers_reads_them(tmp_path: Path) -> None:
    (tmp_path / "groups.jsonl").write_text("\n".join(lines()) + "\n")
    losses: list[float] = []
    for name, seed in (("a", 0), ("b", 0)):
        make(
            [tmp_path / "groups.jsonl"],
            tmp_path / name,
            seed=seed,
            steps=4,
            threads=1,
            report=lambda step, loss: losses.append(loss),
        )
    assert losses[:4] == losses[4:]
    assert losses[3] < losses[0]
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()

    words = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.hidden_size // model.config.num_attention_heads == 64
    assert not model.config.tie_word_embeddings
    assert 800_000 < sum(one.numel() for one in model.parameters()) < 1_200_000
    conversation = read_conversations(tmp_path / "groups.jsonl")[3]
    call = '{"name": "calculate", "arguments": {"expression": "3+1"}}'
    assert [piece.text for piece in conversation.pieces() if piece.said] == [
        f"<tool_call>{call}</tool_call><|im_end|>",
        "\\boxed{4}<|im_end|>",
    ]
    rendered = words.apply_chat_template(
        conversation.messages, tools=conversation.tools, tokenize=False
    )
    assert rendered == conversation.text() + "\n"
    ids = words(rendered)["input_ids"]
    assert words.decode(ids) == rendered
    assert max(ids) < model.config.vocab_size
    assert words.convert_ids_to_tokens(words("12")["input_ids"]) == ["1", "2"]
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([ids])).logits).all()
