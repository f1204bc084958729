"""The rows that each kind of environment begins with; all original."""

from __future__ import annotations

from typing import Any

_CAPITALS = (
    ("Which city is the capital of Italy?", "Rome"),
    ("Which planet is nearest to the sun?", "Mercury"),
    ("What do bees make?", "Honey"),
    ("Which metal is liquid at room temperature?", "Mercury"),
    ("How many legs has a spider, as a word?", "Eight"),
)
_BASKETS = (
    ({"apple": 2, "pear": 1}, 10),
    ({"melon": 1, "apple": 3}, 20),
    ({"pear": 5}, 20),
    ({"apple": 1, "pear": 1, "melon": 1}, 18),
)
_PROGRAMS = (
    (
        "Read a number, print its double.",
        "print(int(input()) * 2)",
        (("4", "8"), ("0", "0"), ("-7", "-14")),
    ),
    (
        "Read a line, print it backwards.",
        "print(input()[::-1])",
        (("abc", "cba"), ("level up", "pu level"), ("x", "x")),
    ),
    (
        "Read numbers separated by spaces, print the largest.",
        "print(max(map(int, input().split())))",
        (("3 9 2", "9"), ("-5 -2", "-2"), ("7", "7")),
    ),
)
_TEXTS = (
    (
        "The ferry to the island leaves at nine. On Sundays, when fewer people travel, it leaves "
        "at ten, and in winter it does not run at all.",
        ["ferry", "winter"],
        "The ferry leaves at nine or ten, and never in winter.",
    ),
    (
        "Ada repairs clocks. She learned it from her aunt, who had a shop by the harbour, and she "
        "still uses the same lamp and the same small hammer.",
        ["ada", "clocks"],
        "Ada repairs clocks with the tools of her aunt.",
    ),
    (
        "The garden was full of snails this spring. A family of hedgehogs moved in during May, and "
        "by June there was not one snail left.",
        ["snails", "hedgehogs"],
        "Hedgehogs ate all the snails of the garden.",
    ),
)


def _basket(items: dict[str, int], answer: int) -> dict[str, Any]:
    named = [f"{count} {item}{'s' if count > 1 else ''}" for item, count in items.items()]
    question = f"What do {' and '.join(named)} cost together? Ask for the prices."
    listed = [{"item": item, "count": count} for item, count in items.items()]
    return {"question": question, "answer": answer, "items": listed}


_QUESTIONS = [{"question": question, "answer": answer} for question, answer in _CAPITALS]
_SHOPPING = [_basket(*basket) for basket in _BASKETS]

ROWS: dict[str, list[dict[str, Any]]] = {
    "single": _QUESTIONS,
    "tools": _SHOPPING,
    "multi-agent": _QUESTIONS,
    "sandbox": [
        {
            "question": question,
            "solution": solution,
            "cases": [{"input": given, "output": wanted} for given, wanted in cases],
        }
        for question, solution, cases in _PROGRAMS
    ],
    "judge": [
        {"text": text, "words": words, "summary": summary} for text, words, summary in _TEXTS
    ],
    "game": [{"most": 100, "secret": secret} for secret in (7, 42, 64, 91)],
    "smolagents": _SHOPPING,
}
