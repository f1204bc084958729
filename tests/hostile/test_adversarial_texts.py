"""Texts of a megabyte through the scorer of every environment, as users score them, and shorter
ones through what its agent reads, which the workers' event loop does while other rollouts wait.

Each text costs less than one CPU second of the scorer and gives a score, never an error. `make
test-all` tries the worst and a few of the others, `make test-slow` all texts in every place.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.answers import choice_index, last_boxed
from envserver_environments.code.agent import _has_block
from envserver_environments.gaia.agents.plain import _SAID
from envserver_environments.kuhn.env import action_of
from envserver_environments.math.agent import commands_of, run_command
from envserver_environments.mhqa import agent as mhqa
from envserver_environments.proposer_solver.env import answer_of, result_of
from envserver_environments.swe.agent import blocks_of
from envserver_environments.twenty_questions.env import said
from envserver_tools.calling import visible_text
from envserver_tools.protocol import parse_message
from support.adversarial_texts import adversarial_texts
from support.cases import cases_of
from support.cpu import cpu_limit

import envserver

CPU_SECONDS = 1.0

SAMPLE = {"opened boxes", "boxed blanks", "fences", "answers", "opened answers"}

SCORERS = cases_of(__file__)
TIMED = SCORERS.pop("timed")
SCORERS["router"]["tasks"].append(SCORERS["router"].pop("course"))
TOO_LONG = {
    "math": f"\\boxed{{{'9' * 301}}}",
    "code": f"```python\nf = {'1' * 50_000}\n```",
    "gaia": "9" * 10_001,
}
"""A response to the first task that is too long to be right."""


@pytest.mark.parametrize("every", [27, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCORERS)
def test_no_text_keeps_a_scorer_busy_or_makes_it_fail(
    tmp_path: Path, name: str, every: int
) -> None:
    scorer = SCORERS[name]
    environment = tmp_path / "timed.py"
    environment.write_text(TIMED.format(name=name))
    names = []
    with (tmp_path / "rows.jsonl").open("w", encoding="utf-8") as rows:

        def write(text_name: str, row: dict[str, Any]) -> None:
            rows.write(json.dumps(row) + "\n")
            names.append(text_name)

        write("first", {"task": scorer["tasks"][0], **next(answers_of(scorer, "first"))})
        for number, (text_name, text) in enumerate(adversarial_texts()):
            if text_name in SAMPLE or number % every == 0:
                for answer in answers_of(scorer, text):
                    for task in scorer["tasks"]:
                        write(text_name, {"task": task, **answer})
        if name in TOO_LONG:
            write("too long", {"task": scorer["tasks"][0], "response": TOO_LONG[name]})
    found = envserver.score(
        f"{environment}:Timed", tmp_path / "rows.jsonl", env=scorer.get("settings", {}), processes=1
    )
    scored = list(zip(names, found.rows, strict=True))
    assert {n: row["error"] for n, row in scored if row["error"]} == {}
    # The first loads what the others use.
    seconds = [(row["metrics"]["cpu_seconds"], n) for n, row in scored[1:]]
    assert [one for one in sorted(seconds, reverse=True) if one[0] >= CPU_SECONDS] == []
    if name in TOO_LONG:
        assert (scored[-1][1]["reward"], scored[-1][1]["metrics"]["too_long"]) == (0.0, 1.0)


def answers_of(scorer: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
    """Yields the text as a response, as the last message, and as what a tool was called with."""
    asked = {"role": "user", "content": "q"}
    arguments = json.dumps({scorer.get("argument", "answer"): text}, ensure_ascii=False)
    functions = (
        {"name": scorer.get("tool", "finish"), "arguments": said} for said in (arguments, text)
    )
    calls = ({"id": "call_1", "type": "function", "function": function} for function in functions)
    if not scorer.get("only_messages"):
        yield {"response": text}
    yield {"messages": [asked, {"role": "assistant", "content": text}]}
    for call in calls:
        yield {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}


CHARACTERS = 20_000
"""A scanner of quadratic time needs seconds for so many, one of linear time milliseconds."""
READER_SECONDS = 0.3
READERS: dict[str, Callable[[str], Any]] = {
    "visible": visible_text,
    "protocol": parse_message,
    "boxed": last_boxed,
    "choice": lambda text: choice_index(text, ["a dog", "blue sky"]),
    "math": lambda text: run_command(commands_of(text)),
    "swe": blocks_of,
    "code": _has_block,
    "gaia": _SAID.search,
    "kuhn": action_of,
    "twenty questions": said,
    "proposer": lambda text: result_of(text, {"use": [1, 2], "max_characters": 10**9}),
    "solver": answer_of,
    "mhqa tags": mhqa.tagged_queries,
    "mhqa list": mhqa.numbered_list,
    "mhqa note": mhqa.provisional_answer,
    "mhqa answer": mhqa.final_answer,
}


def texts() -> Iterator[tuple[str, str]]:
    for name, text in adversarial_texts():
        yield name, text[:CHARACTERS] + text[-100:]
    for name, part in {
        "shells": "```bash\n", "shells of blanks": "```bash \t", "prints": "print(", "asks": "ask ",
        "quoted commands": "```bash\npython -c 'print(1)'\n", "numbers of a list": "1. \n#1 ",
    }.items():  # fmt: skip
        yield name, part * (CHARACTERS // len(part))
    yield "asked blanks", f"ask a{' ' * CHARACTERS}b"
    yield "guessed marks", f"guess a{' .' * (CHARACTERS // 2)}b"


@pytest.mark.parametrize("name", READERS)
def test_no_text_keeps_an_agent_busy(name: str) -> None:
    slow, most = {}, cpu_limit(READER_SECONDS)
    for text_name, text in texts():
        began = time.thread_time()
        READERS[name](text)
        if (seconds := time.thread_time() - began) > most:
            slow[text_name] = round(seconds, 2)
    assert slow == {}
