"""Routed experts of calls and rows: checked as they come, joined as calls are.

A call has those of its prompt and answer but for the last token, which the engine never computed;
one that continues another is only asked for what that lacks: from the last token of it on.
"""

from __future__ import annotations

import numpy as np
from envserver_records.errors import EngineGarbage, TokensError
from envserver_records.experts import RoutedExperts, Table, experts_from, table_from_text
from envserver_records.records import Call, Mask

_MOST_PER_TOKEN = 2**16
"""Experts of one token over all layers; the largest models have a few thousand."""


def first_unknown(call: Call) -> int:
    """Returns the position from which on a call that continues `call` has to tell the experts."""
    if call.experts is None:
        return 0
    return len(call.prompt_ids) + len(call.completion_ids) - 1


def read_experts(text: str, size: int, start: int) -> RoutedExperts:
    """Reads what the engine tells of a call.

    Args:
        size: number of tokens of prompt and answer.
        start: position of the first token that was asked for; engines may tell all.

    Raises:
        EngineGarbage: it cannot be read, or belongs to another number of tokens.
    """
    try:
        table = table_from_text(text)
    except ValueError as error:
        raise EngineGarbage(f"The engine's routed experts cannot be read: {error}.") from error
    if table[:1].size > _MOST_PER_TOKEN:
        raise EngineGarbage(f"The engine tells {table[:1].size} experts for each token.")
    begin = size - 1 - len(table)
    if begin not in (0, start):
        raise EngineGarbage(
            f"The engine's routed experts are of {len(table)} tokens; asked for were those of the "
            f"tokens {start} to {size - 1}."
        )
    return experts_from(table, begin)


def joined(path: list[Call], mask: Mask) -> RoutedExperts | None:
    """Returns the experts of a row of these calls, root first.

    Where two calls computed a token, those of the earlier one count: it sampled with them.

    Returns:
        None: those of some token before the last trained one are unknown.

    Raises:
        TokensError: two calls tell other numbers of layers or experts.
    """
    parts, at = list[Table](), 0
    for call in path:
        held = call.experts
        if held is None or held.start > at:
            continue
        table = held.table[at - held.start :]
        if parts and table.shape[1:] != parts[0].shape[1:]:
            raise TokensError(
                f"Call {call.index} tells routed experts of the form {table.shape[1:]}, an earlier "
                f"call of the form {parts[0].shape[1:]}.",
                hint="Engines of one model must be alike.",
            )
        parts.append(table)
        at += len(table)
    if not parts or not mask.any() or at < np.flatnonzero(mask)[-1]:
        return None
    return experts_from(np.concatenate(parts))
