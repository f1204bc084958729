"""Router replay: tokens go to the experts that the engine chose when it sampled (arXiv 2510.11370).

Engine and trainer compute the same router logits but for rounding, which is enough to choose other
experts. Only the choice is replayed: the weights of the chosen experts are the model's own, with
gradient. transformers' routers choose by one `torch.topk` over all experts, whatever they do before
and after: here that call returns the recorded choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from envserver_records import ConfigError
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TOPK = (torch.topk, torch.Tensor.topk)


class Replay:
    """The routers of a model of transformers, which choose as they are told.

    Raises:
        ConfigError: the model has no router of a known kind.
    """

    def __init__(self, model: Any) -> None:
        self._chosen: Tensor | None = None
        self._layers = int(model.config.get_text_config().num_hidden_layers)
        self._experts = 0
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                self._experts = module.weight.shape[0]
                layer = _LAYER.search(name)
                assert layer is not None, name
                module.forward = self._replayed(module.forward, int(layer[1]))
        if not self._experts:
            raise ConfigError(
                "replay_experts is on, but the model has no router that can be replayed.",
                hint="It needs a mixture-of-experts model whose routers transformers calls "
                "...TopKRouter.",
            )

    def use(self, chosen: NDArray[np.int16] | None, device: torch.device) -> None:
        """Sets the experts of the next forward pass, and of its backward pass.

        Args:
            chosen: [tokens, layers, experts per token]; -1: the router chooses; None: all of them.

        Raises:
            ConfigError: they are of another model.
        """
        self._chosen = None if chosen is None else torch.from_numpy(chosen).to(device).long()
        if chosen is not None and (
            chosen.shape[1] != self._layers or chosen.max(initial=-1) >= self._experts
        ):
            raise ConfigError(
                f"Recorded experts are of {chosen.shape[1]} layers with numbers up to "
                f"{chosen.max()}; the model has {self._layers} layers of {self._experts} experts.",
                hint="The engine serves another model.",
            )

    def _replayed(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self._chosen is None:
                return forward(*args, **kwargs)
            with _Choosing(self._chosen[:, layer], self._experts):
                return forward(*args, **kwargs)

        return replayed


class _Choosing(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Within it `torch.topk` over `experts` numbers returns the places that are `chosen`."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._experts = experts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        is_choice = func in _TOPK and args[0].shape[-1] == self._experts
        if not is_choice or found.indices.shape != self._chosen.shape:
            return found
        chosen = torch.where(self._chosen >= 0, self._chosen, found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
