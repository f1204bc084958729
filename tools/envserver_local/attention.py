"""Attention of a padded batch, registered with transformers under NAME.

With one query per row (a decoding step) it computes two batched products over the heads that share
keys, without copying the keys for each head. With more queries (a prompt) it calls torch's fused
attention.
"""

from __future__ import annotations

from typing import Any

import torch
from envserver_records.errors import ConfigError
from torch.nn import functional
from transformers import AttentionInterface

NAME = "envserver_slots"
_FOREIGN = ("s_aux", "position_bias")
"""Inputs of attention that some models need and that are not supported here."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with the signature of transformers' attention functions.

    query [rows, heads, queries, size] and keys, values [rows, shared heads, length, size]
    -> [rows, queries, heads, size].

    Args:
        attention_mask: [rows, 1, queries, length], true where a query may attend.
    """
    if any(kwargs.get(name) is not None for name in _FOREIGN):
        raise ConfigError("The local engine does not know this model's attention.", hint=OTHERS)
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1 or softcap is not None:
        return _by_products(query, key, value, attention_mask, scale, softcap), None
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


def _by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    rows, heads, queries, size = query.shape
    shared = key.shape[1]
    # Heads that share keys are treated as further queries of the same head.
    grouped = (query * scale).reshape(rows, shared, heads // shared * queries, size)
    scores = torch.matmul(grouped, key.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, heads, queries, -1)
    scores.masked_fill_(mask.logical_not(), float("-inf"))
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    out = torch.matmul(weights.view(rows, shared, heads // shared * queries, -1), value)
    return out.view(rows, heads, queries, size).transpose(1, 2)


OTHERS = "Serve it with vLLM: envserver models start NAME --backend vllm."

AttentionInterface.register(NAME, attend)
