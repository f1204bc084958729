"""`envserver_clients.sft` and `envserver_clients.dpo` with TRL itself, on a random model: what is
learned, also of packed rows and on a base in 4 bits, what is left behind and measured, and what a
kill does.
"""

import importlib.util
import json
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from envserver_clients import dpo, sft
from envserver_clients.finetuning.examples import (
    NOT_TRAINED,
    Encoder,
    ExampleCounts,
    encoded_rows,
    pair_examples,
    sft_examples,
    written,
)
from envserver_clients.finetuning.heldout import HeldOut
from envserver_clients.finetuning.runs import TrainerData, check_apart, packed_difference
from envserver_clients.finetuning.settings import DpoSettings, SftSettings, read_settings
from envserver_clients.finetuning.trainers import dpo_trainer, sft_trainer
from safetensors.torch import load_file
from support.cases import write_jsonl
from support.waiting import PATIENCE
from transformers import AutoModelForCausalLM, AutoTokenizer

from envserver import ConfigError

ROOT = Path(__file__).parents[3]
FAST = ("--learning-rate", "3e-3", "--batch-size", "2", "--accumulate", "2", "--threads", "1")
STEPS = ("--schedule", "linear", "--warmup", "0", "--no-gradient-checkpointing")
WEIGHT = "model.layers.0.mlp.up_proj.weight"
NEEDED = ["--model", "m", "--data", "d", "--output", "o"]


def messages(*contents: str) -> list[dict[str, Any]]:
    """The user begins."""
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(contents)]


def sums(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": messages(
                *(f"{number % 4} + {number % 3}?", f"{number % 4 + number % 3}"),
                *("Sure?", "Yes." * (1 + number % 5)),
            )
        }
        for number in range(count)
    ]


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": messages("a" * (1 + number % 5), f"{number} " * (1 + 3 * (number % 3)))}
        for number in range(count)
    ]


def with_call(question: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    return {
        "messages": [
            messages(question)[0],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}],
    }


def pairs(count: int) -> list[dict[str, Any]]:
    """The chosen answer has a tool's result in between, which the user tells."""
    return [
        {
            "prompt": messages(f"{number} or {number + 1}?"),
            "chosen": messages("", "Look.", "TOOL RESULT: more", f"{number + 1}")[1:],
            "rejected": [{"role": "assistant", "content": f"{number}, I think"}],
            "env": "math",
        }
        for number in range(count)
    ]


def command(of: Any, model: Path, data: Path, output: Path, *words: str) -> int:
    given = ("--model", model, "--data", data, "--output", output, *FAST, *STEPS, *words)
    status: int = of.main([str(word) for word in given])
    return status


def lines(output: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "time", "_second")
    return [{key: line[key] for key in line if not key.endswith(clock)} for line in found]


def float32(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs_of(model: Any, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    """Those of each token but the first, by a plain pass."""
    return model(ids, **more).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def trainer_of(model: Path, data: Path, folder: Path, *words: str) -> Any:
    """TRL's trainer for the rows of a file."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    given = ["--model", str(model), "--data", str(data), "--output", "out", *words]
    settings = read_settings(SftSettings, "sft", given)
    rows = sft_examples(settings, [data], Encoder(tokenizer), ExampleCounts())
    train = written(rows, ("input_ids", "labels"), folder / "rows.arrow")
    return sft_trainer(settings, TrainerData(tokenizer, train, None, folder / "work"))


def test_the_loss_is_of_the_assistants_tokens_alone(model: Path, tmp_path: Path) -> None:
    """By hand, from the model's own logits; and only those tokens have a label at all."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = write_jsonl(tmp_path / "rows.jsonl", sums(3))
    trainer = trainer_of(model, data, tmp_path, "--batch-size", "3")
    (batch,) = trainer.get_train_dataloader()
    labels, ids = batch["labels"], batch["input_ids"]
    for row, (label, tokens) in enumerate(zip(labels, ids, strict=True)):
        kept = label != NOT_TRAINED
        assert torch.equal(label[kept], tokens[kept])
        told = tokenizer.decode(tokens[kept])
        assert told.count("<|im_end|>") == 2 and "Sure?" not in told, row
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch)).item()
        every = logprobs_of(float32(model), ids, attention_mask=batch["attention_mask"])
        assert loss == pytest.approx((-every[labels[:, 1:] != NOT_TRAINED].mean()).item(), rel=1e-5)
        everything = trainer.compute_loss(trainer.model, {**batch, "labels": ids}).item()
        assert abs(everything - loss) > 1e-3


def test_each_tool_gets_an_adapter_that_can_go_to_the_hub(model: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard
    from peft import PeftModel

    data, output = tmp_path / "data", tmp_path / "out"
    for tool in ("bash", "reason"):
        rows = [{"tool": tool, "instruction": f"{n}", "output": f"{n} {tool}"} for n in range(8)]
        write_jsonl(data / tool / "train.jsonl", rows)
        write_jsonl(data / tool / "val.jsonl", rows[:2])
    words = ("--lora", "--merged", "--steps", "2", "--license", "apache-2.0")
    assert command(sft, model, data, output, *words) == 0
    assert sorted(path.name for path in output.iterdir()) == ["bash", "reason"]
    made = output / "bash"
    card = ModelCard.load(made / "README.md")
    assert card.data.to_dict() == {
        "base_model": "base",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["trl", "sft", "envserver", "lora"],
        "license": "apache-2.0",
        "base_model_relation": "adapter",
    }
    done = json.loads((made / "training.json").read_text())
    assert done["data"] in card.text and done["counts"]["examples"] == 8
    assert [line["step"] for line in lines(made)] == [0, 1, 2, 2, 2]
    assert "eval_loss" in lines(made)[-2] and "heldout_loss" in lines(made)[-1]
    everything = "".join(path.read_text() for path in made.glob("*.[mj]*") if path.is_file())
    assert str(tmp_path) not in everything
    assert not list(made.glob(".*"))

    base = AutoModelForCausalLM.from_pretrained(model)
    before = base.state_dict()[WEIGHT].clone()
    merged = PeftModel.from_pretrained(base, made).merge_and_unload().state_dict()
    assert torch.allclose(merged[WEIGHT], load_file(made / "merged" / "model.safetensors")[WEIGHT])
    assert not torch.allclose(merged[WEIGHT], before)

    assert command(sft, model, data, output, *words) == 0  # done already
    assert command(sft, model, data, output, *words, "--seed", "1") == 2
    assert command(sft, model, data, tmp_path, *words, "--tool", "bash") == 2
    assert command(sft, model, data, output, *words, "--tool", "none") == 2


def test_a_killed_training_goes_on_to_the_same_weights(model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", sums(12))
    words = ("--lora", "--lora-dropout", "0.2", "--epochs", "2", "--checkpoint-every", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command(sft, model, data, whole, *words) == 0

    child = multiprocessing.get_context("fork").Process(
        target=command, args=(sft, model, data, killed, *words)
    )
    child.start()
    until = time.monotonic() + PATIENCE
    while not (killed / "metrics.jsonl").exists() or len(lines(killed)) < 3:
        assert child.is_alive() and time.monotonic() < until
        time.sleep(0.02)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (killed / "training.json").exists()
    torn = killed / ".work" / "checkpoints" / "checkpoint-99"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_step": 9')

    assert command(sft, model, data, killed, *words) == 0
    same = "adapter_model.safetensors"
    assert (killed / same).read_bytes() == (whole / same).read_bytes()
    assert [line["step"] for line in lines(killed)] == list(range(1, 7))
    assert lines(killed) == lines(whole)
    assert (killed / "README.md").read_text() == (whole / "README.md").read_text()


def test_all_weights_learn_and_a_whole_model_is_left(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, output = write_jsonl(tmp_path / "rows.jsonl", sums(8)), tmp_path / "out"
    assert command(sft, model, data, output, "--steps", "8", "--max-length", "8") == 2
    assert "none of 8 rows is left" in capfd.readouterr().err
    assert command(sft, model, data, output, "--steps", "8", "--keep-checkpoints") == 0
    losses = [line["loss"] for line in lines(output)]
    assert losses[-1] < losses[0] / 2
    AutoModelForCausalLM.from_pretrained(output)
    assert AutoTokenizer.from_pretrained(output).chat_template
    assert (output / "checkpoints" / "checkpoint-8").is_dir()


def test_preferences_are_learned(model: Path, tmp_path: Path) -> None:
    data, output = write_jsonl(tmp_path / "pairs.jsonl", pairs(8)), tmp_path / "out"
    words = ("--lora", "--lora-dropout", "0", "--steps", "4", "--beta", "0.2")
    assert command(dpo, model, data, output, *words) == 0
    found = lines(output)
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["rewards/margins"] > found[0]["rewards/margins"] + 0.05
    assert "Direct preference" in (output / "README.md").read_text()
    assert (output / "adapter_model.safetensors").is_file()


def test_of_a_pair_what_tools_answered_does_not_count(model: Path, tmp_path: Path) -> None:
    """DPO's loss by hand, from the logprobs of the assistant's tokens under a changed model."""
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(model)
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs(2))
    words = ["--model", str(model), "--data", str(path), "--output", "out", "--batch-size", "2"]
    given = read_settings(DpoSettings, "dpo", words)
    rows = Dataset.from_list(
        list(pair_examples(given, [path], Encoder(tokenizer), ExampleCounts()))
    )
    trainer = dpo_trainer(given, TrainerData(tokenizer, rows, None, tmp_path / "w"))
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
        (batch,) = trainer.get_train_dataloader()
        loss = trainer.compute_loss(trainer.model, dict(batch)).item()
        ids, counted = batch["input_ids"], batch["completion_mask"][:, 1:].bool()

        def summed(one: Any) -> torch.Tensor:
            every = logprobs_of(one, ids, attention_mask=batch["attention_mask"])
            return torch.where(counted, every, 0.0).sum(1)

        chosen, rejected = (summed(trainer.model) - summed(trainer.ref_model)).chunk(2)
        by_hand = -torch.nn.functional.logsigmoid(given.beta * (chosen - rejected)).mean()
    assert loss == pytest.approx(by_hand.item(), rel=1e-4)
    told = tokenizer.decode(ids[0, 1:][counted[0]])
    assert told.startswith("Look.<|im_end|>") and "RESULT" not in told


def test_the_file_of_defaults_says_what_holds_without_it(tmp_path: Path) -> None:
    path = ROOT / "configs" / "trl_defaults.yaml"
    words = [*NEEDED, "--config", str(path)]
    for kind, section in ((SftSettings, "sft"), (DpoSettings, "dpo")):
        assert read_settings(kind, section, words) == read_settings(kind, section, NEEDED)
    router = read_settings(SftSettings, "sft", [*words, "--preset", "router", "--seed", "7"])
    assert (router.lora, router.lora_dropout, router.warmup, router.rate) == (True, 0, 0.1, 2e-4)
    assert "down_proj" not in router.lora_targets and router.seed == 7
    for preset in yaml.safe_load(path.read_text())["presets"]:
        read_settings(SftSettings, "sft", [*words, "--preset", preset])


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
    data = write_jsonl(tmp_path / "rows.jsonl", chats(12))
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
    class Mixing(torch.nn.Module):
        """Forgets where rows begin, as layers with a running state do."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = float32(model)

        def forward(self, position_ids: Any = None, **given: Any) -> Any:
            return self.inner(**given)

    row = {"input_ids": list(range(5, 45)), "seq_lengths": [15, 25]}
    mixing = Mixing()
    assert packed_difference(mixing.inner, row["input_ids"], row["seq_lengths"], half=False) < 1e-5
    with pytest.raises(ConfigError, match="see each other"):
        check_apart(mixing, [{"seq_lengths": [3], "input_ids": [1, 2, 3]}, row], half=False)


def test_held_out_rows_are_measured_token_by_token(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = write_jsonl(tmp_path / "rows.jsonl", [*chats(5), with_call("one?")])
    words = ["--model", str(model), "--data", str(data), "--output", "out", "--max-length", "256"]
    settings = read_settings(SftSettings, "sft", words)
    rows = list(encoded_rows([data], Encoder(tokenizer), ExampleCounts(), settings))
    net = float32(model)
    losses = []
    for row, _ in rows:
        every = -logprobs_of(net, torch.tensor([row.ids]))[0]
        losses += every[torch.tensor(row.trained[1:])].tolist()
    wanted = sum(losses) / len(losses)
    for size in (1, 4):
        found = HeldOut(tokenizer, lambda: iter(rows), size, 1, half=False).measure(net)
        assert found["heldout_loss"] == pytest.approx(wanted, rel=1e-5)
        assert found["heldout_perplexity"] == pytest.approx(math.exp(wanted), rel=1e-4)
        assert found["heldout_calls_checked"] == 1 and found["heldout_calls_valid"] == 0
        assert net.training is False and "heldout_call_loss" in found


def test_a_model_learns_to_call_and_its_card_tells(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "train.jsonl", [with_call(f"{number}?") for number in range(4)])
    write_jsonl(tmp_path / "data" / "val.jsonl", [with_call("5?"), *chats(1)])
    output = tmp_path / "out"
    words = ("--steps", "25", "--packing", "--max-length", "512", "--check-calls", "1")
    words += ("--batch-size", "4", "--accumulate", "1")
    assert command(sft, model, tmp_path / "data", output, *words) == 0
    done = json.loads((output / "training.json").read_text())["heldout"]
    assert done["calls_valid"] == [0, 1] and done["calls_same"] == [0, 1]
    assert done["call_turn_accuracy"] == [0, 1] and done["call_loss"][1] < 0.5
    assert [line["step"] for line in lines(output) if "heldout_loss" in line] == [0, 25]
    card = (output / "README.md").read_text()
    assert "| calls valid | 0 | 1 |" in card and "## Held-out rows" in card
    assert "heldout" not in card


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="make learner installs bitsandbytes"
)
def test_a_lora_is_trained_on_a_base_in_4_bits(model: Path, tmp_path: Path) -> None:
    """bitsandbytes itself, on the CPU: what is computed is the base as its 4 bits say."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    data, output = write_jsonl(tmp_path / "rows.jsonl", chats(8)), tmp_path / "out"
    words = ("--lora", "--lora-dropout", "0", "--load-in-4bit")
    trainer = trainer_of(model, data, tmp_path / "a", *words)
    small = trainer.model.get_base_model()
    layers = {name: one for name, one in small.named_modules() if isinstance(one, Linear4bit)}
    assert len(layers) == 14
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    same = float32(model)
    with torch.no_grad():
        for name, layer in layers.items():
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            same.get_submodule(name.replace(".base_layer", "")).weight.copy_(weight)
        ids = torch.tensor([trainer.train_dataset[0]["input_ids"]])
        trainer.model.eval()
        torch.testing.assert_close(trainer.model(ids).logits, same(ids).logits, atol=1e-3, rtol=0)

    words += ("--batch-size", "4", "--accumulate", "1", "--steps", "12", "--merged")
    assert command(sft, model, data, output, *words) == 0
    first, *_, last = lines(output)
    assert last["loss"] < first["loss"] * 0.8
    adapter = load_file(output / "adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    base, merged = (load_file(path / "model.safetensors") for path in (model, output / "merged"))
    a, b = (adapter[f"base_model.model.{WEIGHT[:-7]}.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(merged[WEIGHT], base[WEIGHT] + 2.0 * (b @ a), atol=1e-6, rtol=1e-5)
