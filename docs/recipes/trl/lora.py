"""A LoRA for an environment with turns and agents, by TRL's GRPOTrainer or AsyncGRPOTrainer.

    python -m envserver_local --model MODEL --enable-lora        # or vLLM, see weights/README.md
    envserver serve --env game.py --openai.base_url http://127.0.0.1:9001/v1 --env.group_size 8
    python lora.py async --environment game --model MODEL        # all agents, each by its reward
    python lora.py grpo --environment game --model MODEL --agent one       # one agent

For grpo start the server with `--rollouts.max_queued_groups 0 --openai.model_name
'policy@{version}'`: it gives each adapter to the engine, which keeps serving; async gives it the
merged weights. `--cpu` trains without a GPU (async needs one: its attention is a kernel for GPUs).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset
from envserver_clients.adapters.trl_async import EnvserverRolloutWorker
from envserver_clients.adapters.trl_prompts import task_prompts
from envserver_clients.adapters.trl_rollouts import EnvserverRollouts, environment_reward
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import LocalFull, Lora
from peft import LoraConfig

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("trainer", choices=["grpo", "async"])
parser.add_argument("--environment", required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--agent", help="which agent grpo trains; default: the first")
parser.add_argument("--server", default="http://127.0.0.1:8000")
parser.add_argument("--engine", default="http://127.0.0.1:9001")
parser.add_argument("--output", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=64, help="rows of a step")
parser.add_argument("--group", type=int, default=8, help="rollouts of a task, for grpo")
parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
parser.add_argument("--cpu", action="store_true", help="train without a GPU")


def main() -> None:
    asked = parser.parse_args()
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    common = {
        "output_dir": str(asked.output),
        "max_steps": asked.steps,
        "per_device_train_batch_size": asked.batch,
        "learning_rate": asked.rate,
        "temperature": 1.0,  # the server's --sampling.temperature
        "logging_steps": 1,
        "report_to": "none",
        "gradient_checkpointing": False,
        "bf16": not asked.cpu,
        "use_cpu": asked.cpu,
    }
    with SyncEnvClient(asked.server, run=None) as client:
        train = one_agent if asked.trainer == "grpo" else all_agents
        train(asked, client, adapter, common)


def one_agent(
    asked: argparse.Namespace, client: SyncEnvClient, adapter: LoraConfig, common: dict[str, Any]
) -> None:
    from trl import GRPOConfig, GRPOTrainer

    weights = Lora(asked.engine, asked.output / "weights", server=client)
    with EnvserverRollouts(asked.server, weights=weights, agent=asked.agent) as rollouts:
        GRPOTrainer(
            model=asked.model,
            args=GRPOConfig(
                num_generations=asked.group, model_init_kwargs={"dtype": "float32"}, **common
            ),
            train_dataset=Dataset.from_list(task_prompts(asked.server, asked.environment)),
            rollout_func=rollouts,
            reward_funcs=environment_reward,
            peft_config=adapter,
        ).train()


def all_agents(
    asked: argparse.Namespace, client: SyncEnvClient, adapter: LoraConfig, common: dict[str, Any]
) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    weights = LocalFull(asked.engine, asked.output / "weights", server=client)
    worker = EnvserverRolloutWorker(
        asked.server, run="lora", model=asked.model, weights=weights, groups=2
    )
    AsyncGRPOTrainer(
        model=asked.model,
        args=AsyncGRPOConfig(token_budget=0, **common),
        train_dataset=Dataset.from_list([{"prompt": "The server has the tasks."}]),
        rollout_worker=worker,
        weight_transfer=worker.weight_transfer,
        peft_config=adapter,
        callbacks=[worker.checkpoints()],
    ).train()
    worker.check_health(60)


if __name__ == "__main__":
    main()
