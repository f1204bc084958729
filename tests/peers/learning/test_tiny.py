"""The tiny model's making: what is said is marked, and transformers reads it."""

import json
from collections.abc import Iterator
from pathlib import Path

from envserver_local.tiny.training import make, read_conversations
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOL = {"type": "function"}
TOOL |= {"function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}}}


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


def test_what_is_said_is_marked_and_transformers_reads_it(tmp_path: Path) -> None:
    (tmp_path / "groups.jsonl").write_text("\n".join(lines()) + "\n")
    made, losses = tmp_path / "made", list[float]()
    make(
        [tmp_path / "groups.jsonl"],
        made,
        seed=0,
        steps=4,
        threads=1,
        report=lambda step, loss: losses.append(loss),
    )
    assert losses[3] < losses[0]
    words = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made)
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
