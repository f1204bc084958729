"""The learning model: loads it, optionally with LoRA, and saves it for an engine.

In: a folder or a hub id. Out: a `Policy` with logprobs (with gradient), trained parameters, and
files that engines and transformers read. What always holds: dropout is off, so the learning policy
and the engine compute the same function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .loss import token_logprobs
from .padding import Padded


class Policy:
    """A causal language model of transformers.

    Args:
        model: folder or hub id.
        lora_rank: rank of a LoRA to train instead of all weights; 0: train all weights.
        device: torch device.
        dtype: type of the weights.
        keep_reference: keep what `reference_logprobs` needs.
    """

    def __init__(
        self,
        model: str,
        *,
        lora_rank: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        keep_reference: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # it would show one per step for short writes
        self._source = model
        self.device = torch.device(device)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self.device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.is_lora = lora_rank > 0
        self._reference: Any = None
        if self.is_lora:
            self.model = _with_lora(self.model, lora_rank)
        elif keep_reference:
            self._reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            self._reference.to(self.device).eval().requires_grad_(False)
        self.model.eval()

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name."""
        named = self.model.named_parameters()
        return {name: value for name, value in named if value.requires_grad}

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def logprobs(self, batch: Padded) -> Tensor:
        """Returns float32[B, N] for the targets from `batch.first` on, with gradient."""
        return self._logprobs(self.model, batch)

    def reference_logprobs(self, batch: Padded) -> Tensor:
        """Returns the same for the model as it was loaded, without gradient."""
        with torch.no_grad():
            if self.is_lora:
                with self.model.disable_adapter():
                    return self._logprobs(self.model, batch)
            return self._logprobs(self._reference, batch)

    def _logprobs(self, model: Any, batch: Padded) -> Tensor:
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        attention = torch.from_numpy(batch.attention).to(self.device)
        targets = tokens[:, batch.first + 1 :]
        # Logits of untrained tokens (a long prompt) would take most of the time and memory.
        keep = targets.shape[1] + 1
        logits = model(tokens, attention_mask=attention, logits_to_keep=keep, use_cache=False)
        return token_logprobs(logits.logits[:, :-1], targets)

    def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the logprob of each token except the first, given those before it."""
        ids = torch.tensor([tokens], device=self.device)
        with torch.no_grad():
            logits = self.model(ids, use_cache=False).logits
            found: list[float] = token_logprobs(logits[:, :-1], ids[:, 1:])[0].tolist()
        return found

    def state(self) -> dict[str, Tensor]:
        """Returns the trained parameters, for a checkpoint."""
        return {name: value.detach() for name, value in self.trained.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Loads a checkpoint's weights.

        Raises:
            KeyError: it belongs to another model or other LoRA settings.
        """
        with torch.no_grad():
            for name, value in self.trained.items():
                value.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Saves what an engine loads: the model with its tokenizer, or only the LoRA (PEFT)."""
        self.model.save_pretrained(folder)
        if not self.is_lora:
            self.tokenizer.save_pretrained(folder)


def _with_lora(model: Any, rank: int) -> Any:
    """Adds LoRA (arXiv 2106.09685) to every linear layer except the last; scale 2, no dropout."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def tensors(batch: Padded, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns delivered logprobs and mask [B, N] of the targets from `batch.first` on, advantages
    and weights [B].
    """
    arrays: tuple[np.ndarray[Any, Any], ...] = (
        batch.logprobs[:, batch.first :],
        batch.mask[:, batch.first :],
        batch.advantages,
        batch.weights,
    )
    first, second, third, fourth = (torch.from_numpy(array).to(device) for array in arrays)
    return first, second, third, fourth
