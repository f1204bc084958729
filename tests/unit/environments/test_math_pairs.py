"""Labelled pairs of gold and answer: fewer wrong verdicts than math-verify with its defaults.

The pairs are in tests/support/math_pairs.txt. Both scorers get the answer in a box; math-verify is
asked as its users do, `verify(parse(gold), parse(answer))`, with more time for a busy machine. The
table is in the README of the environment. `make test` tries the pairs of every twentieth gold,
`make test-all` of every fourth, `make test-slow` all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import math_verify
import pytest
from envserver_environments import math
from envserver_environments.math.env import Math
from envserver_environments.math.sizes import is_huge
from support import extent

PAIRS = Path(extent.__file__).with_name("math_pairs.txt")
README = Path(str(math.__file__)).with_name("README.md")
TIMEOUT_SECONDS = 60
HEAD = (
    "| kind | pairs | right, refused: ours | math-verify | wrong, paid: ours | math-verify |",
    "|---|---|---|---|---|---|",
)


class Pair(NamedTuple):
    kind: str
    gold: str
    answer: str
    is_right: bool


def pairs(every: int) -> Iterator[Pair]:
    """Those of each `every`-th gold."""
    kind = gold = ""
    golds = 0
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        mark, _, value = line.partition(" ")
        match mark:
            case "##":
                kind = value
            case "=":
                gold, golds = value, golds + 1
            case "+" | "-" if golds % every == 1 % every:
                yield Pair(kind, gold, value, is_right=mark == "+")


def is_paid(gold: str, answer: str, *, number: bool = False) -> bool:
    env = Math(Math.Config(literal=number))
    task = env.task_from_row({"problem": "p", "solution": "s", "answer": gold})
    return env.score(task, env.response_from_row(f"\\boxed{{{answer}}}", [])).reward == 1.0


def math_verify_pays(gold: str, answer: str) -> bool:
    boxed = (f"\\boxed{{{text}}}" for text in (gold, answer))
    parsed = (math_verify.parse(text, parsing_timeout=TIMEOUT_SECONDS) for text in boxed)
    return bool(math_verify.verify(*parsed, timeout_seconds=TIMEOUT_SECONDS))


@pytest.mark.parametrize(
    "every",
    [20, pytest.param(4, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.slow)],
)
def test_fewer_wrong_verdicts_than_math_verify(
    every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: dict[str, Counter[str]] = {}
    for pair in pairs(every):
        counted = counts.setdefault(pair.kind, Counter())
        counted["pairs"] += 1
        verdicts = {
            "ours": is_paid(pair.gold, pair.answer, number=pair.kind.startswith("number")),
            "math-verify": math_verify_pays(pair.gold, pair.answer),
        }
        for name, paid in verdicts.items():
            counted[f"{name} {'refused' if pair.is_right else 'paid'}"] += paid != pair.is_right
    whole = sum(counts.values(), Counter())
    table = [*HEAD, *(row(kind, counted) for kind, counted in counts.items()), row("all", whole)]
    with capsys.disabled():
        print("", *table, sep="\n")
    assert whole["ours refused"] < whole["math-verify refused"]
    assert whole["ours paid"] < whole["math-verify paid"]
    if every == 1:
        assert "\n".join(table) in README.read_text(encoding="utf-8")


def row(kind: str, counted: Counter[str]) -> str:
    names = ("pairs", "ours refused", "math-verify refused", "ours paid", "math-verify paid")
    return f"| {kind} | {' | '.join(str(counted[name]) for name in names)} |"


def test_a_gold_word_for_word_is_right() -> None:
    golds = {pair.gold for pair in pairs(every=4)}
    golds |= {
        task.hidden["answer"]
        for task in Math().tasks("train")
        if task.hidden["kind"] in ("number", "latex")
    }
    assert [gold for gold in golds if not is_paid(gold, gold)] == []
    assert len(golds) > 20


def test_no_pair_is_refused_for_its_size() -> None:
    lines = (line.partition(" ") for line in PAIRS.read_text(encoding="utf-8").splitlines())
    assert [text for mark, _, text in lines if mark in ("=", "+", "-") and is_huge(text)] == []
