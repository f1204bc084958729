"""From a TRL trainer's step to the weights and the version that the engine samples with.

In: the trainer's model and its step. Out: the weights for `envserver_clients.weights`, what the
engine must compute with them, and a policy version for the server. What holds: the server's version
never goes down, also when a trainer begins again from an older checkpoint: then its steps are
counted on from what was published last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from envserver_clients.weights import PromptCheck

_TOLERANCE: Final = 1e-3
_ROUGH_TOLERANCE: Final = 0.2
"""Of weights in 16 bits, where rounding alone makes a tenth."""


class Versions:
    """The policy versions of a trainer's steps.

    Args:
        published: what the server has, -1 for none.
    """

    def __init__(self, published: int) -> None:
        self._published = published
        self._base: int | None = None

    def of(self, step: int) -> int:
        """The version of the weights after so many steps; steps never go down."""
        if self._base is None:
            self._base = max(0, self._published + 1 - step)
        return self._base + step


def saver(trainer: Any) -> Callable[[Path], None]:
    """What writes the trainer's model (of PEFT: the adapter) into a folder, as safetensors.

    To be called on all ranks: the weights may lie on several of them.
    """
    state = trainer.accelerator.get_state_dict(trainer.model)
    model = trainer.accelerator.unwrap_model(trainer.model)

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=state)

    return save


def check_of(trainer: Any, prompt_ids: list[int], completion_ids: list[int]) -> PromptCheck | None:
    """What the trainer's own weights say of a row; None where they lie on several ranks."""
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
