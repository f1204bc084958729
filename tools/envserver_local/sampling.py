"""Samples tokens from logits, for a whole batch at once. Pure.

A row's choice depends only on its own logits, settings, seed and position: the uniform number for a
position is a hash of seed and position, and the sampled token is where the cumulative probability
exceeds it. So a request with a seed gives the same answer in any batch, up to the rounding of the
logits themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .rows import Ranked, Row

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Settings:
    """Settings of the rows of a batch as tensors; made again when rows join or leave."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        asked = [row.sampling for row in rows]
        self.seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        temperature = torch.tensor([one.temperature for one in asked], device=device)
        self.greedy = temperature == 0
        self.all_greedy = all(one.temperature == 0 for one in asked)
        self.some_greedy = any(one.temperature == 0 for one in asked)
        self.temperature = temperature.masked_fill(self.greedy, 1.0)[:, None]
        self.filters = any(one.filters for one in asked)
        self.top_p = torch.tensor([one.top_p for one in asked], device=device)[:, None]
        self.top_k = torch.tensor(
            [one.top_k or 1 << 60 for one in asked], dtype=torch.int64, device=device
        )[:, None]
        self.min_p = torch.tensor([one.min_p for one in asked], device=device)[:, None]
        self.adjusted = [place for place, one in enumerate(asked) if one.adjusts(0)]
        self.ranked = [place for place, one in enumerate(asked) if one.top_logprobs]
        self.most_ranked = max((one.top_logprobs for one in asked), default=0)


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns a number in [0, 1) for each pair of seed and place: splitmix64, 53 bits of it."""
    with np.errstate(over="ignore"):
        mixed = seeds + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = _mixed(_mixed(mixed) + _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


def adjusted(logits: torch.Tensor, rows: Sequence[Row], places: Sequence[int]) -> torch.Tensor:
    """Returns logits with penalties, biases and bans applied to the rows at `places`."""
    logits = logits.clone()
    for place in places:
        row, line = rows[place], logits[place]
        asked = row.sampling
        if asked.allowed is not None:
            kept = line[list(asked.allowed)]
            line.fill_(float("-inf"))
            line[list(asked.allowed)] = kept
        if asked.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(row.tokens)), device=line.device)
            values = line[seen]
            line[seen] = torch.where(
                values > 0, values / asked.repetition_penalty, values * asked.repetition_penalty
            )
        if row.ids and (asked.presence_penalty or asked.frequency_penalty):
            ids, counts = torch.tensor(row.ids, device=line.device).unique(return_counts=True)
            line[ids] -= asked.frequency_penalty * counts + asked.presence_penalty
        for index, bias in asked.logit_bias.items():
            line[index] += bias
        if len(row.ids) < asked.min_tokens and asked.enders:
            line[list(asked.enders)] = float("-inf")
    return logits


def chosen(logits: torch.Tensor, settings: Settings, places: np.ndarray) -> torch.Tensor:
    """Samples one id per row.

    Args:
        logits: [rows, vocabulary], float32.
        places: [rows], number of tokens that each row has sampled before.
    """
    if settings.all_greedy:
        return logits.argmax(dim=-1)
    # Double precision: in single precision the sum would lose the least likely tokens.
    sums = torch.softmax(scaled(logits, settings), dim=-1).cumsum(dim=-1, dtype=torch.float64)
    picks = torch.from_numpy(uniforms(settings.seeds, places)).to(sums.device)[:, None]
    sampled = torch.searchsorted(sums, picks * sums[:, -1:], right=True)[:, 0]
    sampled.clamp_(max=logits.shape[-1] - 1)
    if not settings.some_greedy:
        return sampled
    return torch.where(settings.greedy, logits.argmax(dim=-1), sampled)


def scaled(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Returns logits after temperature (of greedy rows: 1) and filters."""
    logits = logits / settings.temperature
    if settings.filters:
        return filtered(logits, settings.top_k, settings.top_p, settings.min_p)
    return logits


def filtered(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns logits without the tokens that min_p, then top_k, then top_p exclude.

    Settings are [rows, 1]. The most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    out = (ordered < ordered[:, :1] + min_p.log()) | (ranks >= top_k)
    probabilities = ordered.masked_fill(out, float("-inf")).softmax(dim=-1)
    out |= probabilities.cumsum(dim=-1) - probabilities >= top_p
    out[:, 0] = False
    ordered = ordered.masked_fill(out, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def ranked(logprobs: torch.Tensor, count: int) -> list[Ranked]:
    """Returns the `count` most likely ids of each row of logprobs [rows, vocabulary]."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [
        list(zip(of_row, scores, strict=True))
        for of_row, scores in zip(ids.tolist(), values.tolist(), strict=True)
    ]
