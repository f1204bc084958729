"""What of a model's text is said aloud. All who read models' texts share this rule."""

from __future__ import annotations


def visible_text(text: str) -> str | None:
    """What the model said aloud, or None where it never stopped thinking.

    Only what follows the last `</think>` counts; a text whose `<think>` was never closed has none.
    """
    _, closed, after = text.rpartition("</think>")
    if "<think>" in after:
        return None
    return after if closed else text
