"""Provides a TRL trainer's weights and policy version to the engine and the server.

In: the trainer's model and its step. Out: the weights for `envserver_clients.weights`, a check of
what the engine must compute with them, and a policy version for the server. What always holds: the
server's version never decreases, even if a trainer restarts from an older checkpoint: then its
versions continue after the last published one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from envserver_clients.weights import PromptCheck

_TOLERANCE: Final = 1e-3
_ROUGH_TOLERANCE: Final = 0.2
"""For 16-bit weights, whose rounding alone changes a logprob by 0.1."""


class Versions:
    """Maps a trainer's steps to policy versions.

    Args:
        published: the server's version, -1: none.
    """

    def __init__(self, published: int) -> None:
        self._published = published
        self._base: int | None = None

    def of(self, step: int) -> int:
        """Returns the version after `step` steps; steps must not decrease."""
        if self._base is None:
            self._base = max(0, self._published + 1 - step)
        return self._base + step


def saver(trainer: Any) -> Callable[[Path], None]:
    """Returns a function that saves the trainer's model (with PEFT: the adapter) as safetensors.

    Call it on all ranks, because the weights may be distributed.
    """
    state = trainer.accelerator.get_state_dict(trainer.model)
    model = trainer.accelerator.unwrap_model(trainer.model)

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=state)

    return save


def check_of(trainer: Any, prompt_ids: list[int], completion_ids: list[int]) -> PromptCheck | None:
    """Returns the logprobs of a row under the trainer's weights; None if those are distributed."""
    import torch

    if trainer.accelerator.num_processes > 1:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.tensor([prompt_ids + completion_ids], device=model.device)
            logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
            logprobs = logits.float().log_softmax(-1)
            sampled = logprobs.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()
    finally:
        model.train(was_training)
    is_fine = next(model.parameters()).dtype == torch.float32
    tolerance = _TOLERANCE if is_fine else _ROUGH_TOLERANCE
    return PromptCheck(prompt_ids, completion_ids, sampled, tolerance)
