"""Scores one rollout: 1 for the right option, the F1 of an answer in words, else 0. Only the
agent's last text is read. An answer that names no option, or several, is wrong; a word's first
letter is not taken for an option."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from envserver_environments.answers import choice_index, last_boxed, option_index, text_in
from envserver_environments.mhqa.metrics import answer_measure, normalize_answer
from envserver_environments.mhqa.scoring import extract_answer, is_short, why_refused
from envserver_tools.calling import visible_text
from envserver_tools.retrieval import STOP_WORDS

from envserver import Result, Score, Task

from .agent import AgentAnswer


def option_of(reply: AgentAnswer, options: list[str]) -> int | None:
    """Returns the option that an agent names, or None if it names none or several."""
    if reply.answer is None:
        return choice_index(reply.text, options)
    boxed = last_boxed(reply.answer)
    if boxed is not None:
        return option_index(boxed, options)
    index = option_index(reply.answer, options)
    return choice_index(reply.answer, options) if index is None else index


def words_of(reply: AgentAnswer) -> str | None:
    if reply.answer is None:
        return extract_answer(reply.text) or None
    seen = visible_text(reply.answer)
    return None if seen is None else (last_boxed(seen) or seen).strip() or None


def same_answer(first: AgentAnswer, second: AgentAnswer, options: list[str]) -> bool:
    if options:
        index = option_of(first, options)
        return index is not None and index == option_of(second, options)
    words = normalize_answer(words_of(first) or "")
    return bool(words) and words == normalize_answer(words_of(second) or "")


def final_answer(reply: AgentAnswer, options: list[str]) -> str:
    """Returns the answer for people: the option with its letter, or the words; "" for none."""
    if not options:
        return words_of(reply) or ""
    place = option_of(reply, options)
    return "" if place is None else f"{chr(ord('A') + place)}) {options[place]}"


def score_rollout(task: Task, result: Result, evidence_bonus: float = 0.0) -> Score:
    """`evidence_bonus` is the share of the reward that a right answer gets only if it names a time
    of the evidence, where the task has any."""
    reply = read_answer(result.output)
    errors = sum(value for name, value in result.metrics.items() if name.startswith("tool_errors"))
    metrics = {"truncated": float(result.truncated), "tool_errors": errors}
    if result.truncated:
        correct, metrics["answered"] = 0.0, 0.0
    elif task.public["options"]:
        index = option_of(reply, task.public["options"])
        metrics["answered"] = float(index is not None)
        correct = float(index == task.hidden["answer"])
    else:
        words = words_of(reply)
        metrics["answered"] = float(words is not None)
        correct = words_score(words or "", task.hidden["golds"])
    metrics |= {f"correct_{name}": correct for name in kinds_of(task.hidden["type"])}
    components = {"correct": correct}
    reward = correct
    spans = task.hidden["evidence"]
    if evidence_bonus and spans:
        components["evidence"] = float(correct > 0 and cites_evidence(reply.words, spans))
        reward *= 1 - evidence_bonus * (1 - components["evidence"])
    return Score(reward=reward, components=components, metrics=metrics)


def read_answer(output: Any) -> AgentAnswer:
    """Reads an output; a bare text is the last text of an agent."""
    if isinstance(output, str):
        return AgentAnswer(text=output)
    if not isinstance(output, dict):
        return AgentAnswer()
    return AgentAnswer(text_in(output.get("answer")), text_in(output.get("text")) or "")


def words_score(answer: str, golds: list[str]) -> float:
    """Returns the best F1 against `golds`; 0.0 for long answers, lists, and little overlap."""
    if why_refused(answer, golds) or not is_short(answer, golds):
        return 0.0
    near = [gold for gold in golds if _content(answer) & _content(gold)]
    return answer_measure(answer, near).f1


def _content(text: str) -> set[str]:
    return set(normalize_answer(text).split()) - STOP_WORDS


def kinds_of(type_: str) -> list[str]:
    """The names under which a question of this type of NExT-QA is counted: two letters, of which
    the first is the group: C (causal), T (temporal), D (descriptive)."""
    name = "TN" if type_ == "TP" else type_
    group = [name[0]] if len(name) == 2 and name[0] in "CTD" else []
    return [name, *group] if name else []


MAX_CITED = 3
MAX_RANGE_SECONDS = 20.0

_TIME = r"(?:(\d{1,2}):)?(\d{1,2}):(\d{2})"
_CITED = re.compile(rf"(?<![\d:]){_TIME}(?:\s*(?:-|–|to)\s*{_TIME})?(?![\d:])")


def cites_evidence(text: str, spans: Iterable[Iterable[float]]) -> bool:
    """Returns whether a time in `text` is in one of `spans` (pairs of seconds)."""
    cited = [_range(found.groups()) for found in _CITED.finditer(text)]
    if not 0 < len(cited) <= MAX_CITED:
        return False
    if any(not 0 <= end - start <= MAX_RANGE_SECONDS for start, end in cited):
        return False
    return any(
        start <= last and first <= end for first, last in map(tuple, spans) for start, end in cited
    )


def _range(parts: tuple[str | None, ...]) -> tuple[float, float]:
    start = _seconds(parts[:3])
    return start, start if parts[4] is None else _seconds(parts[3:])


def _seconds(parts: tuple[str | None, ...]) -> float:
    hours, minutes, seconds = (int(part or 0) for part in parts)
    return float(3600 * hours + 60 * minutes + seconds)
