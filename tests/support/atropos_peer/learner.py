"""atroposlib's example trainer, learning from a server on a CPU: python learner.py OPTIONS.

Its own `train_legacy`: registration, batches, padding, loss, optimizer and checkpoints. Instead of
starting vLLM anew from each checkpoint, a running local engine loads it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import LocalFull
from transformers import AutoModelForCausalLM

# Imported, but not asked for anything; others that would use it were imported above.
sys.modules["wandb"] = types.ModuleType("wandb")
from example_trainer import TrainingConfig, trainers  # noqa: E402

del sys.modules["wandb"]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--server", "--engine", "--model", "--output"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--batch", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    with SyncEnvClient(asked.server, run=None) as client:
        weights = LocalFull(asked.engine, Path(asked.output) / "weights", server=client)
        versions = itertools.count(1)

        def launch(config: Any, checkpoint: str) -> None:
            """What starts vLLM with the model of this folder."""
            if checkpoint != config.model_name:
                weights.publish(next(versions), lambda folder: convert(checkpoint, folder), None)

        trainers.launch_vllm_server = launch
        trainers.train_legacy(
            TrainingConfig(
                model_name=asked.model,
                lr=asked.rate,
                training_steps=asked.steps,
                batch_size=asked.batch,
                gradient_accumulation_steps=1,
                save_path=str(Path(asked.output) / "checkpoints"),
                vllm_restart_interval=1,
                device="cpu",
                atropos_url=asked.server,
            )
        )


def convert(checkpoint: str, folder: Path) -> None:
    """Saves the trainer's 16-bit weights as the engine reads them: float32, as safetensors."""
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").save_pretrained(folder)


if __name__ == "__main__":
    main()
