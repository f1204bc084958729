"""TRL's real trainers, learning from a server: python trl_trainers.py OPTIONS. Runs in .venv-learn.

Writes OUTPUT/grpo.jsonl, a line for each generation of a GRPOTrainer (its step, rewards, how far
the engine's logprobs are from those of the trainer's own weights at that moment), and likewise
OUTPUT/async.jsonl, a line for each sample that an AsyncGRPOTrainer took.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from envserver_clients.adapters.trl_environments import dataset_rows, math_environment
from envserver_clients.adapters.trl_prompts import task_prompts
from envserver_clients.adapters.trl_rollouts import EnvserverRollouts, environment_reward
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import LocalFull
from envserver_records.tasks import Json

ON_A_CPU = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
}


class Recorded:
    """A rollout function that also writes down what it gave."""

    def __init__(self, rollouts: EnvserverRollouts, path: Path) -> None:
        self._rollouts = rollouts
        self._path = path

    def __call__(self, prompts: list[Any], trainer: Any) -> Json:
        columns = self._rollouts(prompts, trainer)
        assert {len(column) for column in columns.values()} == {len(prompts)}
        rows = zip(
            columns["prompt_ids"],
            columns["completion_ids"],
            columns["logprobs"],
            columns["env_mask"],
            strict=True,
        )
        line = {
            "step": trainer.state.global_step,
            "prompts": prompts,
            "rewards": columns["env_reward"],
            "versions": columns["env_version"],
            "masks": columns["env_mask"],
            "truncated": columns["env_truncated"],
            "texts": trainer.processing_class.batch_decode(columns["completion_ids"]),
            "farthest": max(
                farthest(
                    trainer.model,
                    prompt + completion,
                    [0.0] * len(prompt) + logprobs,
                    [0] * len(prompt) + mask,
                )
                for prompt, completion, logprobs, mask in rows
            ),
        }
        write(self._path, line)
        return columns


def write(path: Path, line: Json) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@torch.no_grad()
def farthest(model: Any, ids: list[int], logprobs: list[float], mask: list[int]) -> float:
    """The largest difference between a trained token's logprob and the one that `model` gives."""
    tokens = torch.tensor(ids)
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    ours = logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return float(((ours - torch.tensor(logprobs[1:])).abs() * torch.tensor(mask[1:])).max())


def grpo(asked: argparse.Namespace, output: Path, weights: LocalFull) -> None:
    from trl import GRPOConfig, GRPOTrainer

    prompts = task_prompts(asked.server, asked.environment, limit=asked.tasks)
    with EnvserverRollouts(asked.server, weights=weights) as rollouts:
        GRPOTrainer(
            model=asked.model,
            args=GRPOConfig(
                output_dir=str(output),
                max_steps=asked.grpo,
                per_device_train_batch_size=asked.batch,
                num_generations=asked.group,
                learning_rate=asked.rate,
                save_strategy="no",
                model_init_kwargs={"dtype": "float32"},
                **ON_A_CPU,
            ),
            train_dataset=Dataset.from_list(prompts),
            rollout_func=Recorded(rollouts, output / "grpo.jsonl"),
            reward_funcs=environment_reward,
        ).train()


def asynchronous(asked: argparse.Namespace, output: Path, weights: LocalFull) -> None:
    from envserver_clients.adapters.trl_async import EnvserverRolloutWorker
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    # Its attention is a kernel for GPUs, whose speed it asks for; all else is as it is.
    async_grpo_trainer.get_peak_flops_per_device = lambda *about: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=plain_attention)
    worker = EnvserverRolloutWorker(
        asked.server, run="trl-async", model=asked.model, weights=weights, groups=2
    )
    taken = worker.rollout_buffer.get

    def recorded(*args: Any, **more: Any) -> Any:
        sample = taken(*args, **more)
        line = {
            "trainer_version": trainer.model_version,
            "version": sample.model_version,
            "group": sample.group_id,
            "advantage": sample.advantage,
            "reward": sample.metrics["reward"],
            "prompt": sample.prompt,
            "completion": sample.completion,
        }
        if sample.model_version == trainer.model_version and not write_distance.done:
            write_distance(line, sample)
        write(output / "async.jsonl", line)
        return sample

    def write_distance(line: Json, sample: Any) -> None:
        """While the trainer has the very weights that sampled it."""
        columns = (sample.input_ids, sample.old_log_probs, sample.completion_mask)
        line["farthest"] = farthest(reference(trainer), *(one.tolist() for one in columns))
        write_distance.done = True

    write_distance.done = False
    worker.rollout_buffer.get = recorded
    trainer = AsyncGRPOTrainer(
        model=asked.model,
        args=AsyncGRPOConfig(
            output_dir=str(output),
            max_steps=asked.asynchronous,
            per_device_train_batch_size=asked.batch,
            token_budget=0,
            learning_rate=asked.rate,
            seed=asked.seed,
            save_strategy="steps",
            save_steps=asked.asynchronous,
            save_only_model=True,
            **ON_A_CPU,
        ),
        train_dataset=Dataset.from_list([{"prompt": "unused"}]),
        rollout_worker=worker,
        weight_transfer=worker.weight_transfer,
        callbacks=[worker.checkpoints()],
    )
    trainer.train()
    worker.check_health(60)


def reference(trainer: Any) -> Any:
    """The trainer's weights in a model with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    config = trainer.model.config.__class__.from_dict(trainer.model.config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(trainer.model.state_dict())
    return model.eval()


def plain_attention(
    query: Any,
    key: Any,
    value: Any,
    starts_q: Any,
    starts_k: Any,
    *lengths: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Any:
    """What flash attention computes of packed segments, each looking at the end of its own keys."""
    assert causal and window_size == (-1, -1)
    parts = []
    repeats = query.shape[1] // key.shape[1]
    for index in range(len(starts_q) - 1):
        q = query[starts_q[index] : starts_q[index + 1]].transpose(0, 1)
        rows = slice(int(starts_k[index]), int(starts_k[index + 1]))
        k = key[rows].transpose(0, 1).repeat_interleave(repeats, 0)
        v = value[rows].transpose(0, 1).repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) * softmax_scale
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        parts.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def seats(asked: argparse.Namespace, output: Path) -> None:
    """Our math environment in TRL's own loop, which generates by itself."""
    import trl
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    words = AutoTokenizer.from_pretrained(asked.model)
    # TRL reads calls of templates that it knows.
    words.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    chairs = math_environment(data_set="arithmetic", limit=8)
    GRPOTrainer(
        model=asked.model,
        processing_class=words,
        args=GRPOConfig(
            output_dir=str(output),
            max_steps=asked.seats,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=16,
            save_strategy="no",
            model_init_kwargs={"dtype": "float32"},
            **ON_A_CPU,
        ),
        train_dataset=Dataset.from_list(dataset_rows(chairs)),
        environment_factory=chairs,
    ).train()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--server", "--engine", "--model", "--output", "--environment"):
        parser.add_argument(name, required=True)
    for name in ("--grpo", "--asynchronous", "--seats"):
        parser.add_argument(name, type=int, default=0, help="steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=42)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    output = Path(asked.output)
    output.mkdir(parents=True, exist_ok=True)
    with SyncEnvClient(asked.server, run=None) as client:
        weights = LocalFull(asked.engine, output / "weights", server=client)
        if asked.grpo:
            grpo(asked, output, weights)
        if asked.asynchronous:
            asynchronous(asked, output, weights)
        if asked.seats:
            seats(asked, output)


if __name__ == "__main__":
    main()
