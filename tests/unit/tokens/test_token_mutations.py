"""Wrong rows are caught by the invariants or by the definition of the rows.

Two sources of errors: mistakes that real recorders made, each in a few lines, and this project's
builder with one line changed.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from envserver_records.errors import TokensError
from envserver_records.records import Call, Sequence, pack
from support.forests import ACTIONS, END, NEWLINE, call, reference_rows, spans, talk

from envserver.tokens import DEFAULT, Actions, build, builder, check

MASKED = {"flags": ["undelivered_completion"]}


FORESTS: dict[str, Callable[[], list[Call]]] = {
    "three turns": talk,
    "a turn is answered again, later": lambda: [*talk(), call(3, [1, 2, END, NEWLINE, 9], [4, 4])],
    "samples of one prompt": lambda: [call(i, [1], [2]) for i in range(3)],
    "one goes on from the second of two samples": lambda: [
        call(0, [1], [2]),
        call(1, [1], [2]),
        call(2, [1, 2, 3], [4]),
    ],
    "an answer the agent never got": lambda: [call(0, [1], [2], **MASKED), call(1, [1, 2, 3], [4])],
    "a second answer to what it never got": lambda: [
        call(0, [1], [2]),
        call(1, [1, 2, 3], [4], **MASKED),
        call(2, [1, 2, 3], [5]),
    ],
    "no answer": lambda: [call(0, [1], []), call(1, [1, 2], [3])],
    "cut off, then continued without a word": lambda: [call(0, [1], [2]), call(1, [1, 2], [3])],
    "the same beside another talk": lambda: [
        call(0, [7], [8]),
        call(1, [1], [2]),
        call(2, [1, 2], [3]),
    ],
    "the past was cut short": lambda: [*talk(), call(3, [1, 9], [4])],
    "two agents that say the same": lambda: [
        call(0, [1], [2], agent="a"),
        call(1, [1, 2, 3], [4], agent="b"),
    ],
    "without ids": lambda: [call(0, [], [2], exact=False), call(1, [2], [3])],
    "two versions": lambda: [
        call(0, [1], [2], **spans(3)),
        call(1, [1, 2, 3], [4, 5], **spans(4, 4)),
        call(2, [1, 2, 9], [6], **spans(3)),
    ],
    "two versions in an answer": lambda: [
        call(0, [1], [2, 3], **spans(3, 4)),
        call(1, [1, 2, 3, 5], [6], **spans(4)),
    ],
    "a version that nobody knows": lambda: [
        call(0, [1], [2], **spans(-1)),
        call(1, [1, 2, 3], [4], **spans(0)),
    ],
    "a long prompt that only begins alike": lambda: [
        call(0, [1], [2]),
        call(1, [1, 9, 3], [4]),
        call(2, [9, 2, 3], [4]),
    ],
}


def test_the_builder_makes_each_of_these_rightly() -> None:
    for make, actions in itertools.product(FORESTS.values(), ACTIONS.values()):
        calls = make()
        rows = build(calls, actions)
        check(calls, rows, actions)
        assert pack(rows) == pack(reference_rows(calls, actions))


# Mistakes of others: each takes the calls of one rollout and gives its rows.


def row_of(pieces: list[tuple[list[int], Call | None]], **fields: object) -> Sequence:
    """A row of tokens, each piece sampled by its call (trained) or context."""
    trained = [np.full(len(ids), call is not None, np.uint8) for ids, call in pieces]
    path = [call for _, call in pieces if call is not None]
    known = {
        "tokens": np.concatenate([np.array(ids, np.int32) for ids, _ in pieces]),
        "mask": np.concatenate(trained),
        "logprobs": np.concatenate(
            [call.logprobs if call else np.zeros(len(ids), np.float32) for ids, call in pieces]
        ),
        "calls": np.concatenate(
            [np.full(len(ids), call.index if call else -1, np.int32) for ids, call in pieces]
        ),
        "versions": np.concatenate(
            [np.full(len(ids), 0 if call else -1, np.int32) for ids, call in pieces]
        ),
        "path": [call.index for call in path],
        "agent": path[-1].agent,
    }
    return Sequence(**(known | fields))


def turns_joined(calls: list[Call], join: Callable[[Call, list[int]], list[int]]) -> list[Sequence]:
    """One row, in which `join` makes what comes after an answer from what did."""
    first, *_ = calls
    pieces: list[tuple[list[int], Call | None]] = [(first.prompt_ids.tolist(), None)]
    for earlier, later in itertools.pairwise([*calls, None]):
        pieces.append((earlier.completion_ids.tolist(), earlier))
        if later is not None:
            seen = len(earlier.prompt_ids) + len(earlier.completion_ids)
            pieces.append((join(earlier, later.prompt_ids.tolist()[seen:]), None))
    return [row_of(pieces)]


def end_of_turn_written_twice(calls: list[Call]) -> list[Sequence]:
    """The text of an answer lacks its end, so one is put behind the tokens, which have it."""
    return turns_joined(calls, lambda answer, after: [END, *after])


def newline_between_turns_lost(calls: list[Call]) -> list[Sequence]:
    """The template's newline after the sampled end of a turn belongs to nobody."""
    return turns_joined(calls, lambda answer, after: after[1:])


def shared_turns_trained_in_every_row(calls: list[Call]) -> list[Sequence]:
    """Each leaf takes the masks of its whole path."""
    parents = builder.find_parents(calls)
    return [
        builder._sequence([calls[k] for k in builder._path(parents, leaf)], set(), DEFAULT)
        for leaf in builder._leaves(parents)
    ]


def last_answer_to_each_prompt(calls: list[Call]) -> list[Sequence]:
    """Calls are told apart by their prompts: of several samples one is left."""
    return build(list({call.prompt_ids.tobytes(): call for call in calls}.values()))


def drifted_past_healed_by_masking(calls: list[Call]) -> list[Sequence]:
    """A prompt that the past was rendered anew for replaces it: what was sampled is context."""
    last = calls[-1]
    return [row_of([(last.prompt_ids.tolist(), None), (last.completion_ids.tolist(), last)])]


def turns_told_by_counting_ends(calls: list[Call]) -> list[Sequence]:
    """What comes after an answer begins behind as many ends of turns as there were before."""
    pieces: list[tuple[list[int], Call | None]] = [(calls[0].prompt_ids.tolist(), None)]
    for earlier, later in itertools.pairwise([*calls, None]):
        pieces.append((earlier.completion_ids.tolist(), earlier))
        if later is not None:
            ends = sum(ids.count(END) for ids, _ in pieces)
            at = [place for place, token in enumerate(later.prompt_ids) if token == END][ends - 1]
            pieces.append((later.prompt_ids.tolist()[at + 1 :], None))
    return [row_of(pieces)]


def missing_logprobs_are_ones(calls: list[Call]) -> list[Sequence]:
    """Where the engine gave fewer logprobs than tokens, 1.0 stands in."""
    for each in calls:
        each.logprobs[-1] = 1.0
    return build(calls)


def missing_logprobs_are_ones_in_the_rows(calls: list[Call]) -> list[Sequence]:
    rows = build(calls)
    rows[0].logprobs[np.flatnonzero(rows[0].mask)[-1]] = 1.0
    return rows


def twice_from_the_first() -> list[Call]:
    return [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 9], [5])]


def drifted() -> list[Call]:
    """The second prompt says the first answer with another token."""
    return [call(0, [1], [2, 3]), call(1, [1, 5, 6], [4])]


def end_inside_an_answer() -> list[Call]:
    """The first answer was cut off before its end, which the template then wrote."""
    return [call(0, [END, 1], [2, 3]), call(1, [END, 1, 2, 3, END, NEWLINE], [4])]


MISTAKES = [
    (end_of_turn_written_twice, talk, 4),
    (newline_between_turns_lost, talk, 4),
    (shared_turns_trained_in_every_row, twice_from_the_first, 1),
    (last_answer_to_each_prompt, FORESTS["samples of one prompt"], 1),
    (drifted_past_healed_by_masking, drifted, 1),
    (turns_told_by_counting_ends, end_inside_an_answer, 4),
    (missing_logprobs_are_ones, talk, 2),
    (missing_logprobs_are_ones_in_the_rows, talk, 2),
]


@pytest.mark.parametrize(
    ("mistake", "make", "invariant"), MISTAKES, ids=[mistake.__name__ for mistake, *_ in MISTAKES]
)
def test_a_mistake_that_others_made_is_caught(
    mistake: Callable[[list[Call]], list[Sequence]],
    make: Callable[[], list[Call]],
    invariant: int,
) -> None:
    calls = make()
    with pytest.raises(TokensError) as caught:
        check(calls, mistake(calls))
    assert caught.value.detail["invariant"] == invariant


def test_the_same_ways_without_the_mistake_are_right() -> None:
    check(talk(), turns_joined(talk(), lambda answer, after: after))
    check(talk(), turns_told_by_counting_ends(talk()))
    check(talk(), shared_turns_trained_in_every_row(talk()))


# Our own builder, with one line changed. Those of the first list are caught when they happen, by
# the invariants; those of the second make true rows, but not the ones that they should be.

FALSE_ROWS = {
    "trains shared calls again": ("call.index not in trained and ", ""),
    "forgets what it trained": ("trained.add(call.index)", "pass"),
    "trains what is to be masked": ('actions.worst(flags_of(call)) == "train"', "True"),
    "takes what is not exact": (
        "exact = [call for call in calls if call.exact]",
        "exact = list(calls)",
    ),
    "begins answers late": (
        "slice(len(call.prompt_ids), _end(call))",
        "slice(len(call.prompt_ids) + 1, _end(call) + 1)",
    ),
    "begins answers early": (
        "slice(len(call.prompt_ids), _end(call))",
        "slice(len(call.prompt_ids) - 1, _end(call) - 1)",
    ),
    "ends answers early": (
        "mask[sampled] = 1",
        "mask[sampled.start : sampled.stop - 1] = 1",
    ),
    "leaves logprobs out": ("logprobs[sampled] = call.logprobs", "pass"),
    "leaves versions out": ("versions[sampled] = token_versions(call)", "pass"),
    "leaves the calls out": ("calls[sampled] = call.index", "pass"),
    "puts answers before prompts": (
        "[leaf.prompt_ids, leaf.completion_ids]",
        "[leaf.completion_ids, leaf.prompt_ids]",
    ),
    "joins agents": (" & (lineage[:k] == lineage[k])", ""),
    "takes two agents for one talk": (
        "and (earlier.agent, earlier.model) == (later.agent, later.model)",
        "",
    ),
    "takes any calls for one talk": ("and _continues(later, earlier)", ""),
    "goes on after no answer": ("earlier.completion_ids.size > 0", "True"),
    "continues what is empty": ("call.completion_ids.size > 0", "True"),
    "hides mixed versions": ('flags.append(["mixed_versions"])', "pass"),
    "trains old versions": ("mask[outdated] = 0", "pass"),
    "keeps logprobs of old versions": ("logprobs[outdated] = 0", "pass"),
    "masks the newest as well": ("(versions < newest)", "(versions <= newest)"),
    "masks the newest instead": ("versions[mask == 1].max(initial=-1)", "0"),
    "gives the path from its leaf": ("return path[::-1]", "return path"),
    "drops rows of one call": ("if sequence.mask.any():", "if len(path) > 1:"),
    "names no agent": ("agent=leaf.agent", "agent=None"),
}
OTHER_ROWS = {
    "begins anew at each call": ("if _continues(call, calls[j])", "if False"),
    "continues the shortest": ('kind="stable")][::-1]', 'kind="stable")]'),
    "needs a word between answers": ("lengths[:k] <= size", "lengths[:k] < size"),
    "gives the shortest first": ("key=lambda k: (-depths[k], k)", "key=lambda k: (depths[k], k)"),
    "gives the latest first": ("key=lambda k: (-depths[k], k)", "key=lambda k: (-depths[k], -k)"),
    "gives rows that train nothing": ("if sequence.mask.any():", "if True:"),
    "loses the flags of calls": ("flags = [flags_of(call) for call in path]", "flags = []"),
}


def changed(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """`module` anew, with `new` for the one `old` in its source."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{old!r} is not in the source once"
    mutant = types.ModuleType(module.__name__ + "_changed")
    mutant.__package__ = module.__package__
    exec(compile(source.replace(old, new), old, "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", FALSE_ROWS)
def test_a_changed_builder_is_caught_by_the_invariants(name: str) -> None:
    mutant = changed(builder, *FALSE_ROWS[name])
    assert any(
        refused(mutant, make(), actions)
        for make in FORESTS.values()
        for actions in ACTIONS.values()
    )


def refused(mutant: types.ModuleType, calls: list[Call], actions: Actions) -> bool:
    """Whether the mutant's rows fail the check (failing to make any is not enough)."""
    with contextlib.suppress(ValueError):
        rows = mutant.build(calls, actions)
        try:
            check(calls, rows, actions)
        except TokensError:
            return True
    return False


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_a_changed_builder_makes_other_rows(name: str) -> None:
    mutant = changed(builder, *OTHER_ROWS[name])
    tried = itertools.product(FORESTS.values(), ACTIONS.values())
    assert any(
        pack(mutant.build(make(), actions)) != pack(reference_rows(make(), actions))
        for make, actions in tried
    )


def test_a_builder_that_trusts_sums_is_caught() -> None:
    source = ("factors = np.random", "factors = 0 * np.random")
    unlucky = changed(builder, *source)
    for make in FORESTS.values():
        assert pack(unlucky.build(make())) == pack(build(make()))
    unlucky._continues = lambda prompt, call: True
    assert any(refused(unlucky, make(), DEFAULT) for make in FORESTS.values())
