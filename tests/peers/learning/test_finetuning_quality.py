"""Packed rows, a base in 4 bits, and measures of held-out rows, with TRL on a random model."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from envserver_clients import sft
from envserver_clients.finetuning.examples import ExampleCounts, Limits, encoded_rows, written
from envserver_clients.finetuning.heldout import HeldOut
from envserver_clients.finetuning.packing import check_apart, packed_difference
from envserver_clients.finetuning.settings import SftSettings, read_settings
from envserver_clients.finetuning.tokens import NOT_TRAINED, Encoder
from envserver_clients.finetuning.trainers import quantization, sft_trainer
from safetensors.torch import load_file
from support.tiny_model import main as make_tiny

from envserver import ConfigError

torch.set_num_threads(1)
FAST = ("--learning-rate", "3e-3", "--batch-size", "4", "--accumulate", "1", "--threads", "1")
STEPS = ("--schedule", "linear", "--warmup", "0", "--no-gradient-checkpointing")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="make learner installs bitsandbytes"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    make_tiny(folder)
    return folder


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
]


def with_call(question: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
        ],
        "tools": TOOLS,
    }


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": "a" * (1 + number % 5)},
                {"role": "assistant", "content": f"{number} " * (1 + 3 * (number % 3))},
            ]
        }
        for number in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(model: Path, data: Path, output: Path, *words: str) -> int:
    given = ("--model", model, "--data", data, "--output", output, *FAST, *STEPS, *words)
    return sft.main([str(word) for word in given])


def trainer_of(model: Path, data: Path, folder: Path, *words: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    given = ["--model", str(model), "--data", str(data), "--output", "out", *words]
    settings = read_settings(SftSettings, "sft", given)
    limits = Limits(settings.max_length, "drop")
    rows = (
        {"input_ids": row.ids, "labels": row.labels}
        for row, _ in encoded_rows([data], Encoder(tokenizer), ExampleCounts(), limits)
    )
    train = written(rows, ("input_ids", "labels"), folder / "rows.arrow")
    return sft_trainer(settings, tokenizer, train, None, folder / "work", [])


def loss_and_gradient(trainer: Any) -> tuple[float, torch.Tensor, int]:
    """All rows make one step: TRL's own batches, normalised by the number of trained tokens."""
    batches = list(trainer.get_train_dataloader())
    count = sum(int((batch["labels"] != NOT_TRAINED).sum()) for batch in batches)
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(
            trainer.model, dict(batch), num_items_in_batch=torch.tensor(count)
        )
        loss.backward()
        total += loss.item()
    gradient = torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])
    return total, gradient, len(batches)


def test_packed_rows_teach_the_same_in_fewer_batches(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", chats(12))
    words = ("--max-length", "96", "--no-gradient-checkpointing")
    plain = trainer_of(model, data, tmp_path / "a", *words, "--batch-size", "1")
    packed = trainer_of(model, data, tmp_path / "b", *words, "--batch-size", "2", "--packing")
    assert len(packed.train_dataset) < len(plain.train_dataset) / 2
    check_apart(packed.model, packed.train_dataset, half=False)
    wanted, by_rows, many = loss_and_gradient(plain)
    loss, gradient, few = loss_and_gradient(packed)
    assert few < many and loss == pytest.approx(wanted, rel=1e-6)
    assert (gradient - by_rows).norm() / by_rows.norm() < 5e-6


def test_a_model_that_mixes_packed_rows_is_refused(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    class Mixing(torch.nn.Module):
        """Forgets where rows begin, as layers with a running state do."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

        def forward(self, position_ids: Any = None, **given: Any) -> Any:
            return self.inner(**given)

    row = {"input_ids": list(range(5, 45)), "seq_lengths": [15, 25]}
    mixing = Mixing()
    apart = packed_difference(mixing.inner, row["input_ids"], row["seq_lengths"], half=False)
    assert apart < 1e-5
    with pytest.raises(ConfigError, match="see each other"):
        check_apart(mixing, [{"seq_lengths": [3], "input_ids": [1, 2, 3]}, row], half=False)


def test_held_out_rows_are_measured_token_by_token(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = write(tmp_path / "rows.jsonl", [*chats(5), with_call("one?")])
    encoder, limits = Encoder(tokenizer), Limits(256, "drop")
    rows = list(encoded_rows([data], encoder, ExampleCounts(), limits))
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for row, _ in rows:
        logprobs = net(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        losses += [
            -logprobs[place - 1, row.ids[place]].item()
            for place in range(len(row.ids))
            if row.trained[place]
        ]
    wanted = sum(losses) / len(losses)
    for size in (1, 4):
        found = HeldOut(tokenizer, lambda: iter(rows), size, 1, half=False).measure(net)
        assert found["heldout_loss"] == pytest.approx(wanted, rel=1e-5)
        assert found["heldout_perplexity"] == pytest.approx(math.exp(wanted), rel=1e-4)
        assert found["heldout_calls_checked"] == 1 and found["heldout_calls_valid"] == 0
        assert net.training is False and "heldout_call_loss" in found


def test_a_model_learns_to_call_and_its_card_tells(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.jsonl", [with_call(f"{number}?") for number in range(4)])
    write(tmp_path / "data" / "val.jsonl", [with_call("5?"), *chats(1)])
    output = tmp_path / "out"
    words = ("--steps", "25", "--packing", "--max-length", "512", "--check-calls", "1")
    assert command(model, tmp_path / "data", output, *words) == 0
    done = json.loads((output / "training.json").read_text())["heldout"]
    assert done["calls_valid"] == [0, 1] and done["calls_same"] == [0, 1]
    assert done["call_turn_accuracy"] == [0, 1] and done["call_loss"][1] < 0.5
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "heldout_loss" in line] == [0, 25]
    card = (output / "README.md").read_text()
    assert "| calls valid | 0 | 1 |" in card and "## Held-out rows" in card
    assert "heldout" not in card


def test_what_4_bits_ask_for() -> None:
    words = ["--model", "m", "--data", "d", "--output", "o", "--lora", "--load-in-4bit"]
    wanted = quantization(read_settings(SftSettings, "sft", [*words, "--dtype", "bfloat16"]))
    assert (wanted.load_in_4bit, wanted.bnb_4bit_quant_type) == (True, "nf4")
    assert wanted.bnb_4bit_use_double_quant and wanted.bnb_4bit_compute_dtype is torch.bfloat16
    assert quantization(read_settings(SftSettings, "sft", words[:-1])) is None


@needs_bitsandbytes
def test_a_lora_is_trained_on_a_base_in_4_bits(model: Path, tmp_path: Path) -> None:
    """bitsandbytes itself, on the CPU: what is computed is the base as its 4 bits say."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    data, output = write(tmp_path / "rows.jsonl", chats(8)), tmp_path / "out"
    words = ("--lora", "--lora-dropout", "0", "--load-in-4bit")
    trainer = trainer_of(model, data, tmp_path / "a", *words)
    small = trainer.model.get_base_model()
    layers = {name: one for name, one in small.named_modules() if isinstance(one, Linear4bit)}
    assert len(layers) == 14
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    same = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, layer in layers.items():
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            same.get_submodule(name.replace(".base_layer", "")).weight.copy_(weight)
        ids = torch.tensor([trainer.train_dataset[0]["input_ids"]])
        trainer.model.eval()
        torch.testing.assert_close(trainer.model(ids).logits, same(ids).logits, atol=1e-3, rtol=0)

    assert command(model, data, output, *words, "--steps", "12", "--merged") == 0
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] * 0.8
    adapter = load_file(output / "adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    base, merged = (load_file(path / "model.safetensors") for path in (model, output / "merged"))
    name = "model.layers.0.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    wanted = base[f"{name}.weight"] + 2.0 * (b @ a)
    torch.testing.assert_close(merged[f"{name}.weight"], wanted, atol=1e-6, rtol=1e-5)
