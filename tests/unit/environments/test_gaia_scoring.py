"""GAIA's answers: the official rules, which part of a text is the answer, and the reward."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.gaia.env import Gaia
from envserver_environments.gaia.rubric import Facts, Items, Weights, fold, items
from envserver_environments.gaia.scoring import extract_answer, is_usable_truth, question_scorer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import envserver
from envserver import Result

VERDICTS: list[tuple[Any, str, bool]] = [
    # Numbers: no tolerance, no units; only $, % and commas are removed.
    ("17", "17", True), (" 17.0\n", "17", True), ("$1,700", "1700", True), ("17 %", "17", True),
    ("1.7E+01", "17", True), (".5", "0.5", True), ("1,7,0,0", "1700", True),
    ("1000", "1_000", True),
    ("17kg", "17", False), ("-17", "17", False), ("1 7", "17", False), ("€17", "17", False),
    ("17.0000001", "17", False), ("1.000,5", "1000.5", False), ("FINAL ANSWER: 17", "17", False),
    ("", "17", False), ("any", "inf", True), ("17", "inf", False), ("nan", "nan", False),
    # Lists: same length and order; punctuation counts in texts, units go from numbers.
    ("a, b; c", "a; b, c", True), ("A ,B", "a,b", True), ("$1, 2%, 3", "1, 2, 3", True),
    ("1;0", "1,000", True), ("1000", "1,000", False), ("b, a", "a, b", False),
    ("a, b, c, d", "a, b, c", False), ("St Petersburg, Moscow", "St. Petersburg, Moscow", False),
    ("['a', 'b']", "a, b", False), ("a, b.", "a, b", False), ("12:30, 14:00", "12:30, 14:00", True),
    # Texts: spaces, case and ASCII punctuation do not count; all else does.
    ("SeaGull", "sea gull", True), ("C++", "C", True), ("12.30", "12:30", True),
    ("(Paris)", "Paris", True), ("x_y", "xy", True), ("Dr. Strange", "dr strange", True),
    ("The Paris", "Paris", False), ("naïve", "naive", False), ("rock–n–roll", "rock n roll", False),
    ("1000.0", "$1000", False), ("pxarxisx", "paris", False), ("Paris or Rome", "Paris", False),
    # What is not text.
    (17, "17", True), (17.0, "17", True), (True, "true", True), (["a", "b"], "a, b", True),
    ((1, 2), "1, 2", True), (None, "none", False), ({"a"}, "a", False), ({"a": 1}, "a", False),
    ([None], "none", False),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth", "expected"), VERDICTS)
def test_the_official_rules_hold(answer: Any, truth: str, expected: bool) -> None:
    assert question_scorer(answer, truth) is expected


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("  42 ", "42"),
        ("So final answer: 7.\nFINAL ANSWER: **42**", "42"),
        ("Final Answer: [red, blue]", "red, blue"),
        ('"Paris"', "Paris"),
        ('"a", "b"', '"a", "b"'),
        ("[a], [b]", "[a], [b]"),
        ("[[1, 2]]", "[[1, 2]]"),
        ("The answer is 42", "The answer is 42"),
        (["red", 2], "red, 2"),
        (0, "0"),
        ("FINAL ANSWER: ", None),
        (" ", None),
        (None, None),
        ({"answer": "42"}, None),
        ("x" * 10_001, None),
    ],
)
def test_the_answer_is_what_follows_the_last_marker(output: Any, answer: str | None) -> None:
    assert extract_answer(output) == answer


@pytest.mark.parametrize(
    ("submitted", "truth", "verdicts"),
    [
        ("Paris", "Paris", (1, 1)),
        ("paris.", "Paris", (1, 1)),
        ("**Paris**", "Paris", (1, 1)),
        ("So it is clear. FINAL ANSWER: Paris", "Paris", (1, 0)),
        ("“Paris”", "Paris", (1, 0)),
        ("[5]", "5", (1, 0)),
        ('"5"', "5", (1, 0)),
        ("**5**", "5", (1, 0)),
        ("$5", "5", (1, 1)),
        (5, "5", (1, 1)),
        ("[red, 2]", "red, 2", (1, 0)),
        (["red", 2], "red, 2", (1, 0)),
        ("Rome", "Paris", (0, 0)),
        (None, "None", (0, 0)),
    ],
)
def test_the_score_has_our_verdict_and_the_leaderboards(
    submitted: Any, truth: str, verdicts: tuple[int, int]
) -> None:
    env = Gaia()
    task = env.task_from_row({"Question": "q", "Final answer": truth})
    score = env.score(task, Result(output={"answer": submitted}))
    assert (score.components["correct"], score.metrics["leaderboard_correct"]) == verdicts


@pytest.mark.thorough
def test_score_and_evaluate_show_both_verdicts(tmp_path: Path) -> None:
    row = {"task": {"Question": "q", "Final answer": "5"}, "response": "FINAL ANSWER: 5"}
    (scored,) = envserver.score("gaia", [row], processes=1).rows
    assert scored["reward"] == 1.0
    assert scored["metrics"]["leaderboard_correct"] == 0.0
    envserver.evaluate(
        "gaia", model="sim", workers={"processes": 1},
        sim={"latency_seconds": 0}, out=tmp_path / "run",
        env={"agent": "plain", "total_steps": 1, "group_size": 1},
    )  # fmt: skip
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| component correct |" in report and "| metric leaderboard_correct |" in report


def test_truths_that_anything_or_nothing_equals_are_of_no_use() -> None:
    assert not any(is_usable_truth(truth) for truth in ("?", "", "inf", "-inf", "nan", " .. "))
    assert all(is_usable_truth(truth) for truth in ("0", "1,000", "C++", "a; b", "-3.5"))


counts = st.integers(0, 10**6)
limits = st.integers(1, 10**5)
weights = st.builds(
    Weights,
    steps=st.floats(0, 0.1), tokens=st.floats(0, 0.1), format=st.floats(0, 0.1),
    errors=st.floats(0, 0.1), ungrounded=st.floats(0, 0.1), free_share=st.floats(0, 0.9),
    free_errors=st.integers(0, 5),
)  # fmt: skip
facts = st.builds(
    Facts,
    correct=st.booleans(), turns=counts, turn_limit=limits, tokens=counts, token_limit=limits,
    steps=counts, malformed=counts, failed=counts, grounded=st.booleans(),
)  # fmt: skip


def reward(fact: Facts, weight: Weights) -> float:
    return fold(items(fact, weight), weight)


@given(facts, facts, weights)
def test_right_always_beats_wrong(one: Facts, other: Facts, weight: Weights) -> None:
    right = reward(dataclasses.replace(one, correct=True), weight)
    wrong = reward(dataclasses.replace(other, correct=False), weight)
    assert right >= 0.5 - 1e-9 and -0.1 <= wrong <= 0.0 < right <= 1.0


@given(facts, facts)
def test_by_default_right_is_at_least_four_fifths(one: Facts, other: Facts) -> None:
    assert reward(dataclasses.replace(one, correct=True), Weights()) >= 0.8 - 1e-9


@given(facts, facts, weights)
def test_a_wrong_answer_is_paid_neither_for_haste_nor_for_patience(
    one: Facts, other: Facts, weight: Weights
) -> None:
    wrong = dataclasses.replace(one, correct=False)
    changed = dataclasses.replace(
        wrong, turns=other.turns, tokens=other.tokens, grounded=other.grounded
    )
    assert reward(wrong, weight) == reward(changed, weight)


@given(facts, weights, counts, st.sampled_from(["turns", "tokens", "malformed", "failed"]))
def test_more_of_anything_never_pays(fact: Facts, weight: Weights, more: int, name: str) -> None:
    worse = dataclasses.replace(fact, **{name: getattr(fact, name) + more})
    assert reward(worse, weight) <= reward(fact, weight)


@given(facts, weights, st.sampled_from(["steps", "tokens", "format", "errors", "ungrounded"]))
def test_a_weight_of_nothing_removes_its_item(fact: Facts, weight: Weights, name: str) -> None:
    without = weight.model_copy(update={name: 0.0})
    found = items(fact, without)
    assert fold(found, without) == fold(dataclasses.replace(found, **{name: 0.0}), without)


def test_the_first_quarter_and_two_errors_are_free() -> None:
    fact = Facts(True, turns=3, turn_limit=12, tokens=400, token_limit=1600, steps=3, failed=2)
    assert reward(fact, Weights()) == 1.0
    assert items(Facts(True, turns=12, turn_limit=12), Weights()).steps == 1.0
    worst = Items(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert fold(worst, Weights()) == pytest.approx(0.8)


def test_weights_by_which_wrong_could_beat_right_are_refused() -> None:
    for bad in ({"steps": 0.6}, {"steps": -0.1}, {"tokens": float("nan")}, {"stepz": 0.1}):
        with pytest.raises(ValidationError):
            Weights(**bad)


def test_a_number_that_python_does_not_write_out_is_no_answer() -> None:
    assert extract_answer(10**5000) is None and not question_scorer(10**5000, "inf")
