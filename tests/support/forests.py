"""Calls of one rollout: a few, drawn by hypothesis, with what their rows must be; or hundreds."""

from itertools import pairwise
from typing import Any

import numpy as np
from envserver_records.records import Call, Sequence, Tokens, VersionSpan
from envserver_records.sampling import SamplingSpan
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from envserver.tokens.flags import DEFAULT, Actions, chosen, flags_of
from support.extent import examples

END = 7
"""The token that ends a turn; NEWLINE is what the template writes after it."""
NEWLINE = 8

calm = settings(
    deadline=None, max_examples=examples(240), suppress_health_check=[HealthCheck.too_slow]
)
"""For properties over forests: drawing one takes its time on a busy machine."""

ACTIONS = {
    "as the table says": DEFAULT,
    "older versions are masked": chosen(mask=["mixed_versions"]),
    "the undelivered is trained": chosen(train=["undelivered_completion"]),
    "mixed rollouts are dropped": chosen(drop=["mixed_versions"]),
}


def call(index: int, prompt: list[int], completion: list[int], **fields: object) -> Call:
    """An exact call of version 0, whose logprobs tell it and its tokens from others."""
    size = len(completion)
    known = {
        "index": index,
        "model": "m",
        "prompt_ids": np.array(prompt, np.int32),
        "completion_ids": np.array(completion, np.int32),
        "logprobs": -(np.arange(1, size + 1, dtype=np.float32) / 8 + index),
        "versions": [VersionSpan(0, 0, size)] if size else [],
        "exact": True,
        "finish_reason": "stop",
        "message": {},
        "messages": [],
    }
    return Call(**(known | fields))


def spans(*versions: int) -> dict[str, list[VersionSpan]]:
    """The version of each token of a call, for `call`."""
    return {"versions": [VersionSpan(version, at, at + 1) for at, version in enumerate(versions)]}


def calls_of(told: list[list[Any]]) -> list[Call]:
    """Calls of [prompt, completion] or [prompt, completion, fields]; `versions` are by token."""
    calls = []
    for index, (prompt, completion, *more) in enumerate(told):
        fields = more[0] if more else {}
        if "versions" in fields:
            fields = {**fields, **spans(*fields["versions"])}
        calls.append(call(index, prompt, completion, **fields))
    return calls


def talk() -> list[Call]:
    """Three turns, as ChatML has them."""
    return [
        call(0, [1], [2, END]),
        call(1, [1, 2, END, NEWLINE, 3], [4, END]),
        call(2, [1, 2, END, NEWLINE, 3, 4, END, NEWLINE, 5], [6, END]),
    ]


def tokens(longest: int = 4) -> st.SearchStrategy[list[int]]:
    """So few different ones that prompts collide."""
    return st.lists(st.integers(0, 2), max_size=longest)


@st.composite
def partitions(draw: st.DrawFn, size: int) -> list[VersionSpan]:
    """A partition of [0, size) among a few versions, mostly whole."""
    cuts = draw(st.lists(st.integers(0, size), max_size=1)) if draw(st.integers(0, 3)) == 0 else []
    edges = [0, *sorted(cuts), size]
    versions = st.sampled_from([0, 0, 1, 2, -1])
    return [VersionSpan(draw(versions), start, end) for start, end in pairwise(edges) if size]


@st.composite
def forests(draw: st.DrawFn, most: int = 10) -> list[Call]:
    """Calls that continue earlier ones, repeat them, cut them short or begin anew."""
    calls: list[Call] = []
    for index in range(draw(st.integers(0, most))):
        prompt = draw(tokens())
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            seen = [*earlier.prompt_ids.tolist(), *earlier.completion_ids.tolist()]
            kept = draw(st.sampled_from([len(seen), len(seen), len(earlier.prompt_ids), None]))
            kept = draw(st.integers(0, len(seen))) if kept is None else kept
            prompt = seen[:kept] + (prompt if kept == len(seen) else [])
        completion = draw(tokens())
        calls.append(
            call(
                index,
                prompt,
                completion,
                agent=draw(st.sampled_from([None, None, None, "other"])),
                model=draw(st.sampled_from(["m", "m", "m", "n"])),
                exact=draw(st.integers(0, 9)) > 0,
                versions=draw(partitions(len(completion))),
                flags=draw(st.sampled_from([[], [], [], ["undelivered_completion"]])),
            )
        )
    return calls


def reference_rows(calls: list[Call], actions: Actions) -> list[Sequence]:
    """What `build` must give, told as plainly as can be: every pair of calls, token by token."""
    exact = [each for each in calls if each.exact]
    seen = [each.prompt_ids.tolist() + each.completion_ids.tolist() for each in exact]
    paths: list[list[int]] = []
    for k, each in enumerate(exact):
        parents = [
            j
            for j in range(k)
            if len(exact[j].completion_ids)
            and (exact[j].agent, exact[j].model) == (each.agent, each.model)
            and each.prompt_ids.tolist()[: len(seen[j])] == seen[j]
        ]
        parent = max(parents, key=lambda j: (len(seen[j]), j), default=None)
        paths.append([*(paths[parent] if parent is not None else []), k])
    inner = {k for path in paths for k in path[:-1]}
    rows, met = [], set()
    for path in sorted(paths, key=lambda path: (-len(path), path[-1])):
        if path[-1] not in inner:
            row = _reference_row([exact[k] for k in path], met, actions)
            rows += [row] if row.mask.any() else []
    return rows


def _reference_row(path: list[Call], met: set[int], actions: Actions) -> Sequence:
    row: list[tuple[int, int, float, int, int]] = []  # token, mask, logprob, call, version
    places: list[int] = []
    for each in path:
        row += [(token, 0, 0.0, -1, -1) for token in each.prompt_ids.tolist()[len(row) :]]
        own = each.index not in met and actions.worst(flags_of(each)) == "train"
        met.add(each.index)
        for at, token in enumerate(each.completion_ids.tolist()):
            version = next(s.version for s in each.versions if s.start <= at < s.end)
            logprob = float(each.logprobs[at]) if own else 0.0
            row.append((token, int(own), logprob, each.index, version))
            places += [len(row) - 1] if own else []
    flags = {flag for each in path for flag in flags_of(each)}
    trained = {version for _, mask, _, _, version in row if mask}
    if len(trained) > 1:
        flags.add("mixed_versions")
        if actions.of("mixed_versions") == "mask":
            newest = max(trained)
            row = [
                (token, mask, logprob, index, version)
                if version == newest
                else (token, 0, 0.0, index, version)
                for token, mask, logprob, index, version in row
            ]
    columns = zip(*row, strict=True) if row else [()] * 5
    kinds = (np.int32, np.uint8, np.float32, np.int32, np.int32)
    ids, mask, logprobs, indices, versions = map(np.array, columns, kinds)
    return Sequence(
        tokens=ids,
        mask=mask,
        logprobs=logprobs,
        calls=indices,
        versions=versions,
        path=[each.index for each in path],
        agent=path[-1].agent,
        flags=sorted(flags),
        sampling=[SamplingSpan(places[0], places[-1] + 1)] if places else [],
    )


def conversations(turns: int, longest: int, *, side_by_side: int = 1) -> list[Call]:
    """Conversations of `turns` calls up to `longest` tokens each, whose calls come by turns."""
    random = np.random.default_rng(0)
    step = longest // turns // 2
    seen = [_random_tokens(random, step) for _ in range(side_by_side)]
    calls = []
    for index in range(turns * side_by_side):
        each = index % side_by_side
        calls.append(_random_call(random, index, seen[each], step))
        answer = calls[-1].completion_ids
        seen[each] = np.concatenate([seen[each], answer, _random_tokens(random, step)])
    return calls


def answers(count: int, length: int, *, ends: int = 0) -> list[Call]:
    """`count` answers to one prompt of `length` tokens, or with up to `ends` of its own behind."""
    random = np.random.default_rng(0)
    start = _random_tokens(random, length)
    calls = []
    for index in range(count):
        own = _random_tokens(random, (index * 7919) % (ends + 1))
        calls.append(_random_call(random, index, np.concatenate([start, own]), 1 + index % 50))
    return calls


def comb(turns: int, longest: int) -> list[Call]:
    """A conversation in which every turn but the last is answered a second time, later."""
    random = np.random.default_rng(1)
    calls = conversations(turns, longest)
    for turn in range(1, turns):
        calls.append(_random_call(random, len(calls), calls[turn].prompt_ids, 20))
    return calls


def _random_tokens(random: np.random.Generator, count: int) -> Tokens:
    return random.integers(0, 150_000, count).astype(np.int32)


def _random_call(random: np.random.Generator, index: int, prompt: Tokens, sampled: int) -> Call:
    return call(
        index,
        [],
        [],
        prompt_ids=prompt,
        completion_ids=_random_tokens(random, sampled),
        logprobs=-random.random(sampled).astype(np.float32),
        versions=[VersionSpan(0, 0, sampled)],
    )
