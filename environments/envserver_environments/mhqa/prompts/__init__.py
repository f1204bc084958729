"""The texts that the model gets; each system prompt is a file beside this one."""

from __future__ import annotations

from collections.abc import Iterable

from envserver_environments.demonstrations import prompt_beside
from envserver_tools.calling import Tool
from envserver_tools.protocol import FORMAT, describe_tools

_ANSWERS = (
    "The answer is as short as it can be: a name, a number, a date, yes or no. Give one answer, "
    "without alternatives and without an explanation."
)
_UNANSWERABLE = "Where the passages do not tell the answer, the answer is: noanswer"

SUB_QUESTIONS_WANTED = (
    "First divide it. Write a numbered list of two to five sub-questions, one a line, nothing "
    "else. Each must be answerable from one passage; #1 stands for the answer of the first one, "
    "#2 for that of the second one, and so on."
)


def system_prompt(mode: str, unanswerable: bool) -> str:
    return f"{prompt_beside(__file__, mode)}\n\n{_answers(unanswerable)}"


def text_system_prompt(tools: Iterable[Tool], unanswerable: bool) -> str:
    return "\n\n".join([system_prompt("text", unanswerable), describe_tools(tools), FORMAT])


def harness_prompt(question: str, unanswerable: bool) -> str:
    return (
        f"Question: {question}\n\nFind the answer with the tools search and read. "
        f"{_answers(unanswerable)} End "
        "your last message with a line of this form:\nAnswer: ..."
    )


def _answers(unanswerable: bool) -> str:
    return f"{_ANSWERS} {_UNANSWERABLE}" if unanswerable else _ANSWERS


def note_wanted(hop: int, sub_question: str, found: str | None) -> str:
    passages, known = (
        ("", "you know") if found is None else (f"Passages:\n\n{found}\n\n", "they say")
    )
    return (
        f"Sub-question {hop}: {sub_question}\n\n{passages}"
        f"Write a short note of what {known} about it. End it with a line of this form:\n"
        "Answer: ..."
    )


def answer_wanted(question: str) -> str:
    return f"Question: {question}\n\nNow write the final answer, and nothing else:\nAnswer: ..."
