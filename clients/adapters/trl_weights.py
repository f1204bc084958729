"""From a TRL trainer's step to the weights and the version that the engine samples with.

In: the trainer's model and its step. Out: the weights in a folder for `clients.weights`, and a
policy version for the server. What holds: the server's version never goes down, also when a trainer
begins again from an older checkpoint: then its steps are counted on from what was published last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Push(Protocol):
    """What brings weights to an engine: any of `clients.weights`."""

    def publish(self, version: int, save: Callable[[Path], None], check: None = None) -> Any:
        """The engine samples with what `save` writes into the folder that it is given."""


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
    return lambda folder: model.save_pretrained(folder, state_dict=state)
