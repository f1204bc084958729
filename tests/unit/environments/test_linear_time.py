"""Reading a model's text takes time linear in its length, whatever the text is.

Each reader gets texts that grow fourfold. CPU time is measured, not time by the clock, and a growth
of up to nine times passes: quadratic readers need sixteen times as long.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from envserver_environments.answers import choice_index, last_boxed, option_index
from envserver_environments.code.extraction import extract_code, fenced_blocks
from envserver_environments.gaia.scoring import extract_answer as gaia_answer
from envserver_environments.gaia.scoring import question_scorer
from envserver_environments.math.agent import run_command
from envserver_environments.math.data_sets import read_problem
from envserver_environments.mhqa.agent import numbered_list
from envserver_environments.mhqa.metrics import answer_measure
from envserver_environments.mhqa.scoring import extract_answer, parse_answer, why_refused
from envserver_environments.router.course import PlanError, course_metrics, read_plan
from envserver_environments.tau.evaluation import Strictness, information_given
from envserver_environments.video.agent import AgentAnswer
from envserver_environments.video.scoring import cites_evidence, option_of, words_of
from envserver_tools.protocol import parse_message
from support.cases import cases_of
from support.extent import WHOLE

from envserver import InputError

CASES = cases_of(__file__)

Reader = Callable[[str], Any]

SMALL, GROWTH, ALLOWED_GROWTH = 4_000, 4, 9
LEAST_SECONDS = 0.005
"""Shorter times count as this: they are mostly noise."""

OPTIONS = ["apple", "blue sky", "seven", "a dog runs", "none of these"]


def plan(text: str) -> None:
    with suppress(PlanError):
        read_plan(text)


def row(text: str) -> None:
    with suppress(InputError):
        read_problem({"problem": text, "answer": text})


READERS: dict[str, Reader] = {
    "box": last_boxed,
    "choice": lambda text: choice_index(text, OPTIONS),
    "option": lambda text: option_index(text, OPTIONS),
    "function": lambda text: extract_code(text, "f"),
    "program": lambda text: extract_code(text, ""),
    "blocks": lambda text: list(fenced_blocks(text)),
    "words": extract_answer,
    "facts": parse_answer,
    "measure": lambda text: (answer_measure(text, ["a b"]), why_refused(text, ["a b"])),
    "list": numbered_list,
    "gaia": lambda text: question_scorer(gaia_answer(text), "17"),
    "command": lambda text: run_command([text]),
    "video": lambda text: option_of(AgentAnswer(text=text), OPTIONS),
    "video answer": lambda text: option_of(AgentAnswer(answer=text), OPTIONS),
    "video words": lambda text: words_of(AgentAnswer(text=text)),
    "video evidence": lambda text: cites_evidence(text, [(0, 10)]),
    "plan": plan,
    "row": row,
    "course": lambda text: course_metrics(text, {"route_plan": ["/math(x)"]}),
    "tau": lambda text: information_given(
        ["3,500.5"], [{"role": "assistant", "content": text}], Strictness.STRICT
    ),
    "protocol": parse_message,
}


@pytest.mark.parametrize("name", READERS)
def test_time_grows_with_the_length(name: str) -> None:
    slow = [
        (before, repeated, after)
        for before, after in CASES["around"][: None if WHOLE else 2]
        for repeated in CASES["repeated"]
        if not grows_linearly(READERS[name], before, repeated, after)
    ]
    assert not slow


def grows_linearly(read: Reader, before: str, repeated: str, after: str) -> bool:
    """Compares two lengths; a bad ratio must come three times in a row to count."""
    small, large = (
        before + repeated * (size // len(repeated)) + after for size in (SMALL, SMALL * GROWTH)
    )
    return any(
        (seconds := cpu_seconds(read, large)) <= ALLOWED_GROWTH * LEAST_SECONDS
        or seconds <= ALLOWED_GROWTH * cpu_seconds(read, small)
        for _ in range(3)
    )


def cpu_seconds(read: Reader, text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start
