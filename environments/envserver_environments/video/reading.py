"""Reads the answer in an agent's text: an option, or a few words. Shared by votes and scores.

Pure. Options are found as in `envserver_environments.answers`, words as in `mhqa`.
"""

from __future__ import annotations

from envserver_environments.answers import choice_index, last_boxed, option_index
from envserver_environments.mhqa.metrics import normalize_answer
from envserver_environments.mhqa.scoring import extract_answer
from envserver_tools.visible import visible_text

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
    """Returns the words of an answer without options, or None."""
    if reply.answer is None:
        return extract_answer(reply.text) or None
    seen = visible_text(reply.answer)
    return None if seen is None else (last_boxed(seen) or seen).strip() or None


def same_answer(first: AgentAnswer, second: AgentAnswer, options: list[str]) -> bool:
    """Returns whether both give an answer, and the same one."""
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
