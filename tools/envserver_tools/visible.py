"""Finds the visible part of a model's text. Everything that reads models' texts uses this rule."""

from __future__ import annotations


def visible_text(text: str) -> str | None:
    """Returns the visible text, or None if the model never stopped thinking.

    It is the text after the last `</think>`; a text with an unclosed `<think>` has none.
    """
    _, closed, after = text.rpartition("</think>")
    if "<think>" in after:
        return None
    return after if closed else text
