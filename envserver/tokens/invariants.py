"""What holds of every trajectory's tokens. Checked on each one before it may be delivered.

By number: 1 every sampled token is trained once, in order; 2 its logprob with it, finite and
not positive; 3 the arrays of a row have one length, and what is trained was sampled; 4 what the
model saw stands in some row; 6 as many logprobs as ids; 7 version spans are a partition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import TokensError
from ..records import Call, Sequence
from .flags import DEFAULT, Actions

LOGPROB_ROUNDING = 1e-6
"""A sampled token's logprob may be this much above 0."""


def check(calls: list[Call], sequences: list[Sequence], actions: Actions = DEFAULT) -> None:
    """Returns if `sequences` say exactly what `calls` recorded.

    Raises:
        TokensError: one does not; `detail` holds the invariant's number and the call or row.
    """
    exact = [call for call in calls if call.exact]
    for call in exact:
        _check_call(call)
    by_call: dict[int, list[Sequence]] = {}
    for row, sequence in enumerate(sequences):
        _check_row(row, sequence)
        for index in sequence.path:
            by_call.setdefault(index, []).append(sequence)
    for call in exact:
        if actions.worst(call.flags) == "train":
            _check_trained_once(call, by_call.get(call.index, []))


def _check_call(call: Call) -> None:
    size = len(call.completion_ids)
    if len(call.logprobs) != size:
        raise _broken(
            6, f"{len(call.logprobs)} logprobs for {size} sampled tokens", call=call.index
        )
    if not np.all(np.isfinite(call.logprobs)) or np.any(call.logprobs > LOGPROB_ROUNDING):
        raise _broken(2, "a logprob is positive or not finite", call=call.index)
    at = 0
    for span in call.versions:
        if span.start != at or span.end < span.start:
            raise _broken(7, f"version spans have a gap at token {at}", call=call.index)
        at = span.end
    if at != size:
        raise _broken(7, f"version spans end at {at} of {size} tokens", call=call.index)


def _check_row(row: int, sequence: Sequence) -> None:
    columns = (sequence.mask, sequence.logprobs, sequence.calls, sequence.versions)
    if any(len(column) != len(sequence.tokens) for column in columns):
        raise _broken(3, "the arrays of a row differ in length", row=row)
    if not np.all(np.isin(sequence.calls[sequence.mask == 1], sequence.path)):
        raise _broken(3, "a trained token was not sampled by a call of its row", row=row)
    if np.any(sequence.logprobs[sequence.mask == 0] != 0):
        raise _broken(3, "context carries a logprob", row=row)


def _check_trained_once(call: Call, sequences: list[Sequence]) -> None:
    """`sequences`: those whose path holds `call`; no other has a trained token of it."""
    tokens, logprobs = [], []
    seen = np.concatenate([call.prompt_ids, call.completion_ids])
    stands = False
    for sequence in sequences:
        own = (sequence.calls == call.index) & (sequence.mask == 1)
        tokens.append(sequence.tokens[own])
        logprobs.append(sequence.logprobs[own])
        stands = stands or (np.array_equal(sequence.tokens[: len(seen)], seen))
    if not np.array_equal(_join(tokens), call.completion_ids):
        raise _broken(1, "sampled tokens are missing, doubled or changed", call=call.index)
    if not np.array_equal(_join(logprobs), call.logprobs):
        raise _broken(2, "logprobs are not those recorded", call=call.index)
    if call.completion_ids.size and not stands:
        raise _broken(4, "no row begins with what the model saw and sampled", call=call.index)


def _join(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0)


def _broken(invariant: int, message: str, **where: int) -> TokensError:
    return TokensError(
        f"Invariant {invariant} of the recorded tokens does not hold: {message}.",
        hint="The rollout is not delivered.",
        invariant=invariant,
        **where,
    )
