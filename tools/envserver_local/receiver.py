"""Receives weights from a trainer over gloo, by the routes of vLLM's weight-transfer API.

In: buckets of tensors. Out: a model with these weights. What always holds: a model that has only a
part of a version does not sample: only a paused one receives, and `must_be_whole` refuses until a
whole one was received or loaded.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from envserver_records.errors import EngineRefused
from transformers import PreTrainedModel

from envserver.models.vllm_worker.envserver_gloo import BucketInfo, JoinInfo, join, receive


class Receiver:
    """Changes the weights of `model`; used by the engine's thread only.

    Args:
        incomplete: whether the weights are of more than one version.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.incomplete = False
        self._model = model
        self._group: Any = None
        self._missing: set[int] | None = None
        """Addresses of the tensors that were not received yet; None: no update is open."""

    def join(self, info: dict[str, Any]) -> None:
        """Connects to a trainer, instead of the one before.
        Raises EngineRefused: the trainer did not answer, or the model cannot be changed.
        """
        if getattr(self._model, "is_quantized", False):
            raise _refused("The weights of a model in 4 bits cannot be replaced.")
        self._group = None
        try:
            self._group = join(JoinInfo(**info), 0)
        except (TypeError, ValueError, OverflowError) as error:
            raise _refused(f"`init_info` cannot be used: {error}.", 400) from error
        except (RuntimeError, OSError) as error:
            raise _refused(f"No connection to the trainer: {error}.") from error

    def start(self) -> None:
        """Opens an update; one that failed is forgotten."""
        self._missing = {value.data_ptr() for value in self._targets().values()}

    def receive(self, info: dict[str, Any], *, paused: bool) -> None:
        """Receives the next bucket.

        Args:
            paused: whether the engine does not sample.
        """
        missing, self._missing = self._missing, None
        if not paused:
            raise _refused("The engine samples: pause it before its weights change.", 409)
        if missing is None or self._group is None:
            raise _refused("No weight update was started, or no trainer is connected.")
        try:
            targets = self._targets()
            for name, tensor in receive(self._group, BucketInfo(**info)):
                target = targets[name]
                if target.shape != tensor.shape:
                    raise ValueError(f"{name} has the shape {tuple(tensor.shape)}.")
                self.incomplete = True
                with torch.no_grad():
                    target.copy_(tensor)
                missing.discard(target.data_ptr())
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._group = None  # the trainer must not wait for us
            raise _refused(f"The bucket cannot be used: {error!r}.") from error
        self._missing = missing

    def finish(self, *, named: bool) -> None:
        """Closes the update. One in which nothing was received changes nothing.

        Args:
            named: whether the weights get a new name, so that they must be whole and new.
        """
        missing, self._missing = self._missing, None
        if missing is None:
            raise _refused("No weight update was started.")
        targets = self._targets()
        whole = len({value.data_ptr() for value in targets.values()})
        if missing and (named or len(missing) < whole):
            left = [name for name, at in targets.items() if at.data_ptr() in missing]
            raise _refused(f"{left[0]} and {len(left) - 1} more were not received.")
        if not missing:
            self.incomplete = False

    def must_be_whole(self) -> None:
        """Checks that all weights are of one version. Raises EngineRefused: they are not."""
        if self.incomplete:
            raise _refused("An update of the weights failed: send all of them again.", 409)

    def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of each tensor."""
        return {
            name: hashlib.sha256(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
            for name, value in self._targets().items()
        }

    def _targets(self) -> dict[str, torch.Tensor]:
        return dict(self._model.state_dict(keep_vars=True))


def _refused(message: str, status: int = 500) -> EngineRefused:
    return EngineRefused(message, status=status)
