"""`envserver_clients.sft` and `envserver_clients.dpo` with TRL itself, on a random model: what is
learned, what is left behind, and what a kill does.
"""

from __future__ import annotations

import json
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
from envserver_clients.finetuning.settings import DpoSettings, SftSettings, read_settings
from envserver_clients.finetuning.tokens import NOT_TRAINED
from envserver_clients.finetuning.trainers import dpo_trainer, sft_trainer
from safetensors.torch import load_file
from support.tiny_model import main as make_tiny

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
FAST = ("--learning-rate", "3e-3", "--batch-size", "2", "--accumulate", "2", "--threads", "1")
STEPS = ("--schedule", "linear", "--warmup", "0", "--no-gradient-checkpointing")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    make_tiny(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number % 4} + {number % 3}?"},
                {"role": "assistant", "content": f"{number % 4 + number % 3}"},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes." * (1 + number % 5)},
            ]
        }
        for number in range(count)
    ]


def command(of: Any, model: Path, data: Path, output: Path, *words: str) -> int:
    given = ("--model", model, "--data", data, "--output", output, *FAST, *STEPS, *words)
    status: int = of.main([str(word) for word in given])
    return status


def lines(output: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.endswith(("seconds", "time", "_second"))
        }
        for line in found
    ]


def test_the_loss_is_of_the_assistants_tokens_alone(model: Path, tmp_path: Path) -> None:
    """By hand, from the model's own logits; and only those tokens have a label at all."""
    from datasets import Dataset
    from envserver_clients.finetuning.examples import ExampleCounts, sft_examples
    from envserver_clients.finetuning.tokens import Encoder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    path = write(tmp_path / "rows.jsonl", sums(3))
    rows = list(
        sft_examples([path], Encoder(tokenizer), ExampleCounts(), max_length=99, too_long="drop")
    )
    words = ["--model", str(model), "--data", str(path), "--output", "out", "--batch-size", "3"]
    given = read_settings(SftSettings, "sft", words)
    trainer = sft_trainer(given, tokenizer, Dataset.from_list(rows), None, tmp_path / "w", [])
    (batch,) = trainer.get_train_dataloader()
    labels, ids = batch["labels"], batch["input_ids"]
    for row, (label, tokens) in enumerate(zip(labels, ids, strict=True)):
        kept = label != NOT_TRAINED
        assert torch.equal(label[kept], tokens[kept])
        told = tokenizer.decode(tokens[kept])
        assert told.count("<|im_end|>") == 2 and "Sure?" not in told, row
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch)).item()
        plain = AutoModelForCausalLM.from_pretrained(model)
        logits = plain(ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
        logprobs = logits.log_softmax(-1)

        def by_hand(targets: torch.Tensor) -> float:
            every = logprobs.gather(-1, targets[:, 1:, None])[..., 0]
            return -every[labels[:, 1:] != NOT_TRAINED].mean().item()

        other = torch.where(labels == NOT_TRAINED, (ids + 7) % 4096, ids)
        assert loss == pytest.approx(by_hand(ids), rel=1e-5)
        assert by_hand(other) == by_hand(ids)
        everything = trainer.compute_loss(trainer.model, {**batch, "labels": ids}).item()
        assert abs(everything - loss) > 1e-3


def test_each_tool_gets_an_adapter_that_can_go_to_the_hub(model: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    data, output = tmp_path / "data", tmp_path / "out"
    for tool in ("bash", "reason"):
        rows = [{"tool": tool, "instruction": f"{n}", "output": f"{n} {tool}"} for n in range(8)]
        write(data / tool / "train.jsonl", rows)
        write(data / tool / "val.jsonl", rows[:2])
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
    before = base.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    merged = PeftModel.from_pretrained(base, made).merge_and_unload().state_dict()
    alone = load_file(made / "merged" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(merged[name], alone[name]) and not torch.allclose(merged[name], before)

    assert command(sft, model, data, output, *words) == 0  # done already
    assert command(sft, model, data, output, *words, "--seed", "1") == 2
    assert command(sft, model, data, tmp_path, *words, "--tool", "bash") == 2
    assert command(sft, model, data, output, *words, "--tool", "none") == 2


def test_a_killed_training_goes_on_to_the_same_weights(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", sums(12))
    words = ("--lora", "--lora-dropout", "0.2", "--epochs", "2", "--checkpoint-every", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command(sft, model, data, whole, *words) == 0

    child = multiprocessing.get_context("fork").Process(
        target=command, args=(sft, model, data, killed, *words)
    )
    child.start()
    until = time.monotonic() + 900
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data, output = write(tmp_path / "rows.jsonl", sums(8)), tmp_path / "out"
    assert command(sft, model, data, output, "--steps", "8", "--max-length", "8") == 2
    assert "none of 8 rows is left" in capfd.readouterr().err
    assert command(sft, model, data, output, "--steps", "8", "--keep-checkpoints") == 0
    losses = [line["loss"] for line in lines(output)]
    assert losses[-1] < losses[0] / 2
    AutoModelForCausalLM.from_pretrained(output)
    assert AutoTokenizer.from_pretrained(output).chat_template
    assert (output / "checkpoints" / "checkpoint-8").is_dir()


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{number} or {number + 1}?"}],
            "chosen": [
                {"role": "assistant", "content": "Look."},
                {"role": "user", "content": "TOOL RESULT: more"},
                {"role": "assistant", "content": f"{number + 1}"},
            ],
            "rejected": [{"role": "assistant", "content": f"{number}, I think"}],
            "env": "math",
        }
        for number in range(count)
    ]


def test_preferences_are_learned(model: Path, tmp_path: Path) -> None:
    data, output = write(tmp_path / "pairs.jsonl", pairs(8)), tmp_path / "out"
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
    from envserver_clients.finetuning.examples import ExampleCounts, pair_examples
    from envserver_clients.finetuning.tokens import Encoder
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    path = write(tmp_path / "pairs.jsonl", pairs(2))
    rows = list(
        pair_examples([path], Encoder(tokenizer), ExampleCounts(), max_length=99, too_long="drop")
    )
    words = ["--model", str(model), "--data", str(path), "--output", "out", "--batch-size", "2"]
    given = read_settings(DpoSettings, "dpo", words)
    trainer = dpo_trainer(given, tokenizer, Dataset.from_list(rows), None, tmp_path / "w", [])
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
        (batch,) = trainer.get_train_dataloader()
        loss = trainer.compute_loss(trainer.model, dict(batch)).item()
        ids, counted = batch["input_ids"], batch["completion_mask"][:, 1:].bool()

        def summed(one: Any) -> torch.Tensor:
            logits = one(ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
            every = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            return torch.where(counted, every, 0.0).sum(1)

        chosen, rejected = (summed(trainer.model) - summed(trainer.ref_model)).chunk(2)
        by_hand = -torch.nn.functional.logsigmoid(given.beta * (chosen - rejected)).mean()
    assert loss == pytest.approx(by_hand.item(), rel=1e-4)
    told = tokenizer.decode(ids[0, 1:][counted[0]])
    assert told.startswith("Look.<|im_end|>") and "RESULT" not in told


def test_the_file_of_defaults_says_what_holds_without_it(tmp_path: Path) -> None:
    path = ROOT / "configs" / "trl_defaults.yaml"
    words = ["--model", "m", "--data", "d", "--output", "o"]
    file = ["--config", str(path)]
    for kind, section in ((SftSettings, "sft"), (DpoSettings, "dpo")):
        assert read_settings(kind, section, words + file) == read_settings(kind, section, words)
    router = read_settings(SftSettings, "sft", [*words, *file, "--preset", "router", "--seed", "7"])
    assert (router.lora, router.lora_dropout, router.warmup, router.rate) == (True, 0, 0.1, 2e-4)
    assert "down_proj" not in router.lora_targets and router.seed == 7
    for preset in yaml.safe_load(path.read_text())["presets"]:
        read_settings(SftSettings, "sft", [*words, *file, "--preset", preset])
