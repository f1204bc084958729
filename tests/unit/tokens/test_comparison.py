"""If a template renders an answer differently than it was sampled, the difference is named."""

from __future__ import annotations

from typing import Any

import pytest

from envserver.tokens.comparison import Segment, compare
from envserver.tokens.edits import AnswerContent

ASK, HEAD, END, NEXT = "<U>How much?<E>", "<A>", "<E>", "<U>And now?<E><A>"
CALLS = (("call-1", "add", '{"one":1.5,"two":["a \\"b\\"",true]}'),)
WRITTEN = '<call>{"one": 1.5, "two": ["a \\"b\\"", true], "name": "add"}</call>'
SAMPLED = '<call>{"name": "add", "arguments": {"one": 1.5, "two": ["a \\"b\\"", true]}}</call>'
CALLED = AnswerContent("", CALLS)


@pytest.mark.parametrize(
    ("sampled", "shown", "more", "differences"),
    [
        ("Four.", "Four.", {}, set()),
        (" Four. ", "Four.", {}, {"whitespace"}),
        ("Four.", "Five.", {}, {"other"}),
        ("Four.", "", {}, {"other"}),
        # Reasoning: with tags, told apart by the engine, cut off, empty, on the other side only.
        ("<think>2+2</think>Four.", "Four.", {}, {"think"}),
        ("2+2</think>Four.", "Four.", {}, {"think"}),
        ("2+2 Four.", " Four.", {"reasoning": "2+2"}, {"think"}),
        ("<think>Four.", "", {}, {"think"}),
        ("<think>\n</think>Four.", "Four.", {"specials": ("<think>", "</think>")}, {"think"}),
        ("Four.", "<think>\n</think>Four.", {}, {"think"}),
        ("<think>Four.</think>Four.", "<think></think>Four.", {}, {"think"}),
        ("<think>2+2</think>Four.", "<think>2+3</think>Four.", {}, {"other"}),
        ("<think>2+2</think>Four.", "<think>\n2+2\n</think>Four.", {}, {"whitespace"}),
        # What text cannot say.
        ("Fo\ufffdur.", "Four.", {}, {"lossy_detok"}),
        ("Fo<S>ur.", "Four.", {"specials": ("<S>",)}, {"lossy_detok"}),
        ("Four.STOP;", "Four.", {"tail": "STOP;"}, {"lossy_detok"}),
        ("Four.STOP;", "Four.STOP", {"tail": "STOP;"}, {"lossy_detok"}),
        ("Four.STOP;", "Four", {"tail": "STOP;"}, {"other"}),
        ("Four.STOP;", "Four.STOP;;", {"tail": "STOP;"}, {"other"}),
        ("Fo\ufffdur.STOP", "Four.STOP", {"tail": "STOP"}, {"lossy_detok"}),
        ("<think>2+2</think>Fo\ufffdur.", "Four.", {}, {"think", "lossy_detok"}),
        # Tool calls: their names, keys and values must be there.
        (SAMPLED, WRITTEN, {"answer": CALLED}, {"calls"}),
        (
            "2+2</think>" + SAMPLED,
            WRITTEN,
            {"answer": CALLED},
            {"calls", "think"},
        ),
        (SAMPLED, WRITTEN.replace("1.5", "1"), {"answer": CALLED}, {"other"}),
        (SAMPLED, WRITTEN.replace("two", "2"), {"answer": CALLED}, {"other"}),
        (SAMPLED, WRITTEN.replace("add", ""), {"answer": CALLED}, {"other"}),
        (f"So: {SAMPLED}", WRITTEN, {"answer": AnswerContent("So:", CALLS)}, {"other"}),
        (SAMPLED, WRITTEN, {}, {"other"}),
    ],
)
def test_differences_have_names(
    sampled: str, shown: str, more: dict[str, Any], differences: set[str]
) -> None:
    more = {"answer": AnswerContent(sampled, ()), **more}
    segment = Segment(context=ASK + HEAD, sampled=sampled, **more)
    whole = ASK + HEAD + shown + END + NEXT
    assert compare([segment], END + NEXT, whole, lambda: HEAD) == [differences]
    later = Segment(context=END + NEXT, sampled="Six.", answer=AnswerContent("Six.", ()))
    found = compare([segment, later], END + NEXT, whole + "Six." + END + NEXT, lambda: HEAD)
    assert found[0] == differences


ONE = Segment(context=ASK + HEAD, sampled="Four." + END, answer=AnswerContent("Four.", ()))
TWO = Segment(context=NEXT, sampled="Six." + END, answer=AnswerContent("Six.", ()))


@pytest.mark.parametrize(
    "shown",
    [
        f"<U>How many?<E><A>Four.<E>{NEXT}Six.<E>{NEXT}",
        f"{ASK}<A>Four.<E>{NEXT}Six.<E>{NEXT}And",
        f"{ASK}<A>Four.<E><U>And then?<E><A>Six.<E>{NEXT}",
        f"{ASK}<A>Four.<E>{NEXT}",
        f"{ASK}<A>Four.<E>{NEXT}Six.<E>",
        f"{ASK}<A>Four.<E>{NEXT}Six.<E>{NEXT}".replace("now?<E><A>", "you?<E><A>"),
        f"{ASK}<A>Four.<E>{NEXT}Six.<E>{NEXT.replace('now', 'you')}",
        "",
    ],
)
def test_a_changed_context_is_no_difference_in_a_turn(shown: str) -> None:
    assert {"other"} in compare([ONE, TWO], NEXT, shown, lambda: HEAD)


def test_contexts_do_not_overlap() -> None:
    empty = Segment(context="<U><E>", sampled="\n", answer=AnswerContent("", ()))
    assert compare([empty], "<E><U>", "<U><E><U>", lambda: "") == [{"other"}]


def test_a_generation_prompt_may_go_with_its_turn() -> None:
    head = "<A><think>\n"
    segment = Segment(
        context=ASK + head, sampled="2+2</think>Four.<E>", answer=AnswerContent("Four.", ())
    )
    shown = f"{ASK}<A>Four.<E><U>On<E>{head}"
    assert compare([segment], f"<U>On<E>{head}", shown, lambda: head) == [{"think"}]


def test_the_same_words_in_an_answer_and_behind_it_are_told_apart() -> None:
    """What opens the answer tells where the question ends, so it is not left out at once."""
    first = Segment(context="<U>\nIt<A>", sampled="\nIt\ufffd<U>", answer=AnswerContent("It", ()))
    second = Segment(context="\nIt<A>", sampled="\nSo<U>", answer=AnswerContent("So", ()))
    shown = "<U>\nIt<A>\nIt<U>\nIt<A>\nSo<U>\nOn<A>"
    found = compare([first, second], "\nOn<A>", shown, lambda: "<A>")
    assert found == [{"lossy_detok"}, set()]
