"""What agents of our environments read of a model's text takes linear time: the workers' event loop
does it, and other rollouts wait meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from envserver_environments.answers import choice_index, last_boxed
from envserver_environments.code.agent import _has_block
from envserver_environments.gaia.agents.plain import _SAID
from envserver_environments.kuhn.env import action_of
from envserver_environments.math.agent import commands_of, run_command
from envserver_environments.mhqa import agent as mhqa
from envserver_environments.proposer_solver.env import answer_of, result_of
from envserver_environments.swe.bash_agent import blocks_of
from envserver_environments.twenty_questions.env import said
from envserver_tools.protocol import parse_message
from envserver_tools.visible import visible_text
from support.adversarial_texts import adversarial_texts
from support.cpu import cpu_limit

CHARACTERS = 20_000
"""A scanner of quadratic time needs seconds for so many, one of linear time milliseconds."""
CPU_SECONDS = 0.3
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
    slow, most = {}, cpu_limit(CPU_SECONDS)
    for text_name, text in texts():
        began = time.thread_time()
        READERS[name](text)
        if (seconds := time.thread_time() - began) > most:
            slow[text_name] = round(seconds, 2)
    assert slow == {}
