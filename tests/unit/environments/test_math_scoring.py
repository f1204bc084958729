"""The environment `math`: what it takes for a right answer."""

from __future__ import annotations

import itertools
import resource
from typing import Any

import pytest
from envserver_environments.answers import choice_index, last_boxed, visible_text
from envserver_environments.math import verification
from envserver_environments.math.env import Math
from envserver_environments.math.literals import is_number_literal, plain_number
from envserver_environments.math.sizes import is_huge
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cpu import cpu_limit
from support.extent import examples

from envserver import Result, Score, Task


def score(row: dict[str, Any], response: str, **settings: Any) -> Score:
    env = Math(Math.Config(**settings))
    return env.score(env.task_from_row(row), env.response_from_row(response, []))


def reward(gold: str, response: str, **settings: Any) -> float | None:
    row = {"problem": "p", "solution": "s", "answer": gold}
    return score(row, response, **settings).reward


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("1200", "1,200", 1.0),
        ("1200", "1{,}200", 1.0),
        ("1200", r"1\,200", 0.0),
        ("0.75", r"\frac{3}{4}", 1.0),
        ("0.75", r"75\%", 1.0),
        ("0.75", "0.749", 0.0),
        (r"\frac{2}{3}", "0.666667", 1.0),
        (r"\frac{2}{3}", "0.667", 0.0),
        ("60", r"60^\circ", 1.0),
        ("60", r"60\text{ km}", 1.0),
        (r"\sqrt{18}", r"3\sqrt{2}", 1.0),
        (r"\sqrt{18}", r"3\sqrt2", 1.0),
        ("x^2+2x", "x(x+2)", 1.0),
        ("x^2+2x", "x(x-2)", 0.0),
        ("y=3x-1", "3x-1", 1.0),
        ("1-2i", "-2i+1", 1.0),
        (r"\{1,4\}", r"\{4,1\}", 1.0),
        (r"\{1,4\}", r"\{1,4,5\}", 0.0),
        ("[0,3)", "[0,3)", 1.0),
        ("[0,3)", "[0,3]", 0.0),
        ("(0,3)", "0<x<3", 0.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", 1.0),
        ("$5$", "5", 1.0),
        (r"\(5\)", "5", 1.0),
        ("5", "", 0.0),
        ("5", "1" * 301, 0.0),
    ],
)
def test_equality(gold: str, answer: str, verdict: float) -> None:
    assert reward(gold, f"So \\boxed{{{answer}}}.") == verdict


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (r"\boxed{4}", 1.0),
        (r"\boxed{3}, no, \boxed{4}", 1.0),
        (r"\boxed{4}, no, \boxed{3}", 0.0),
        (r"\boxed{2} + \boxed{2}", 0.0),
        (r"\boxed{\boxed{4}}", 1.0),
        (r"\boxed{4} or \boxed{5", 1.0),
        (r"\boxed{4", 0.0),
        (r"\boxed 4", 0.0),
        ("The answer is 4", 0.0),
        ("", 0.0),
        (r"<think>\boxed{3}</think>\boxed{4}", 1.0),
        (r"<think>\boxed{4}</think> I do not know", 0.0),
        (r"<think>hm \boxed{4}", 0.0),
        (r"<think>a</think><think>\boxed{4}", 0.0),
        (r"\boxed{4}</think>", 0.0),
    ],
)
def test_the_answer_is_the_last_visible_box(response: str, verdict: float) -> None:
    assert reward("4", response) == verdict


@pytest.mark.parametrize(
    "text",
    ["7", "-7", "+7", "1,234.5", "1{,}234", ".5", "007", r"\$7", "-$7", "$-7",
     r"7\%", "7%", "x=7", "n = -7", r"\frac{1}{2}", r"-\dfrac{1}{2}", r"1\frac{1}{2}",
     "1/2", "3 1/2", "10^6", "10^{-6}",
     r"1.5 \times 10^{3}", r"7\text{ cm}", r"7\,\mathrm{m}^2",
     r"90^\circ", r"90\,^{\circ}", " 7 ", "$7$", r"\text{12}", r"\textbf{12}", r"\mathbf{12}",
     r"\fbox{12}", r"\text{\$18}", r"\frac12", r"12\text{ million}", r"12\text{ miles per hour}"],
)  # fmt: skip
def test_number_literals(text: str) -> None:
    assert is_number_literal(text)


@pytest.mark.parametrize(
    "text",
    ["", "x", "2+2", r"3 \cdot 4", "2^{10}", r"\sqrt{4}", r"\pm 2", "5!", r"\frac{x}{2}",
     "(7)", r"\sum_{k=1}^4 k", "xy=7", "7=7", "1/2/3", "--7", r"\frac{1}{2}+1",
     r"7\text{ or }8 9", "7 8", r"12\text{ or 13}", r"12\text{ dozen}", r"12\text{ is wrong}"],
)  # fmt: skip
def test_expressions_are_no_number_literals(text: str) -> None:
    assert not is_number_literal(text)


def test_numeric_data_sets_do_not_pay_for_echoing_the_question() -> None:
    gsm8k = {"question": "What is 12 times 3?", "answer": "#### 36"}
    echo = r"\boxed{12 \cdot 3}"
    assert score(gsm8k, echo).reward == 0.0
    assert score(gsm8k, echo).metrics["not_literal"] == 1.0
    assert score(gsm8k, r"\boxed{36}").reward == 1.0
    assert score(gsm8k, echo, literal=False).reward == 1.0
    assert score({"problem": "p", "answer": "36"}, echo).reward == 0.0
    assert reward("36", echo) == 1.0
    assert reward("36", echo, literal=True) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", r"\frac12"),
        (r"\frac{1}{2}", r"\tfrac 12"),
        (r"\frac{4}{3}", r"\frac{4}3"),
        (r"\frac{3}{2}", r"\frac123"),
        (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}2"),
        (r"\frac{\pi}{2}", r"\frac\pi2"),
        (r"\sqrt{12}", r"2\sqrt3"),
        (r"\frac\pi2", r"\frac{\pi}{2}"),
        (r"\sqrt[3]{2}", r"\sqrt[3]2"),
        ("12000000", r"12\text{ million}"),
        ("2<x<3", "(2,3)"),
        ("y=2x+1", "2x+1"),
        ("f(x)=x^2", "x^2"),
        ("18", r"\$18"),
    ],
)
def test_latex_is_read_as_tex_reads_it(gold: str, answer: str) -> None:
    assert reward(gold, f"\\boxed{{{answer}}}") == 1.0


@pytest.mark.parametrize(
    "gold",
    [r"\frac12", r"\frac43", r"\frac 59", r"\dfrac12", r"\sqrt2", r"\frac{\sqrt3}2",
     r"3\pm 2\sqrt2",
     r"12\text{ or }13", r"\text{Tuesday}", r"x+y=5", "2<x<3", "4343_6", r"\varnothing", "17."],
)  # fmt: skip
def test_the_gold_word_for_word_is_right(gold: str) -> None:
    assert reward(gold, f"\\boxed{{{gold}}}") == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("12", r"12\text{ million}"),
        ("12", r"12\text{ or 13}"),
        ("12", r"12\text{ dozen}"),
        ("12", r"12\text{ is not the answer}"),
        ("x+y=5", "5"),
        ("2<x<3", "2,3"),
        ("4343_6", "4343_7"),
        ("4", "5=4"),
        ("1.5", r"\frac{12}3"),
    ],
)
def test_what_math_verify_pays_by_mistake(gold: str, answer: str) -> None:
    assert reward(gold, f"\\boxed{{{answer}}}") == 0.0


def test_a_gold_that_no_answer_can_equal_is_never_trained_on() -> None:
    task = Task("t", {"options": []}, {"answer": "", "kind": "expression"})
    scored = Math().score(task, Result(output=r"\boxed{4}"))
    assert scored.reward is None and scored.metrics["bad_gold"] == 1.0


@pytest.mark.parametrize(
    ("response", "index"),
    [
        (r"\boxed{B}", 1),
        (r"\boxed{b) 38}", 1),
        (r"\boxed{\text{(B)}}", 1),
        (r"\boxed{38}", 1),
        (r"\boxed{37}", None),
        (r"\boxed{F}", None),
        ("Answer: B because it fits", 1),
        ("Answer: B because the answer is clear", 1),
        ("Answer: A\nNo.\n**Final answer: (B)**", 1),
        ("FINAL: B.", 1),
        ('I say {"answer": "B"}', 1),
        ('{"answer": 2}', None),
        ("(b)", 1),
        ("OptionB", 1),
        ("B and more text", None),
        ("A train leaves.", None),
        ("Answer: A train", None),
        ("Answer: A or B", None),
        ("Answer: A/B", None),
        ("Answer: A, and also B", None),
        ("<think>Answer: B</think>", None),
        ("<think>Answer: B", None),
        ("", None),
    ],
)
def test_options_are_named_in_one_way_only(response: str, index: int | None) -> None:
    assert choice_index(response, ["27", "38", "49", "none of these"]) == index


def test_letters_are_scored_by_the_option_rules() -> None:
    row = {"question": "q", "options": ["A)27", "B)38"], "correct": "B"}
    assert score(row, r"\boxed{B) 38}").reward == 1.0
    assert score(row, r"\boxed{38}").reward == 1.0
    assert score(row, r"\boxed{A}").reward == 0.0
    assert score(row, "no idea").metrics["answered"] == 0.0


def test_visible_text_and_boxes() -> None:
    assert visible_text("a</think>b</think>c") == "c"
    assert visible_text("</think>a<think>") is None
    assert last_boxed(r"\boxed{\{1,2\}} \boxed{\left\{3\right.}") == r"\left\{3\right."


def test_cut_off_texts_score_zero_and_whole_ones_count() -> None:
    env = Math()
    task = env.task_from_row({"question": "q", "answer": "#### 4"})
    output = {"answer": None, "text": r"\boxed{4}"}
    cut = Result(output=output, finish_reason="length", truncated=True)
    out_of_turns = Result(output=output, limit="turns")
    out_of_tokens = Result(output=output, truncated=True, limit="tokens")
    assert env.score(task, cut).reward == 0.0 and env.score(task, cut).metrics["truncated"] == 1.0
    assert env.score(task, out_of_turns).reward == 1.0
    assert env.score(task, out_of_tokens).reward == 0.0


FINISH_5 = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "finish", "arguments": '{"answer": "5"}'}}
    ],
}


def test_without_an_output_the_conversation_is_scored() -> None:
    env = Math()
    task = env.task_from_row({"question": "q", "answer": "#### 4"})
    said = {"role": "assistant", "content": r"\boxed{4}"}
    assert env.score(task, Result(messages=[said])).reward == 1.0
    assert env.score(task, Result(messages=[said, FINISH_5])).reward == 0.0
    assert env.score(task, Result()).reward == 0.0


@pytest.mark.parametrize(
    "calls", [5, "x", [5], [{}], [{"function": 5}], [{"function": {"name": []}}]]
)
def test_malformed_tool_calls_in_a_conversation_are_no_calls(calls: Any) -> None:
    message = {"role": "assistant", "content": r"\boxed{4}", "tool_calls": calls}
    env = Math()
    task = env.task_from_row({"question": "q", "answer": "#### 4"})
    assert env.score(task, env.response_from_row(r"\boxed{4}", [message])).reward == 1.0


def test_failed_tool_calls_cost_only_when_asked_for() -> None:
    row = {"question": "q", "answer": "#### 4"}
    for penalty, expected in ((0.0, 1.0), (0.05, 0.9), (0.9, 0.0)):
        env = Math(Math.Config(tool_error_penalty=penalty))
        result = Result(output=r"\boxed{4}", metrics={"tool_errors": 2})
        scored = env.score(env.task_from_row(row), result).reward
        assert scored == pytest.approx(expected)


def cpu_seconds() -> float:
    """CPU time of this process and of those it waited for."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


NUMBERS = st.integers(2, 10**7)
HUGE = st.one_of(
    st.builds(r"{}^{{{}^{{{}}}}}".format, NUMBERS, NUMBERS, NUMBERS),
    st.builds(r"10^{{10^{{{}}}}}".format, NUMBERS),
    st.builds("{}!".format, NUMBERS),
    st.builds("(((({}!)!)!)!)!".format, st.integers(3, 9)),
    st.builds(r"\binom{{10^{{{}}}}}{{5*10^{{{}}}}}".format, st.integers(4, 9), st.integers(3, 8)),
    st.builds(r"\dbinom{{{}}}{{{}}}".format, NUMBERS, NUMBERS),
    st.builds(r"\sum_{{k=1}}^{{{}}} k^k".format, NUMBERS),
    st.builds(r"\prod_{{k=1}}^{{{}}} (k^2+1)".format, NUMBERS),
    st.builds(r"(x+y+z)^{{{}}}".format, NUMBERS),
    st.builds(r"(1+i)^{{{}}}".format, NUMBERS),
    st.builds(r"\sqrt{{2^{{{}}}+1}}".format, NUMBERS),
    st.builds(r"\sin(10^{{{}}})".format, NUMBERS),
    st.builds(r"\gcd({}!, 7)".format, NUMBERS),
    st.builds(r"\Gamma({})".format, NUMBERS),
)
"""Short formulas of numbers with very many digits, or of very many terms."""


@pytest.mark.parametrize("answer", ["9^{9^{9}}", r"\binom{10^6}{5*10^5}", "(" * 140 + "1"])
def test_hostile_answers_are_wrong_in_time(answer: str) -> None:
    assert_wrong_within_a_cpu_second(answer)


@pytest.mark.parametrize(
    ("answer", "huge"),
    [
        ("9^{9^{9}}", True),
        ("9^9^9", True),
        (r"\frac{1}{9^{9^9}}", True),
        (r"{(2^{100})}^{(2^{20})}", True),
        ("((((3!)!)!)!)", True),
        (r"\binom{10^6}{5*10^5}", True),
        ("99,999,999!", True),
        ("((3!)!)!", False),
        ("2^{2^{2^{2^2}}}", False),
        ("x^{x^{x^x}}", False),
        (r"\binom{10^6}{2}", False),
        (r"\binom{2020}{1010} - 2^{2020}", False),
        (r"1000(1+\frac{0.05}{12})^{12 \cdot 30}", False),
        ("9" * 5000, False),
        ("(" * 5000, False),
        ("9^{" * 5000, True),
    ],
)
def test_the_size_of_a_formula_is_estimated(answer: str, huge: bool) -> None:
    assert is_huge(answer) == huge


@pytest.mark.thorough
@settings(max_examples=examples(30), deadline=None)
@example("100000!")
@given(HUGE)
def test_a_short_formula_of_a_huge_number_is_wrong_in_time(answer: str) -> None:
    assert_wrong_within_a_cpu_second(answer)


def assert_wrong_within_a_cpu_second(answer: str) -> None:
    reward("7", r"\boxed{x}")  # loads the library
    before = cpu_seconds()
    assert reward("7", f"\\boxed{{{answer}}}") == 0.0
    assert cpu_seconds() - before < cpu_limit(1)


PLAIN = (
    "1000", "1,000", r"1{,}000", r"\$1000", "+1000.0", ".5", "0.50", "1/2", r"\frac{1}{2}",
    r"-\dfrac{3}{6}", r"\tfrac{-1}{2}", "-0.5", "0.50001", "999999999.5", r"\frac{0}{7}",
)  # fmt: skip


def test_plain_numbers_are_compared_as_math_verify_compares_them() -> None:
    for gold, answer in itertools.product(PLAIN, repeat=2):
        assert plain_number(answer) is not None
        asked = verification._verdict(verification._parsed_gold(gold), answer, lenient=False)
        assert verification.compare(gold, answer) is asked, (gold, answer)


@pytest.mark.parametrize(
    "text",
    [
        "1,00",
        "1e3",
        "x",
        "1/0",
        r"\frac{1}{0}",
        "12345678901",
        "0.1234567",
        "50\\%",
        "(1)",
        "- 1",
        "٣",
    ],
)
def test_other_texts_are_no_plain_numbers(text: str) -> None:
    assert plain_number(text) is None


def test_a_plain_answer_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_in_child", lambda compute: pytest.fail("a process"))
    assert reward(r"\frac{3}{4}", "It is \\boxed{0.75}.", literal=False) == 1.0
    assert reward("1000", "It is \\boxed{1,001}.") == 0.0
