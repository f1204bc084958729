"""Marks the rows that follow others by compaction, and shares the reward of a rollout among them.

An agent that summarises its history starts a new conversation, and so a new row. A conversation
holds all calls whose messages continue each other, however often they were rendered anew. It
follows another one of the same agent and model only where the record leaves no doubt:

- it began after the last call of the other, which nothing continues and nothing else follows;
- it neither continues nor repeats the other;
- it begins with the same user message; or it has the same system message and tools, and the other
  had several turns and did not end with a tool call, which may have started a sub-agent, or it
  begins with what a call said meanwhile, the summary; and no third conversation runs from before
  both until after the beginning of the later one: both may be its sub-agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial

from envserver_records.records import Call, Message, Sequence
from envserver_records.tasks import CompactionRewards, text_of

_SETUP = ("system", "developer")
_MOST_CONVERSATIONS = 64
"""An agent with more asks many short questions; comparing each with each would take seconds."""
_LINE = 24
"""Characters of a line that is not said twice by chance."""
_BEGINNING = 4
"""Messages of a conversation, besides those of the system, among which its summary is."""
_LINES, _TOLD = 8, 50_000
"""The longest lines of an answer, and the characters of a message, that are looked at."""


def mark_compaction(rows: list[Sequence], calls: list[Call], rule: CompactionRewards) -> None:
    """Sets `follows` and `share` of the rows of one rollout. `calls`: all, in order of commit; a
    program may ask for a summary beside the conversation, untrained."""
    owners, talks = _conversations(rows, calls)
    if not 1 < len(talks) <= _MOST_CONVERSATIONS:
        return
    ends = [talk[-1].started_at + talk[-1].seconds for talk in talks]
    earlier: dict[int, int] = {}
    heads = [*range(len(talks))]  # the first conversation of all that each one follows
    for late, (first, *_) in enumerate(talks):
        heard = cache(partial(_heard, first, calls))
        likely = [
            (same_task, ends[early], early)
            for early in range(late)
            if ends[early] <= first.started_at
            and early not in earlier.values()
            and (same_task := _same_task(talks[early], first, heard)) is not None
            and (
                same_task
                or not any(
                    talks[heads[outer]][0].started_at < talks[early][0].started_at
                    and ends[outer] > first.started_at
                    for outer in range(len(talks))
                )
            )
        ]
        if likely:
            earlier[late] = max(likely)[2]
            heads[late] = heads[earlier[late]]
    trained: Counter[int] = Counter()
    for row in rows:
        trained[heads[owners[row.path[0]]]] += int(row.mask.sum())
    for row in rows:
        owner = owners[row.path[0]]
        if owner in earlier and row.path[0] == talks[owner][0].index:
            last = talks[earlier[owner]][-1].index
            row.follows = next(number for number, other in enumerate(rows) if last in other.path)
        if rule == "last" and owner in earlier.values():
            row.share = 0.0
        elif rule == "length" and heads.count(heads[owner]) > 1:
            row.share = int(row.mask.sum()) / max(1, trained[heads[owner]])


def _conversations(
    rows: list[Sequence], calls: list[Call]
) -> tuple[dict[int, int], list[list[Call]]]:
    """Returns the calls of each conversation, and its number by the first call of each row; not all
    of them, if there are more than are compared."""
    roots = {index: row.path[0] for row in rows for index in row.path}
    owners: dict[int, int] = {}
    talks: list[list[Call]] = []
    for call in calls:
        if call.index in roots and len(talks) <= _MOST_CONVERSATIONS:
            owner = owners.get(roots[call.index])
            if owner is None:
                known = (n for n, talk in enumerate(talks) if _continues(call, talk[-1]))
                owner = owners[call.index] = next(known, len(talks))
                talks += [[]] if owner == len(talks) else []
            talks[owner].append(call)
    return owners, talks


def _continues(call: Call, earlier: Call) -> bool:
    said = _part(earlier)
    return bool(said) and _part(call)[: len(said)] == said and _agent(call) == _agent(earlier)


def _same_task(
    talk: list[Call], first: Call, heard: Callable[[], list[tuple[float, str]]]
) -> bool | None:
    """Returns whether `first` begins with the same user message as `talk`, or only has its system
    message and tools; None: it does not follow `talk`."""
    said, begins = _part(talk[-1]), _part(first)
    if _agent(talk[0]) != _agent(first) or said[: len(begins)] == begins:
        return None
    setups = [(_part(call, setup=True), call.tools) for call in (talk[0], first)]
    ended = len(talk) > 1 and not talk[-1].message.get("tool_calls")
    same_task = said[:1] == begins[:1]
    if same_task or setups[0] != setups[1] or setups[0] == ([], []):
        return same_task or None
    if ended:
        return False
    begun, known = talk[0].started_at, "\n".join(map(text_of, talk[0].messages))
    return False if any(begun < at and line not in known for at, line in heard()) else None


def _heard(first: Call, calls: list[Call]) -> list[tuple[float, str]]:
    """Returns the lines of earlier answers with which a conversation begins, and when they came."""
    told = "\n".join(text_of(message)[:_TOLD] for message in _part(first)[:_BEGINNING])
    answers = (
        (call.started_at + call.seconds, text_of(call.message).splitlines()) for call in calls
    )
    return [
        (at, line)
        for at, lines in answers
        if at <= first.started_at
        for line in sorted(lines, key=len)[-_LINES:]
        if len(line) >= _LINE and line in told
    ]


def _agent(call: Call) -> tuple[str | None, str]:
    return call.agent, call.model


def _part(call: Call, *, setup: bool = False) -> list[Message]:
    """Returns the system messages of a request, or all others."""
    return [message for message in call.messages if (message.get("role") in _SETUP) == setup]
