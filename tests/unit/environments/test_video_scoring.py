"""The environment `video`: what counts as an answer, and how accuracy is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envserver_environments.video.aggregation import accuracy_by_type, nextqa_accuracy
from envserver_environments.video.env import Video
from hypothesis import given
from hypothesis import strategies as st

from envserver import Result, Task

OPTIONS = ["washes a cup", "opens the gate", "feeds a goose"]


def choice(**settings: Any) -> tuple[Video, Task]:
    env = Video(Video.Config(**settings))
    row = {"question": "What does he do?", "type": "TP", "options": OPTIONS, "answer": "B",
           "evidence": [[60, 75]]}  # fmt: skip
    return env, env.task_from_row(row)


def reward(text: str = "", answer: str | None = None, **settings: Any) -> float | None:
    env, task = choice(**settings)
    return env.score(task, Result(output={"answer": answer, "text": text, "experts": {}})).reward


@pytest.mark.parametrize(
    "text",
    ["Answer: B", "\\boxed{b}", '{"reasoning": "A?", "answer": "Option B"}', "FINAL: (B)", "B",
     "<think>A</think>The answer is B.", "Answer: opens the gate.", "Answer: B since it swings"],
)  # fmt: skip
def test_one_option_is_named_in_many_ways(text: str) -> None:
    assert reward(text) == 1.0


@pytest.mark.parametrize(
    "answer", ["B", "b)", "Option B", "\\boxed{B}", "Opens the  gate", "Answer: B"]
)
def test_finish_names_an_option(answer: str) -> None:
    assert reward("Answer: A", answer) == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "B person opens it", "Answer: A or B", "Answer: 2", "<think>Answer: B", "opens the gate",
     "Answer: D", "\\boxed{B} \\boxed{A}", '{"answer": 1}', "I believe B is shown", "cannot tell"],
)  # fmt: skip
def test_what_names_no_option_or_several_is_wrong(text: str) -> None:
    assert reward(text) == 0.0
    assert reward(answer=text) == 0.0 or text == "opens the gate"


@given(st.text(alphabet="ABCD .,:;()or and boxed{}\\\n", max_size=60), st.none() | st.text())
def test_no_words_break_the_scorer(text: str, answer: str | None) -> None:
    assert reward(text, answer) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("At 0:01:05 it swings. Answer: B", 1.0),
        ("From 0:00:50 to 0:01:01. Answer: B", 1.0),
        ("Answer: B", 0.75),
        ("At 0:02:05. Answer: B", 0.75),
        ("0:00:00-0:03:00. Answer: B", 0.75),
        ("0:00:10 0:00:20 0:01:05 0:01:40 Answer: B", 0.75),
        ("At 0:01:05. Answer: A", 0.0),
    ],
)
def test_evidence_is_worth_its_share_of_a_right_answer(text: str, expected: float) -> None:
    assert reward(text, evidence_bonus=0.25) == expected
    assert reward(text) == float(expected > 0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The old barn!", 1.0),
        ("Answer: old barn", 1.0),
        ("a barn", 2 / 3),
        ("old", 2 / 3),
        ("of the", 0.0),
        ("old barn or new barn", 0.0),
        ("house; old barn", 0.0),
        ("old barn " * 7, 0.0),
        ("", 0.0),
    ],
)
def test_answers_in_words_are_measured(answer: str, expected: float) -> None:
    env = Video()
    row = {"question": "Where?", "answer": ["the old barn", "barn of the old"], "type": "DL"}
    task = env.task_from_row(row)
    text = answer if answer.startswith("Answer") else f"\\boxed{{{answer}}}"
    assert env.score(task, Result(output=text)).reward == pytest.approx(expected)


def test_what_was_cut_off_is_wrong_and_types_are_told() -> None:
    env, task = choice()
    right = env.score(task, Result(output="Answer: B", metrics={"tool_errors_captions": 2.0}))
    assert right.metrics == {
        "truncated": 0.0, "tool_errors": 2.0, "answered": 1.0, "correct_TN": 1.0, "correct_T": 1.0,
    }  # fmt: skip
    cut = env.score(task, Result(output="Answer: B", truncated=True))
    assert (cut.reward, cut.metrics["correct_T"], cut.metrics["answered"]) == (0.0, 0.0, 0.0)


def test_a_response_is_a_text_or_a_call_of_finish() -> None:
    env, task = choice()
    function = {"name": "finish", "arguments": json.dumps({"answer": "B"})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    assert env.score(task, env.response_from_row("", [call])).reward == 1.0
    assert env.score(task, env.response_from_row("Answer: B", [])).reward == 1.0
    function["arguments"] = "["
    assert env.score(task, env.response_from_row("", [call])).reward == 0.0


def test_accuracy_is_reported_as_by_nextqa() -> None:
    rows = [
        {"video": "v", "qid": str(place), "type": type_, "answer": 0}
        for place, type_ in enumerate(["CW", "CW", "TN", "TP", "DO"])
    ]
    said = {"v_0": 0, "v_1": 1, "v_2": 0, "v_4": None}
    assert nextqa_accuracy(rows, said) == {
        "CW": 0.5, "C": 0.5, "TN": 0.5, "T": 0.5, "DO": 0.0, "D": 0.0, "all": 0.4,
    }  # fmt: skip
    assert accuracy_by_type([("", 1.0), ("", 0.0)]) == {"all": 0.5}
