"""Loads a model and its tokenizer from a folder or the hub."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from envserver_records.errors import ConfigError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from . import attention
from .options import Options
from .text import Text

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_TOKENS = 32_768
"""Maximum context length if neither the model nor the user sets a smaller one."""


class Loaded(msgspec.Struct, frozen=True):
    """A loaded model.

    Args:
        most_tokens: maximum number of tokens of a prompt and its answer together.
        defaults: sampling settings of the model's generation config.
    """

    model: PreTrainedModel
    text: Text
    most_tokens: int
    defaults: dict[str, float]


def load(options: Options) -> Loaded:
    """Loads the model that `options` name."""
    device = _device(options)
    try:
        trust = options.trust_remote_code
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            config=config,
            attn_implementation=attention.NAME,
            dtype=_dtype(options, config, device),
            trust_remote_code=trust,
            **_quantized(options, device),
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"The model {options.model!r} cannot be loaded: {error}",
            hint="Name a folder with config.json, weights and tokenizer, or a model on the hub.",
        ) from error
    if not options.load_in_4bit:
        model.to(device)
    model.eval().requires_grad_(False)
    generation = model.generation_config or GenerationConfig()
    said = generation.to_diff_dict()
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None) or _MOST_TOKENS
    return Loaded(
        model=model,
        text=Text(
            tokenizer,
            _stop_ids(tokenizer, generation, text_config),
            options.default_chat_template_kwargs,
        ),
        most_tokens=min(longest, options.max_model_len or _MOST_TOKENS),
        defaults={name: said[name] for name in _SAMPLING if said.get(name) is not None},
    )


def _device(options: Options) -> torch.device:
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(options: Options, config: Any, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        found: torch.dtype = getattr(torch, options.dtype)
        return found
    # On a CPU half precision is slower, not faster, and not exact.
    return torch.float32 if device.type == "cpu" else getattr(config, "dtype", torch.float32)


def _quantized(options: Options, device: torch.device) -> dict[str, Any]:
    if not options.load_in_4bit:
        return {}
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise ConfigError(
            "4 bits need bitsandbytes, which is not installed.",
            hint="pip install bitsandbytes accelerate, or leave --load-in-4bit out.",
        ) from error
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": settings, "device_map": {"": device}}


def _stop_ids(tokenizer: Any, generation: Any, config: Any) -> list[int]:
    """Returns the tokenizer's end token first, then those in the model's configurations."""
    ids: list[int] = []
    for found in (
        tokenizer.eos_token_id,
        generation.eos_token_id,
        getattr(config, "eos_token_id", None),
    ):
        for index in found if isinstance(found, list) else [found]:
            if index is not None and index not in ids:
                ids.append(index)
    return ids
