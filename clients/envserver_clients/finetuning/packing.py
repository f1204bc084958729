"""Checks that rows which share one packed row do not see each other.

TRL packs whole rows (best fit decreasing) and gives position ids that start again with each; no
attention mask. transformers' attention keeps them apart by these. Layers with another kind of
memory (state spaces, linear attention) may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from envserver_records import ConfigError

_MOST = {True: 0.05, False: 1e-3}
"""Maximum mean difference of log-probabilities: in bfloat16, and otherwise."""


def check_apart(model: Any, packed: Any, *, half: bool) -> None:
    """Compares the first packed row with its rows alone, in one forward pass each.

    Args:
        packed: the data set of TRL's trainer, with `seq_lengths`.
        half: computing is in bfloat16.

    Raises:
        ConfigError: the model's layers mix them.
    """
    row = next((one for one in packed if len(one["seq_lengths"]) > 1), None)
    if row is None:
        return
    difference = packed_difference(model, row["input_ids"], row["seq_lengths"], half=half)
    if not difference <= _MOST[half]:
        raise ConfigError(
            f"--packing does not fit this model: packed rows see each other (log-probabilities "
            f"differ by {difference:.3g} on average from those of the rows alone).",
            hint="Leave --packing out.",
        )


def packed_difference(model: Any, ids: Sequence[int], lengths: Sequence[int], *, half: bool) -> Any:
    """Returns the mean absolute difference of the tokens' log-probabilities, packed and alone.

    Args:
        ids: T token ids of a packed row.
        lengths: the lengths of its rows; their sum is T.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            together = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
            alone = [
                model(input_ids=one, use_cache=False).logits[0]
                for one in tokens.split(list(lengths), dim=1)
            ]
    finally:
        model.train(was_training)
    total, start = 0.0, 0
    for logits, length in zip(alone, lengths, strict=True):
        targets = tokens[0, start + 1 : start + length, None]
        mine, other = (
            one[: length - 1].float().log_softmax(-1).gather(-1, targets)
            for one in (together[start : start + length], logits)
        )
        total += float((mine - other).abs().sum())
        start += length
    return total / max(len(ids) - len(lengths), 1)
