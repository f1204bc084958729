"""Checks at start-up that the engine computes the model as transformers does.

Masks, positions, cache and attention are this engine's own code and may be wrong for an unknown
architecture. So a few tokens sampled here are compared with a plain pass without a cache and with
transformers' own attention.
"""

from __future__ import annotations

import torch
from envserver_records.errors import ConfigError
from transformers import PreTrainedModel

from . import attention
from .generation import Generator
from .rows import Row, Sampling

_PROMPT = 24
_SAMPLED = 4
_PLAIN = "eager"
_TOLERANCES = {torch.float32: 1e-3}
_ROUGH = 0.5
"""Tolerance of a logprob in half precision or 4 bits, where other sums differ visibly."""


def check(generator: Generator) -> float:
    """Returns the largest difference of a logprob, for two prompts that were sampled together."""
    model = generator.model
    size = model.get_input_embeddings().num_embeddings
    rows = [
        Row([(7 + 31 * place) % size for place in range(length)], Sampling(max_tokens=_SAMPLED))
        for length in (_PROMPT, _PROMPT // 2)
    ]
    try:
        generator.join(rows)
        for _ in range(_SAMPLED):
            generator.step()
        difference = max(_difference(model, row) for row in rows)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The local engine cannot run a {type(model).__name__}: {error}.",
            hint=attention.OTHERS,
        ) from error
    finally:
        generator.forget()
    if not difference <= _TOLERANCES.get(model.dtype, _ROUGH):
        raise ConfigError(
            f"The local engine computes {type(model).__name__} otherwise than transformers: a "
            f"logprob differs by {difference:.2g}.",
            hint=attention.OTHERS,
        )
    return difference


def _difference(model: PreTrainedModel, row: Row) -> float:
    ids = torch.tensor([row.tokens], device=model.device)
    own = model.config._attn_implementation
    model.set_attn_implementation(_PLAIN)
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(own)
    logprobs = logits[len(row.prompt) - 1 : -1].log_softmax(dim=-1)
    expected = logprobs.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
    found = torch.tensor(row.logprobs, device=model.device)
    return float((expected - found).abs().max())
