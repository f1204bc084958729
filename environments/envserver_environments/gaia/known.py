"""Conversations that solve a task, and results with a known reward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from envserver_environments.demonstrations import call_message, text_message
from envserver_tools.web import LEAK_SEEN

from envserver import KnownResult, Message, Result, Task

from .agents import Kind
from .agents.prompts import FAILED, NO_CALL, NO_CODE, OBSERVED, TOOL_FAILED
from .scoring import MAX_ANSWER_CHARACTERS, question_scorer

if TYPE_CHECKING:
    from .env import Gaia


def demonstrate(task: Task, agent: Kind, planning_interval: int | None) -> list[Message]:
    """The assistant messages, one a turn: the solution is run where there is one, then answered."""
    steps = _steps(task, agent)
    if planning_interval is None or agent == "plain":
        return steps
    plan = text_message("Read the file, then answer.<end_plan>")
    return [
        message
        for number, step in enumerate(steps)
        for message in ([plan, step] if number % planning_interval == 0 else [step])
    ]


def _steps(task: Task, agent: Kind) -> list[Message]:
    answer, solution = str(task.hidden["answer"]), task.hidden.get("solution")
    if agent == "code":
        last = _code("I know the answer.", f"final_answer({answer!r})")
    else:
        last = call_message("final_answer", answer=answer)
    if not solution:
        return [last]
    program = f"{solution.strip()}\nprint(answer)"
    if agent == "code":
        return [_code("I work it out from the file.", program), last]
    return [call_message("python", code=program), last]


def known_results(task: Task, config: Gaia.Config) -> Iterator[KnownResult]:
    weights, turns, tokens = config.rubric, config.max_turns, config.max_completion_tokens
    gold = str(task.hidden["answer"])
    least = 1.0 - weights.steps - weights.tokens - weights.format - weights.errors
    least -= weights.ungrounded
    yield _right("gold", gold, least if weights.ungrounded else 1.0)
    yield _right("gold, after the marker", f"So: 0\nfinal answer: {gold} ", least)
    yield _right("gold, in double stars", f"FINAL ANSWER: **{gold}**", least)
    troubles = (NO_CODE, NO_CALL, f"{FAILED}Error:", f"{TOOL_FAILED}no such file")
    worst = _result(gold, troubles * turns, turns=turns, tokens=tokens)
    yield KnownResult("gold, after every trouble", worst, least=least, most=1.0)
    silent = _result(gold, turns=turns, tokens=tokens)
    yield KnownResult("gold, after steps that nobody sees", silent, least=least, most=1.0)
    if config.contaminated == "zero":
        copied = _result(gold, [f"{OBSERVED}{gold}"], turns=2)
        copied.flags = [LEAK_SEEN]
        yield KnownResult("gold, from a copy of the task", copied)
    for name, answer in _hedges(gold):
        if not question_scorer(answer, gold):
            yield KnownResult(name, _result(answer))
    for name, value in (
        ("no answer", None), ("empty answer", ""), ("only the marker", "FINAL ANSWER:"),
        ("gold as a key", {gold: gold}),
        ("gold far away", " " * MAX_ANSWER_CHARACTERS + "x" + gold),
        ("gold in a long text", f"{gold} " * MAX_ANSWER_CHARACTERS),
    ):  # fmt: skip
        yield KnownResult(name, _result(value))
    for name, result in _not_handed_in(gold):
        yield KnownResult(name, result)


def _hedges(gold: str) -> Iterator[tuple[str, str]]:
    yield "two answers", f"{gold} or 7x"
    yield "two answers as a list", f"{gold}, 7x"
    yield "every answer", f"{gold}; unknown; none"
    yield "in a sentence", f"The answer is {gold}"
    yield "with a doubt", f"{gold}?!x"
    yield "twice", f"{gold} {gold}"
    yield "letters in between", "x".join(gold)
    yield "another answer after it", f"FINAL ANSWER: {gold}\nFINAL ANSWER: 7x"
    yield "given up", "I do not know"
    yield "as a program", f"print({gold!r})"


def _not_handed_in(gold: str) -> Iterator[tuple[str, Result]]:
    """The answer is somewhere, but it was not handed in."""
    said: list[Message] = [{"role": "assistant", "content": f"FINAL ANSWER: {gold}"}]
    yield "gold, only observed", _result(None, [f"{OBSERVED}{gold}"])
    yield "gold, only said", Result(output={"answer": None, "steps": []}, messages=said)
    yield "gold as a state", Result(output={"answer": None, "state": gold, "steps": []})
    yield "gold without an agent", Result(output=gold)
    yield "a reward of its own", Result(output={"answer": None, "reward": 1.0, "correct": True})


def _right(name: str, answer: str, least: float) -> KnownResult:
    return KnownResult(name, _result(answer), least=least, most=1.0)


def _result(answer: Any, replies: Sequence[str] = (), *, turns: int = 1, tokens: int = 1) -> Result:
    said: Message = {"role": "assistant", "content": "..."}
    dialogue = [part for reply in replies for part in (said, {"role": "user", "content": reply})]
    output = {"answer": answer, "state": "answered", "steps": []}
    return Result(output=output, messages=[*dialogue, said], turns=turns, completion_tokens=tokens)


def _code(thought: str, code: str) -> Message:
    return text_message(f"{thought}\n<code>\n{code}\n</code>")
