"""The trainer's side of weight updates: python versions_process.py MODEL full|lora.

In, a JSON object a line: {"save": FOLDER, "version": N} writes the weights of a version; {"score":
ROWS, "version": N} gives the logprob of each token but the first of each row, by transformers in
float32. Each version is made from its number alone, and far from every other one.
Runs where torch and transformers are; knows nothing of engines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 8
_FULL_SPREAD, _LORA_SPREAD = 0.05, 0.12
_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "bias": "none",
    "target_modules": [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ],
}


class Versions:
    """The versions of the model in `folder`."""

    def __init__(self, folder: Path, *, lora: bool) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._lora = lora
        self._base = {name: value.clone() for name, value in self._model.named_parameters()}
        self._now = -1

    def save(self, version: int, folder: Path) -> None:
        """Writes what an engine loads."""
        if not self._lora:
            self._become(version)
            self._model.save_pretrained(folder)
            return
        tensors = {}
        for name, (down, up) in self._adapter(version).items():
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(_CONFIG))

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The weights of the version that was scored last, tied ones once."""
        return list(self._model.named_parameters())

    def score(self, version: int, rows: list[list[int]]) -> list[list[float]]:
        """The logprob of each token but the first, given those before it."""
        self._become(version)
        return [self._scored(row) for row in rows]

    @torch.no_grad()
    def _scored(self, row: list[int]) -> list[float]:
        ids = torch.tensor([row])
        logprobs = torch.log_softmax(self._model(ids, use_cache=False).logits[0, :-1], dim=-1)
        found: list[float] = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    @torch.no_grad()
    def _become(self, version: int) -> None:
        if version == self._now:
            return
        self._now = version
        parameters = dict(self._model.named_parameters())
        for name, value in self._base.items():
            parameters[name].copy_(value)
        if self._lora:
            for name, (down, up) in self._adapter(version).items():
                parameters[name] += up @ down * (ALPHA / RANK)
            return
        noise = torch.Generator().manual_seed(version)
        for value in parameters.values():
            value += torch.randn(value.shape, generator=noise) * _FULL_SPREAD

    def _adapter(self, version: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A [rank, in] and B [out, rank] for each weight."""
        noise = torch.Generator().manual_seed(version)
        made = {}
        for name, value in self._base.items():
            if name.split(".")[-2] in _CONFIG["target_modules"] and value.ndim == 2:
                down = torch.randn((RANK, value.shape[1]), generator=noise) * _LORA_SPREAD
                up = torch.randn((value.shape[0], RANK), generator=noise) * _LORA_SPREAD
                made[name] = (down, up)
        return made


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    versions = Versions(folder, lora=kind == "lora")
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if "save" in asked:
            versions.save(asked["version"], Path(asked["save"]))
        else:
            answer = versions.score(asked["version"], asked["score"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
