"""Any forest of calls becomes rows in which each sampled token is trained exactly once."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from envserver_records.records import Call, Sequence, pack, unpack
from hypothesis import given
from hypothesis import strategies as st
from support.forests import ACTIONS, calls_of, calm, forests, reference_rows

from envserver.tokens import Actions, build, check
from envserver.tokens.builder import all_flags


@calm
@given(forests(), st.sampled_from(list(ACTIONS.values())))
def test_rows_are_those_of_the_definition_and_train_every_sampled_token_once(
    calls: list[Call], actions: Actions
) -> None:
    rows = build(calls, actions)
    check(calls, rows, actions)
    assert pack(rows) == pack(reference_rows(calls, actions))
    assert [pack(unpack(pack(row), Sequence)) for row in rows] == [pack(row) for row in rows]
    trained = sum(int(row.mask.sum()) for row in build(calls))
    assert trained == sum(len(c.completion_ids) for c in calls if c.exact and not c.flags)


ROWS = tomllib.loads(Path(__file__).with_name("forests.toml").read_text())["rows"]


@pytest.mark.parametrize("name", ROWS)
def test_what_becomes_rows(name: str) -> None:
    calls, rows = calls_of(ROWS[name]["calls"]), ROWS[name]["rows"]
    built = build(calls, ACTIONS[ROWS[name]["actions"]])
    for row, columns in zip(built, rows, strict=True):
        assert {name: np.array(getattr(row, name)).tolist() for name in columns} == columns
    assert all_flags(calls, built) == sorted({flag for row in built for flag in row.flags})
