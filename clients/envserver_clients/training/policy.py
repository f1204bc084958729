"""The learning model: loads it, optionally with LoRA, and saves it for an engine.

In: a folder or a hub id. Out: a `Policy` with logprobs (with gradient), trained parameters, and
files that engines and transformers read. What always holds: dropout is off, so the learning policy
and the engine compute the same function; trained weights are float32, whatever the type of
computing, because a step of a usual learning rate is lost in the rounding of bfloat16.
"""

from __future__ import annotations

import json
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
        dtype: type of computing (autocast), and of weights that are not trained and saved ones.
        keep_reference: keep what `reference_logprobs` needs.
        checkpointed: compute activations again in the backward pass: less memory, more time.
    """

    def __init__(
        self,
        model: str,
        *,
        lora_rank: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        keep_reference: bool = False,
        checkpointed: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # it would show one per step for short writes
        self._source = model
        self.device = torch.device(device)
        self._dtype = dtype
        self.is_lora = lora_rank > 0
        kept = dtype if self.is_lora else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=kept).to(self.device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._reference: Any = None
        if self.is_lora:
            self.model = _with_lora(self.model, lora_rank)
        elif keep_reference:
            self._reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            self._reference.to(self.device).eval().requires_grad_(False)
        self.model.eval()
        if checkpointed:
            _checkpoint_activations(self.model)

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
        """Returns float32[B, N] for the targets from `batch.first` on, with gradient: of the
        distributions that were sampled from, at their temperatures."""
        return self._logprobs(self.model, batch)[0]

    def both_logprobs(self, batch: Padded) -> tuple[Tensor, Tensor]:
        """Returns the same, and without gradient what the delivered ones are to be compared with:
        logprobs from before the temperature where those are."""
        return self._logprobs(self.model, batch)

    def reference_logprobs(self, batch: Padded) -> Tensor:
        """Returns the same for the model as it was loaded, without gradient."""
        with torch.no_grad():
            if self.is_lora:
                with self.model.disable_adapter():
                    return self._logprobs(self.model, batch)[0]
            return self._logprobs(self._reference, batch)[0]

    def _logprobs(self, model: Any, batch: Padded) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        attention = torch.from_numpy(batch.attention).to(self.device)
        targets = tokens[:, batch.first + 1 :]
        # Logits of untrained tokens (a long prompt) would take most of the time and memory.
        keep = targets.shape[1] + 1
        with self._computing():
            found = model(tokens, attention_mask=attention, logits_to_keep=keep, use_cache=False)
        logits, given = found.logits[:, :-1], batch.temperatures[:, batch.first :]
        temperatures = None if (given == 1).all() else torch.from_numpy(given).to(self.device)
        logprobs = token_logprobs(logits, targets, temperatures)
        raw = torch.from_numpy(batch.raw[:, batch.first :]).to(self.device).bool()
        if not raw.any():
            return logprobs, logprobs.detach()
        return logprobs, torch.where(
            raw, token_logprobs(logits.detach(), targets), logprobs.detach()
        )

    def _computing(self) -> torch.autocast:
        is_half = self._dtype is not torch.float32
        return torch.autocast(self.device.type, self._dtype if is_half else None, enabled=is_half)

    def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the logprob of each token except the first, given those before it."""
        ids = torch.tensor([tokens], device=self.device)
        with torch.no_grad():
            with self._computing():
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
        if self.is_lora:
            self.model.save_pretrained(folder)
            return
        self.model.save_pretrained(folder, state_dict=_cast(self.model.state_dict(), self._dtype))
        about = folder / "config.json"  # transformers writes the type of the weights in memory
        kept = json.loads(about.read_text()) | {"dtype": str(self._dtype).removeprefix("torch.")}
        about.write_text(json.dumps(kept, indent=2))
        self.tokenizer.save_pretrained(folder)


def _cast(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors in `dtype`; those that share memory still do."""
    done: dict[int, Tensor] = {}
    return {
        name: done.setdefault(value.data_ptr(), value.to(dtype)) for name, value in state.items()
    }


def _checkpoint_activations(model: Any) -> None:
    """Turns gradient checkpointing on; what is inside of each layer stays without dropout."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # it is only done in training


def _with_lora(model: Any, rank: int) -> Any:
    """Adds LoRA (arXiv 2106.09685) to every linear layer except the last; scale 2, no dropout."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def tensors(batch: Padded, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns delivered logprobs and mask [B, N] of the targets from `batch.first` on, advantages
    [B] or [B, N], and weights [B].
    """
    arrays: tuple[np.ndarray[Any, Any], ...] = (
        batch.logprobs[:, batch.first :],
        batch.mask[:, batch.first :],
        batch.advantages if batch.advantages.ndim == 1 else batch.advantages[:, batch.first :],
        batch.weights,
    )
    first, second, third, fourth = (torch.from_numpy(array).to(device) for array in arrays)
    return first, second, third, fourth
