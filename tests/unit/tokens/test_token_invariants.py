"""Every check of the recorded tokens refuses what is wrong, and lets right rows pass.

Two sources of errors: a right row or call with one value changed, and rows of other settings.
That the builder makes right rows: test_history.py.
"""

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from envserver_records.errors import TokensError
from envserver_records.experts import RoutedExperts, experts_from
from envserver_records.images import ImageSpan
from envserver_records.records import Call, Sequence, VersionSpan
from msgspec.structs import replace
from support.cases import cases_of
from support.forests import END, NEWLINE, call, calls_of, talk

from envserver.tokens import invariants
from envserver.tokens.builder import build
from envserver.tokens.flags import DEFAULT, Actions, chosen
from envserver.tokens.invariants import check

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
    return [
        replace(each, experts=experts_of(size, each.index))
        for each, size in zip(talk(), (2, 6, 10), strict=True)
    ]


def put_expert(calls: list[Call], rows: list[Sequence]) -> None:
    """The last token of the first answer, which only the second call computed."""
    assert rows[0].experts is not None
    rows[0].experts.table[2, 0, 0] = 0


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def trained_again(calls: list[Call], rows: list[Sequence]) -> None:
    put("mask", slice(1, 3), 1, row=1)(calls, rows)
    put("logprobs", slice(1, 3), calls[0].logprobs, row=1)(calls, rows)


def another_past(calls: list[Call], rows: list[Sequence]) -> None:
    """The second row has the turns that it shares, but the first as mere context."""
    put("calls", slice(1, 3), -1, row=1)(calls, rows)
    put("versions", slice(1, 3), -1, row=1)(calls, rows)
    row_with(1, path=[1, 3])(calls, rows)


CHANGES: dict[str, tuple[int, Make, Callable[..., object]]] = {
    name: (invariant, globals()[make], globals()[change](*values, **fields))
    for name, (invariant, make, change, values, fields) in cases_of(__file__).items()
}
CHANGES |= {
    "a shared answer trained again, with its logprobs": (1, forked, trained_again),
    "another past of a shared answer": (8, forked, another_past),
    "a mask too short": (3, forked, row_with(mask=np.zeros(3, np.uint8))),
    "a shared answer trained again": (2, forked, put("mask", slice(1, 3), 1, row=1)),
    "a row left out": (1, forked, lambda calls, rows: rows.pop()),
    "a row given twice": (1, forked, lambda calls, rows: rows.append(rows[0])),
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
