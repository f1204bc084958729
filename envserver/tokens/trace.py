"""Packs the calls of one rollout into a trace that stores only what is new in each call.

Every call of a conversation repeats everything before it: stored whole, 100 turns take 50 times the
space. Sampled tokens are always a call's own. `unpack_calls(pack_calls(calls, parents))` equals
`calls` in every field and byte.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from envserver_records.errors import TokensError
from envserver_records.records import Call, Message, Tokens, TracedCall

_DIGEST_BYTES = 16
_encode = msgspec.msgpack.Encoder().encode


def pack_calls(calls: list[Call], parents: list[int]) -> list[TracedCall]:
    """Returns the trace of `calls` of one attempt, in order of commit; inexact ones as well.

    `parents`: for each the position of the call that it continues, -1 for none, as `find_parents`
    says. Wrong parents give a correct but longer trace.
    """
    siblings: dict[tuple[str | None, int], int] = {}
    said: dict[bytes, int] = {}
    tools: dict[bytes, int] = {}
    traced = []
    for k, (call, parent) in enumerate(zip(calls, parents, strict=True)):
        # A second answer to one prompt has all of it from its sibling.
        sibling = siblings.get((call.agent, parent), -1)
        siblings[call.agent, parent] = k
        tokens_of, kept_tokens = _kept_tokens(call, calls, [sibling, parent])
        messages_of, kept_messages = _kept_messages(call, said, k)
        tools_of = tools.setdefault(_encode(call.tools), k)
        new = msgspec.structs.replace(
            call,
            prompt_ids=call.prompt_ids[kept_tokens:],
            messages=call.messages[kept_messages:],
            tools=call.tools if tools_of == k else [],
        )
        traced.append(
            TracedCall(
                tokens_of,
                kept_tokens,
                messages_of,
                kept_messages,
                tools_of if tools_of < k else -1,
                new,
            )
        )
    return traced


def unpack_calls(traced: list[TracedCall]) -> list[Call]:
    calls: list[Call] = []
    for k, each in enumerate(traced):
        if not all(-1 <= j < k for j in (each.tokens_of, each.messages_of, each.tools_of)):
            raise _damaged(f"Call {k} of the trace refers to one that does not come before it.")
        calls.append(
            msgspec.structs.replace(
                each.new,
                prompt_ids=_prompt(each, calls),
                messages=_messages(each, calls),
                tools=each.new.tools if each.tools_of < 0 else calls[each.tools_of].tools,
            )
        )
    return calls


def _kept_tokens(call: Call, calls: list[Call], candidates: list[int]) -> tuple[int, int]:
    """Returns which of `candidates` (positions) has most of `call`'s prompt, and how much."""
    shared = [(j, _shared_tokens(call.prompt_ids, calls[j])) for j in candidates if j >= 0]
    return max(shared, key=lambda each: each[1], default=(-1, 0))


def _shared_tokens(prompt: Tokens, earlier: Call) -> int:
    size = _common(prompt, earlier.prompt_ids)
    if size < len(earlier.prompt_ids):
        return size
    return size + _common(prompt[size:], earlier.completion_ids)


def _common(some: Tokens, others: Tokens) -> int:
    size = min(len(some), len(others))
    different = some[:size] != others[:size]
    return int(np.argmax(different)) if different.any() else size


def _kept_messages(call: Call, said: dict[bytes, int], k: int) -> tuple[int, int]:
    """Returns the call that has most of the messages of `call` (-1: none), and how many.

    `said`: the first call by each beginning of a conversation up to an answer; adds `call`, at `k`.
    """
    beginnings = _beginnings([*call.messages, call.message])
    count = len(call.messages)
    while count and beginnings[count - 1] not in said:
        count -= 1
    messages_of = said[beginnings[count - 1]] if count else -1
    for beginning in beginnings:
        said.setdefault(beginning, k)
    return messages_of, count


def _beginnings(messages: list[Message]) -> list[bytes]:
    """Returns a digest of each message and all before it.

    Of the bytes: equal dicts may differ in the order of their keys, or as 1 and True do.
    """
    digests = [b""]
    for message in messages:
        encoded = digests[-1] + _encode(message)
        digests.append(hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest())
    return digests[1:]


def _prompt(traced: TracedCall, calls: list[Call]) -> Tokens:
    earlier = calls[traced.tokens_of] if traced.tokens_of >= 0 else None
    known = [earlier.prompt_ids, earlier.completion_ids] if earlier else []
    if not 0 <= traced.kept_tokens <= sum(map(len, known)):
        raise _damaged(f"Call {len(calls)} keeps more tokens than there are before it.")
    parts = []
    left = traced.kept_tokens
    for ids in known:
        parts.append(ids[:left])
        left -= len(parts[-1])
    return np.concatenate([*parts, traced.new.prompt_ids])


def _messages(traced: TracedCall, calls: list[Call]) -> list[Message]:
    earlier = calls[traced.messages_of] if traced.messages_of >= 0 else None
    known = [*earlier.messages, earlier.message] if earlier else []
    if not 0 <= traced.kept_messages <= len(known):
        raise _damaged(f"Call {len(calls)} keeps more messages than there are before it.")
    return [*known[: traced.kept_messages], *traced.new.messages]


def _damaged(message: str) -> TokensError:
    return TokensError(message, hint="The record of its calls is damaged; its rows are not.")
