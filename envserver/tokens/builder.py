"""Calls of one rollout -> training sequences.

Calls form a forest: a call is the child of the longest earlier call whose prompt and completion
its own prompt begins with, token by token. Each path from a root to a leaf is one sequence, and
concatenating a path reproduces exactly what the model saw. Where paths share a call, its tokens are
trained in the first one only and are context in the others.

Cost: comparisons of byte strings, linear in the prompts where calls follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..records import Call, Sequence, Tokens
from .flags import DEFAULT, Actions


def build(calls: list[Call], actions: Actions = DEFAULT) -> list[Sequence]:
    """Sequences in which every sampled token of `calls` is trained exactly once.

    Args:
        calls: of one attempt, in order of commit. Those that are not exact are left out; the tokens
            of those with a flag whose action is `mask` become context.
        actions: what is done about each flag.

    Returns:
        One sequence per leaf that trains anything, longest path first.
    """
    exact = [call for call in calls if call.exact]
    parents = find_parents(exact)
    leaves = sorted(set(range(len(exact))) - set(parents), key=lambda k: (-_depth(parents, k), k))
    trained: set[int] = set()
    sequences = []
    for leaf in leaves:
        path = _path(parents, leaf)
        sequence = _sequence([exact[k] for k in path], trained, actions)
        if sequence.mask.any():
            sequences.append(sequence)
    return sequences


def find_parents(calls: list[Call]) -> list[int]:
    """For each call the position of its parent in `calls`, -1 for a root.

    The parent is an earlier call of the same agent and model, with a completion, whose tokens are
    the longest prefix of this call's prompt; among equals the latest.
    """
    seen: list[bytes] = []
    parents = []
    for k, call in enumerate(calls):
        prompt = call.prompt_ids.tobytes()
        best, best_length = -1, 0
        for j in range(k - 1, -1, -1):
            other = calls[j]
            if (
                len(seen[j]) > best_length
                and other.completion_ids.size
                and (other.agent, other.model) == (call.agent, call.model)
                and prompt.startswith(seen[j])
            ):
                best, best_length = j, len(seen[j])
        parents.append(best)
        seen.append(prompt + call.completion_ids.tobytes())
    return parents


def _path(parents: list[int], leaf: int) -> list[int]:
    path = [leaf]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _depth(parents: list[int], leaf: int) -> int:
    return len(_path(parents, leaf))


def _sequence(path: list[Call], trained: set[int], actions: Actions) -> Sequence:
    tokens: list[Tokens] = []
    mask, logprobs, calls, versions = [], [], [], []
    length = 0
    for call in path:
        context = call.prompt_ids[length:]
        own = call.index not in trained and actions.worst(call.flags) == "train"
        trained.add(call.index)
        sampled = len(call.completion_ids)
        tokens += [context, call.completion_ids]
        mask += [np.zeros(len(context), np.uint8), np.full(sampled, own, np.uint8)]
        logprobs += [
            np.zeros(len(context), np.float32),
            call.logprobs if own else np.zeros(sampled, np.float32),
        ]
        calls += [np.full(len(context), -1, np.int32), np.full(sampled, call.index, np.int32)]
        versions += [np.full(len(context), -1, np.int32), token_versions(call)]
        length = len(call.prompt_ids) + sampled
    return Sequence(
        tokens=np.concatenate(tokens).astype(np.int32, copy=False),
        mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
        calls=np.concatenate(calls),
        versions=np.concatenate(versions),
        path=[call.index for call in path],
        agent=path[-1].agent,
        flags=_union(call.flags for call in path),
    )


def token_versions(call: Call) -> Tokens:
    """int32[C]: the policy version that sampled each token of the call's completion."""
    versions = np.full(len(call.completion_ids), -1, np.int32)
    for span in call.versions:
        versions[span.start : span.end] = span.version
    return versions


def _union(flags: Iterable[list[str]]) -> list[str]:
    return sorted({flag for some in flags for flag in some})
