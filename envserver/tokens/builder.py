"""Builds training sequences from the calls of one rollout.

Calls form a forest: a call is the child of the longest earlier call whose prompt and completion are
a prefix of its own prompt, token by token and image by image. Each path from a root to a leaf is
one sequence, and holds exactly what the model saw at its leaf. Where paths share a call, its tokens
are trained in the first one only and are context in the others. Calls are never merged, however
equal their tokens: each was a choice of the policy. Linear in the tokens of the prompts and of the
rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np
from envserver_records.errors import EngineGarbage, TokensError
from envserver_records.experts import RoutedExperts, Table, experts_from, table_from_text
from envserver_records.records import Call, Mask, Sequence, Tokens
from envserver_records.sampling import SamplingSpan, merged, span_of
from numpy.typing import NDArray

from .flags import DEFAULT, Actions, flags_of, token_versions
from .images import images_before
from .invariants import check_calls, end_of

_MOST_PER_TOKEN = 2**16
"""Experts of one token over all layers; the largest models have a few thousand."""


def first_unknown(call: Call) -> int:
    """Returns the position from which a call that continues `call` must report its experts.

    `call` lacks those of its last token, which the engine never computed.
    """
    if call.experts is None:
        return 0
    return end_of(call) - 1


def read_experts(text: str, size: int, start: int) -> RoutedExperts:
    """Reads the engine's record of a call of `size` tokens, prompt and answer.

    `start`: position of the first token that was asked for; engines may report all.
    """
    try:
        table = table_from_text(text)
    except ValueError as error:
        raise EngineGarbage(f"The engine's routed experts cannot be read: {error}.") from error
    if table[:1].size > _MOST_PER_TOKEN:
        raise EngineGarbage(f"The engine reports {table[:1].size} experts for each token.")
    begin = size - 1 - len(table)
    if begin not in (0, start):
        raise EngineGarbage(
            f"The engine's routed experts are of {len(table)} tokens; requested were tokens "
            f"{start} to {size - 1}."
        )
    return experts_from(table, begin)


def joined(path: list[Call], mask: Mask) -> RoutedExperts | None:
    """Returns the experts of a row of these calls, root first.

    For a token that two calls computed the earlier call's count: it sampled with them. None: those
    of some token before the last trained one are unknown.
    """
    parts, at = list[Table](), 0
    for call in path:
        held = call.experts
        if held is None or held.start > at:
            continue
        table = held.table[at - held.start :]
        if parts and table.shape[1:] != parts[0].shape[1:]:
            raise TokensError(
                f"Call {call.index} has routed experts of the shape {table.shape[1:]}, an "
                f"earlier call of the shape {parts[0].shape[1:]}.",
                hint="All engines of a model must return the same shape.",
            )
        parts.append(table)
        at += len(table)
    if not parts or not mask.any() or at < np.flatnonzero(mask)[-1]:
        return None
    return experts_from(np.concatenate(parts))


_SEED = 20_230_612
_NEVER = np.iinfo(np.int64).max


def build(calls: list[Call], actions: Actions = DEFAULT) -> list[Sequence]:
    """Returns sequences in which every sampled token of `calls` is trained exactly once.

    Args:
        calls: of one attempt, in order of commit. Those that are not exact are left out; tokens of
            those with a flag whose action is `mask` become context.
        actions: where `mixed_versions` masks, a sequence whose trained tokens come from several
            policy versions keeps those of the newest; the others become context, there and in
            every other sequence.

    Returns:
        One sequence per leaf that trains anything, longest path first.
    """
    check_calls(calls)
    exact = [call for call in calls if call.exact]
    parents = find_parents(exact)
    trained: set[int] = set()
    sequences = []
    for leaf in _leaves(parents):
        path = [exact[k] for k in _path(parents, leaf)]
        sequence = _sequence(path, trained, actions)
        if sequence.mask.any():
            sequences.append(sequence)
    return sequences


class TrainedRow(Protocol):
    @property
    def tokens(self) -> Tokens: ...

    @property
    def mask(self) -> Mask: ...


def trained_ids(rows: Iterable[TrainedRow]) -> list[int] | None:
    parts = [row.tokens[row.mask.astype(bool)].tolist() for row in rows]
    return [token_id for part in parts for token_id in part] if parts else None


def all_flags(calls: list[Call], sequences: list[Sequence]) -> list[str]:
    return _union([*map(flags_of, calls), *(sequence.flags for sequence in sequences)])


def find_parents(calls: list[Call]) -> list[int]:
    """Returns for each call the position of its parent in `calls`, or -1 for a root.

    The parent is an earlier call of the same agent and model, with a completion, whose tokens are
    the longest prefix of this call's prompt; among equals the latest.

    Prefixes are hashed by the sum of their tokens, each multiplied by a random number of its
    position: one pass over a prompt gives the hashes of all its prefixes. Candidates with an equal
    hash are then compared.
    """
    if _is_one_conversation(calls):
        return list(range(-1, len(calls) - 1))
    ends = np.array([end_of(call) for call in calls], np.int64)
    factors = np.random.default_rng(_SEED).integers(
        -(2**63), 2**63 - 1, ends.max(initial=0), dtype=np.int64
    )
    lineages: dict[tuple[str | None, str], int] = {}
    lineage = np.array(
        [lineages.setdefault((call.agent, call.model), len(lineages)) for call in calls], np.int64
    )
    # A call without a completion ends after every prompt.
    lengths = np.where([call.completion_ids.size > 0 for call in calls], ends, _NEVER)
    sums = np.zeros(len(calls), np.int64)
    parents = []
    for k, call in enumerate(calls):
        size = len(call.prompt_ids)
        tokens = np.concatenate([call.prompt_ids, call.completion_ids])
        prefix_sums = np.zeros(ends[k] + 1, np.int64)
        np.cumsum(tokens * factors[: ends[k]], out=prefix_sums[1:])
        sums[k] = prefix_sums[ends[k]]
        shorter = np.flatnonzero((lengths[:k] <= size) & (lineage[:k] == lineage[k]))
        likely = shorter[sums[shorter] == prefix_sums[lengths[shorter]]]
        longest_first = likely[np.argsort(lengths[likely], kind="stable")][::-1]
        parents.append(next((int(j) for j in longest_first if _continues(call, calls[j])), -1))
    return parents


def _is_one_conversation(calls: list[Call]) -> bool:
    """Whether each call continues the one before: that is then also its longest prefix."""
    return all(
        earlier.completion_ids.size > 0
        and (earlier.agent, earlier.model) == (later.agent, later.model)
        and _continues(later, earlier)
        for earlier, later in pairwise(calls)
    )


def _continues(later: Call, call: Call) -> bool:
    """Returns whether the prompt of `later` begins with what `call` saw and sampled."""
    size, end = len(call.prompt_ids), end_of(call)
    prompt = later.prompt_ids[:end]
    return (
        np.array_equal(prompt[:size], call.prompt_ids)
        and np.array_equal(prompt[size:], call.completion_ids)
        and images_before(later.images, end) == images_before(call.images, end)
    )


def _leaves(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return sorted(set(range(len(parents))) - set(parents), key=lambda k: (-depths[k], k))


def _path(parents: list[int], leaf: int) -> list[int]:
    path = [leaf]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _sequence(path: list[Call], trained: set[int], actions: Actions) -> Sequence:
    """Builds the row of `path`, root first. Calls in `trained` become context; adds the others."""
    leaf = path[-1]
    size = end_of(leaf)
    mask, logprobs = np.zeros(size, np.uint8), np.zeros(size, np.float32)
    calls, versions = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    spans: list[SamplingSpan] = []
    for call in path:
        sampled = slice(len(call.prompt_ids), end_of(call))
        calls[sampled] = call.index
        versions[sampled] = token_versions(call)
        if call.index not in trained and actions.worst(flags_of(call)) == "train":
            mask[sampled] = 1
            logprobs[sampled] = call.logprobs
            if sampled.stop > sampled.start:
                spans.append(
                    span_of(call.sampling, call.logprobs_kind, sampled.start, sampled.stop)
                )
        trained.add(call.index)
    flags = [flags_of(call) for call in path]
    outdated = _outdated(mask, versions)
    if outdated.any():
        flags.append(["mixed_versions"])
        if actions.of("mixed_versions") == "mask":
            mask[outdated] = 0
            logprobs[outdated] = 0
    experts = joined(path, mask)
    if experts is None and any(call.experts is not None for call in path):
        flags.append(["experts_missing"])
    return Sequence(
        tokens=np.concatenate([leaf.prompt_ids, leaf.completion_ids]).astype(np.int32, copy=False),
        mask=mask,
        logprobs=logprobs,
        calls=calls,
        versions=versions,
        path=[call.index for call in path],
        agent=leaf.agent,
        flags=_union(flags),
        sampling=merged(spans),
        images=leaf.images,
        experts=experts,
    )


def _outdated(mask: Mask, versions: Tokens) -> NDArray[np.bool_]:
    """Returns bool[T]: tokens trained with an older policy version than the row's newest."""
    newest = versions[mask == 1].max(initial=-1)
    outdated: NDArray[np.bool_] = (mask == 1) & (versions < newest)
    return outdated


def _union(flags: Iterable[list[str]]) -> list[str]:
    return sorted({flag for some in flags for flag in some})
