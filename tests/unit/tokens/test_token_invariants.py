"""Every check of the recorded tokens refuses what is wrong, and lets right rows pass.

Four sources of errors: a right row or call with one value changed, mistakes that real recorders
made, each in a few lines, this project's builder with one line changed, and rows of other settings.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import tomllib
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from envserver_records.errors import TokensError
from envserver_records.experts import RoutedExperts, experts_from
from envserver_records.images import ImageSpan
from envserver_records.records import Call, Sequence, VersionSpan, pack
from msgspec.structs import replace
from support.forests import ACTIONS, END, NEWLINE, call, calls_of, reference_rows, talk

from envserver.tokens import DEFAULT, Actions, build, builder, check, chosen, invariants

Make = Callable[[], list[Call]]
MASK_OLD = chosen(mask=["mixed_versions"])

# One value changed


def put(column: str, place: int | slice, value: float, row: int = 0) -> Callable[..., object]:
    return lambda calls, rows: getattr(rows[row], column).__setitem__(place, value)


def row_with(row: int = 0, **fields: object) -> Callable[..., object]:
    return lambda calls, rows: rows.__setitem__(row, replace(rows[row], **fields))


def call_with(index: int = 0, **fields: object) -> Callable[..., object]:
    return lambda calls, rows: calls.__setitem__(index, replace(calls[index], **fields))


def forked() -> list[Call]:
    """Rows: calls 0, 1, 2, and 0, 1, 3."""
    return [*talk(), call(3, [1, 2, END, NEWLINE, 3, 4, END, NEWLINE, 9], [4, 4])]


IN_TWO_VERSIONS = [[[1], [2], {"versions": [3]}], [[1, 2, 3], [4, 5], {"versions": [4, 4]}]]
in_two_versions = partial(calls_of, IN_TWO_VERSIONS)


def experts_of(count: int, fill: int = 0) -> RoutedExperts:
    return experts_from(np.full((count, 2, 1), fill, np.uint8))


def routed() -> list[Call]:
    sizes = (2, 6, 10)
    return [
        replace(each, experts=experts_of(size, each.index))
        for each, size in zip(talk(), sizes, strict=True)
    ]


def put_expert(calls: list[Call], rows: list[Sequence]) -> None:
    """The last token of the first answer, which only the second call computed."""
    assert rows[0].experts is not None
    rows[0].experts.table[2, 0, 0] = 0


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


CHANGES: dict[str, tuple[int, Make, Callable[..., object]]] = {
    "a sampled token": (1, forked, put("tokens", 1, 99)),
    "a token of the context": (4, forked, put("tokens", 0, 99)),
    "a token of shared context": (4, forked, put("tokens", 0, 99, row=1)),
    "an earlier answer in context": (4, forked, put("tokens", 1, 99, row=1)),
    "a trained token masked": (3, forked, put("mask", 1, 0)),
    "context trained": (3, forked, put("mask", 0, 1)),
    "a mask of two": (3, forked, put("mask", 1, 2)),
    "a mask too short": (3, forked, row_with(mask=np.zeros(3, np.uint8))),
    "a shared answer trained again": (2, forked, put("mask", slice(1, 3), 1, row=1)),
    "a row left out": (1, forked, lambda calls, rows: rows.pop()),
    "a row given twice": (1, forked, lambda calls, rows: rows.append(rows[0])),
    "a logprob of a row": (2, forked, put("logprobs", 1, -7.0)),
    "another call's token": (3, forked, put("calls", 1, 1)),
    "an unknown call in the path": (3, forked, row_with(path=[0, 1, 9])),
    "an inexact call in the path": (3, forked, call_with(1, exact=False)),
    "a path backwards": (8, forked, row_with(path=[1, 0, 2])),
    "a path across agents": (8, forked, call_with(1, agent="b")),
    "a path across models": (8, forked, call_with(1, model="n")),
    "a row of another agent": (8, forked, row_with(agent="b")),
    "a path that ends early": (4, forked, row_with(path=[0, 1])),
    "no path": (4, forked, row_with(path=[])),
    "a version of a row": (7, forked, put("versions", 1, 5)),
    "a version of context": (7, forked, put("versions", 0, 5)),
    "a flag left out": (7, in_two_versions, row_with(flags=[])),
    "a logprob that is none": (2, talk, call_with(logprobs=floats(-1, np.nan))),
    "a logprob of a certain miss": (2, talk, call_with(logprobs=floats(-1, -np.inf))),
    "a positive logprob": (2, talk, call_with(logprobs=floats(-1, 0.5))),
    "too few logprobs": (6, talk, call_with(logprobs=floats(-1))),
    "spans that end early": (7, talk, call_with(versions=[VersionSpan(0, 0, 1)])),
    "spans that begin late": (7, talk, call_with(versions=[VersionSpan(0, 1, 2)])),
    "spans with a gap": (7, talk, call_with(versions=[VersionSpan(0, 0, 0), VersionSpan(0, 1, 2)])),
    "an image beyond its prompt": (11, talk, call_with(images=[ImageSpan("a", 1, 9)])),
    "an image of a row alone": (11, forked, row_with(images=[ImageSpan("a", 0, 1)])),
    "an expert of a row": (12, routed, put_expert),
    "experts of the last token": (12, routed, row_with(experts=experts_of(11))),
    "calls out of order": (10, talk, lambda calls, rows: calls.reverse()),
    "calls of one number": (10, talk, lambda calls, rows: calls.append(calls[-1])),
}


def trained_again(calls: list[Call], rows: list[Sequence]) -> None:
    put("mask", slice(1, 3), 1, row=1)(calls, rows)
    put("logprobs", slice(1, 3), calls[0].logprobs, row=1)(calls, rows)


def another_past(calls: list[Call], rows: list[Sequence]) -> None:
    """The second row has the turns that it shares, but the first as mere context."""
    put("calls", slice(1, 3), -1, row=1)(calls, rows)
    put("versions", slice(1, 3), -1, row=1)(calls, rows)
    row_with(1, path=[1, 3])(calls, rows)


CHANGES |= {
    "a shared answer trained again, with its logprobs": (1, forked, trained_again),
    "another past of a shared answer": (8, forked, another_past),
}


def refusal(calls: list[Call], rows: list[Sequence], actions: Actions) -> tuple[int, int]:
    """The invariant that does not hold, and the line that says so."""
    with pytest.raises(TokensError) as caught:
        check(calls, rows, actions)
    return caught.value.detail["invariant"], caught.traceback[-1].lineno + 1


def test_each_changed_value_is_caught_and_each_check_refuses_something() -> None:
    lines = set()
    for name, (invariant, make, change) in CHANGES.items():
        calls = make()
        rows = build(calls)
        check(calls, rows)
        change(calls, rows)
        refused, line = refusal(calls, rows, DEFAULT)
        assert refused == invariant, name
        lines.add(line)
    calls = in_two_versions()  # rows of other settings
    refused, line = refusal(calls, build(calls), MASK_OLD)
    assert refused == 7
    assert refusal(calls, build(calls, MASK_OLD), DEFAULT)[0] == 1
    lines.add(line)
    tree = ast.parse(Path(invariants.__file__).read_text())
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    never = [
        node.lineno for node in checks if lines.isdisjoint(range(node.lineno, node.end_lineno + 1))
    ]
    assert never == []


# Whole forests, and mistakes of others: each takes the calls of one rollout and gives its rows


FORESTS: dict[str, Make] = {
    name: partial(calls_of, told)
    for name, told in tomllib.loads(Path(__file__).with_name("forests.toml").read_text())[
        "forests"
    ].items()
}
TRIED = list(itertools.product(FORESTS.values(), ACTIONS.values()))


def test_the_builder_makes_each_of_these_rightly() -> None:
    for make, actions in TRIED:
        calls = make()
        rows = build(calls, actions)
        check(calls, rows, actions)
        assert pack(rows) == pack(reference_rows(calls, actions))


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


TWICE_FROM_THE_FIRST = partial(calls_of, [[[1], [2]], [[1, 2, 3], [4]], [[1, 2, 9], [5]]])
DRIFTED = partial(calls_of, [[[1], [2, 3]], [[1, 5, 6], [4]]])
"""The second prompt says the first answer with another token."""
END_INSIDE = partial(calls_of, [[[END, 1], [2, 3]], [[END, 1, 2, 3, END, NEWLINE], [4]]])
"""The first answer was cut off before its end, which the template then wrote."""
MISTAKES: list[tuple[Callable[[list[Call]], list[Sequence]], Make, int]] = [
    (end_of_turn_written_twice, talk, 4),
    (newline_between_turns_lost, talk, 4),
    (shared_turns_trained_in_every_row, TWICE_FROM_THE_FIRST, 1),
    (last_answer_to_each_prompt, FORESTS["samples of one prompt"], 1),
    (drifted_past_healed_by_masking, DRIFTED, 1),
    (turns_told_by_counting_ends, END_INSIDE, 4),
    (missing_logprobs_are_ones, talk, 2),
    (missing_logprobs_are_ones_in_the_rows, talk, 2),
]


@pytest.mark.parametrize(("mistake", "make", "invariant"), MISTAKES)
def test_a_mistake_that_others_made_is_caught(
    mistake: Callable[[list[Call]], list[Sequence]], make: Make, invariant: int
) -> None:
    calls = make()
    with pytest.raises(TokensError) as caught:
        check(calls, mistake(calls))
    assert caught.value.detail["invariant"] == invariant


def test_the_same_ways_without_the_mistake_are_right() -> None:
    check(talk(), turns_joined(talk(), lambda answer, after: after))
    check(talk(), turns_told_by_counting_ends(talk()))
    check(talk(), shared_turns_trained_in_every_row(talk()))


# Our own builder, with one line changed

CHANGED = tomllib.loads(Path(__file__).with_name("builder_changes.toml").read_text())


def changed(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """`module` anew, with `new` for the one `old` in its source."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{old!r} is not in the source once"
    mutant = types.ModuleType(module.__name__ + "_changed")
    mutant.__package__ = module.__package__
    exec(compile(source.replace(old, new), old, "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", CHANGED["false_rows"])
def test_a_changed_builder_is_caught_by_the_invariants(name: str) -> None:
    mutant = changed(builder, *CHANGED["false_rows"][name])
    assert any(refused(mutant, make(), actions) for make, actions in TRIED)


def refused(mutant: types.ModuleType, calls: list[Call], actions: Actions) -> bool:
    """Whether the mutant's rows fail the check (failing to make any is not enough)."""
    with contextlib.suppress(ValueError):
        rows = mutant.build(calls, actions)
        try:
            check(calls, rows, actions)
        except TokensError:
            return True
    return False


@pytest.mark.parametrize("name", CHANGED["other_rows"])
def test_a_changed_builder_makes_other_rows(name: str) -> None:
    mutant = changed(builder, *CHANGED["other_rows"][name])
    assert any(
        pack(mutant.build(make(), actions)) != pack(reference_rows(make(), actions))
        for make, actions in TRIED
    )


def test_a_builder_that_trusts_sums_is_caught() -> None:
    unlucky = changed(builder, "factors = np.random", "factors = 0 * np.random")
    for make in FORESTS.values():
        assert pack(unlucky.build(make())) == pack(build(make()))
    unlucky._continues = lambda prompt, call: True
    assert any(refused(unlucky, make(), DEFAULT) for make in FORESTS.values())
