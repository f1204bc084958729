"""The environment `math`: what it takes for a right answer, and that it errs less than math-verify.

Cases are in test_math_scoring.toml, labelled pairs of gold and answer in support/math_pairs.txt.
Both scorers get the answer in a box; math-verify is asked as its users do, `verify(parse(gold),
parse(answer))`, with more time for a busy machine. The table is in the README of the environment.
`make test` tries the pairs of every twentieth gold, `make test-all` of every fourth, `make
test-slow` all.
"""

import itertools
import resource
from collections import Counter
from collections.abc import Iterator
from math import log10
from pathlib import Path
from typing import Any

import math_verify
import pytest
from envserver_environments import math
from envserver_environments.answers import choice_index
from envserver_environments.math import verification
from envserver_environments.math.env import Math
from envserver_environments.math.latex import quantity, readable
from envserver_environments.math.literals import is_number_literal, plain_number
from envserver_environments.math.verification import is_huge
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support import extent
from support.cases import cases_of
from support.cpu import cpu_limit
from support.scripted_run import call

from envserver import Result, Score, Task

CASES = cases_of(__file__)
PAID = CASES["paid"]
FOUR = {"question": "q", "answer": "#### 4"}


def score(row: dict[str, Any], response: str, said: Any = (), **settings: Any) -> Score:
    env = Math(Math.Config(**settings))
    return env.score(env.task_from_row(row), env.response_from_row(response, list(said)))


def reward(gold: str, answer: str, **settings: Any) -> float | None:
    """For the answer in a box."""
    row = {"problem": "p", "solution": "s", "answer": gold}
    return score(row, f"So \\boxed{{{answer}}}.", **settings).reward


def test_what_is_equal_is_paid_and_what_differs_is_not() -> None:
    right = [*PAID["right"], *PAID["tex_reads_it_so"]]
    wrong = [*PAID["wrong"], *PAID["math_verify_pays_it"], ("5", "1" * 301)]
    with verification.compared_together():  # else a process for each
        for pair in right + wrong:
            reward(*pair)
    assert [pair for pair in right if reward(*pair) != 1.0] == []
    assert [pair for pair in wrong if reward(*pair) != 0.0] == []


def test_a_question_about_percents_needs_no_percent_sign_in_its_gold() -> None:
    for question, paid in (("What percent is it?", 1.0), ("How many %?", 1.0), ("How many?", 0.0)):
        row = {"problem": question, "solution": "s", "answer": "7.5"}
        assert score(row, r"\boxed{7.5\%}").reward == paid
        assert score(row, r"\boxed{75\%}").reward == 0.0


def test_a_term_of_one_unknown_is_an_answer_where_the_question_asks_for_it() -> None:
    asked, given = r"If $x+\frac1x=3$, find $x^2+\frac{1}{x^2}$.", r"Solve $x^2+\frac{1}{x^2}=7$."
    for question, paid in ((asked, 1.0), (given, 0.0), ("Find $x$.", 0.0)):
        row = {"problem": question, "solution": "s", "answer": "7"}
        assert score(row, r"\boxed{x^2+\dfrac{1}{x^2}=7}").reward == paid
        assert score(row, r"\boxed{x^2+\frac{1}{x^2}=8}").reward == 0.0


def test_the_answer_is_the_last_visible_box() -> None:
    verdicts = {
        text: score({"problem": "p", "answer": "4"}, text).reward
        for text in CASES["boxes"]["right"] + CASES["boxes"]["wrong"]
    }
    assert [text for text, paid in verdicts.items() if paid == 1.0] == CASES["boxes"]["right"]
    assert set(verdicts.values()) == {0.0, 1.0}


def test_numbers_are_told_from_expressions_and_plain_ones_from_others() -> None:
    assert [text for text in CASES["literals"] if not is_number_literal(text)] == []
    assert [text for text in CASES["expressions"] if is_number_literal(text)] == []
    for name, plain in (("plain", True), ("not_plain", False)):
        values = {text: plain_number(quantity(readable(text))[0]) for text in CASES[name]}
        assert [text for text, value in values.items() if (value is not None) != plain] == []


def test_plain_numbers_are_compared_as_math_verify_compares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gold, answer in itertools.product(CASES["plain"], repeat=2):
        wanted, given = (quantity(readable(text))[0] for text in (gold, answer))
        asked = verification._verdict(verification._parsed_gold(wanted), given, lenient=False)
        assert verification.compare(gold, answer) is asked, (gold, answer)
    # They need no process.
    monkeypatch.setattr(verification, "_in_child", lambda compute: pytest.fail("a process"))
    assert reward(r"\frac{3}{4}", "0.75", literal=False) == 1.0
    assert reward("1000", "1,001") == 0.0


def test_numeric_data_sets_do_not_pay_for_echoing_the_question() -> None:
    gsm8k = {"question": "What is 12 times 3?", "answer": "#### 36"}
    echo = r"\boxed{12 \cdot 3}"
    assert score(gsm8k, echo).reward == 0.0
    assert score(gsm8k, echo).metrics["not_literal"] == 1.0
    assert score(gsm8k, r"\boxed{36}").reward == 1.0
    assert score(gsm8k, echo, literal=False).reward == 1.0
    assert score({"problem": "p", "answer": "36"}, echo).reward == 0.0
    assert reward("36", r"12 \cdot 3") == 1.0
    assert reward("36", r"12 \cdot 3", literal=True) == 0.0


def test_a_gold_that_no_answer_can_equal_is_never_trained_on() -> None:
    task = Task("t", {"options": []}, {"answer": "", "kind": "expression"})
    scored = Math().score(task, Result(output=r"\boxed{4}"))
    assert scored.reward is None and scored.metrics["bad_gold"] == 1.0


def test_options_are_named_in_one_way_only() -> None:
    for name, index in (("second", 1), ("none", None)):
        for response in CASES["options"][name]:
            found = choice_index(response, ["27", "38", "49", "none of these"])
            assert found == index, response


FINISH_5 = call("finish", answer="5")


def test_cut_off_texts_score_zero_and_conversations_and_whole_texts_count() -> None:
    env = Math()
    task = env.task_from_row(FOUR)
    output = {"answer": None, "text": r"\boxed{4}"}
    said = {"role": "assistant", "content": r"\boxed{4}"}
    for result, paid in (
        (Result(output=output, finish_reason="length", truncated=True), 0.0),
        (Result(output=output, truncated=True, limit="tokens"), 0.0),
        (Result(output=output, limit="turns"), 1.0),
        (Result(messages=[said]), 1.0),
        (Result(messages=[said, FINISH_5]), 0.0),
        (Result(), 0.0),
    ):
        scored = env.score(task, result)
        assert scored.reward == paid, result
        assert scored.metrics.get("truncated", 0.0) == float(result.truncated)
    # Failed calls cost only when asked for.
    result = Result(output=r"\boxed{4}", metrics={"tool_errors": 2})
    for penalty, paid in ((0.0, 1.0), (0.05, 0.9), (0.9, 0.0)):
        costly = Math(Math.Config(tool_error_penalty=penalty))
        assert costly.score(task, result).reward == pytest.approx(paid)


NUMBERS = st.integers(2, 10**7)
HUGE = st.one_of(
    st.builds(r"10^{{10^{{{}}}}}".format, NUMBERS),
    st.builds("(((({}!)!)!)!)!".format, st.integers(3, 9)),
    st.builds(r"\binom{{10^{{{}}}}}{{5*10^{{{}}}}}".format, st.integers(4, 9), st.integers(3, 8)),
    *(
        st.builds(formula.replace("{", "{{").replace("}", "}}").replace("N", "{}").format, *numbers)
        for formula in CASES["sizes"]["of_numbers"]
        if (numbers := [NUMBERS] * formula.count("N"))
    ),
)
"""Short formulas of numbers with very many digits, or of very many terms."""


def cpu_seconds() -> float:
    """CPU time of this process and of those it waited for."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def test_the_answers_that_check_tries_for_each_row_cost_little() -> None:
    """About eight for each row; the limit is several times what they take."""
    golds = [r"2\sqrt{3}", "x^2-4x", *map(str, range(18))]
    tasks = [
        Task(f"{n}", {"question": "How many?"}, {"answer": golds[n % 20], "kind": "expression"})
        for n in range(500)
    ]
    reward("7", "(")  # loads the library
    before = cpu_seconds()
    tried = [(task, known) for task, known in Math().row_results(tasks)]
    rewards = [(Math().score(task, known.result).reward, known) for task, known in tried]
    assert cpu_seconds() - before < cpu_limit(5)
    assert len(tried) > 7 * len(tasks)
    assert all(known.least <= (paid or 0.0) <= known.most for paid, known in rewards)


def assert_wrong_within_a_cpu_second(answer: str) -> None:
    reward("7", "(")  # loads the library
    before = cpu_seconds()
    assert reward("7", answer) == 0.0
    assert cpu_seconds() - before < cpu_limit(1)


@pytest.mark.parametrize("answer", ["9^{9^{9}}", r"\binom{10^6}{5*10^5}", "(" * 140 + "1"])
def test_hostile_answers_are_wrong_in_time(answer: str) -> None:
    assert_wrong_within_a_cpu_second(answer)


@pytest.mark.thorough
@settings(max_examples=extent.examples(30), deadline=None)
@example("100000!")
@example(" " * 298 + "x")
@example("x, \\ " * 60 + "k")
@given(HUGE)
def test_a_short_formula_of_a_huge_number_is_wrong_in_time(answer: str) -> None:
    assert_wrong_within_a_cpu_second(answer)


PAIRS = Path(extent.__file__).with_name("math_pairs.txt").read_text(encoding="utf-8").splitlines()
README = Path(str(math.__file__)).with_name("README.md")
TIMEOUT_SECONDS = 60
HEAD = (
    "| kind | pairs | right, refused: ours | math-verify | wrong, paid: ours | math-verify |",
    "|---|---|---|---|---|---|",
)


def test_the_size_of_a_formula_is_estimated() -> None:
    huge, small = ([*CASES["sizes"][name]] for name in ("huge", "small"))
    huge.append("9^{" * 5000)
    small += ["9" * 5000, "(" * 5000]
    small += [line[2:] for line in PAIRS if line[:2] in ("= ", "+ ", "- ")]
    assert [text for text in huge if not is_huge(text)] == []
    assert [text for text in small if is_huge(text)] == []


SIZES = st.recursive(
    st.integers(1, 9).map(lambda n: (str(n), log10(n))),
    lambda part: st.one_of(
        st.tuples(part, part).map(lambda p: (f"({p[0][0]} \\cdot {p[1][0]})", p[0][1] + p[1][1])),
        st.tuples(part, st.integers(1, 9)).map(
            lambda p: (f"{{({p[0][0]})}}^{{{p[1]}}}", p[0][1] * p[1])
        ),
    ),
)
"""Products and powers, and their decimal logarithms."""


@settings(max_examples=extent.examples(100), deadline=None)
@given(SIZES, st.integers(1, 10**7))
def test_what_is_small_is_never_too_large_and_what_is_huge_always_is(
    formula: tuple[str, float], exponent: int
) -> None:
    text, size = formula
    digits = size * exponent
    assume(abs(digits - 1_000_000) > 1)
    assert is_huge(f"{{{text}}}^{{{exponent}}}") == (digits > 1_000_000)


def pairs(every: int) -> Iterator[tuple[str, str, str, bool]]:
    """Kind, gold, answer and whether it is right, of each `every`-th gold."""
    kind = gold = ""
    golds = 0
    for line in PAIRS:
        mark, _, value = line.partition(" ")
        match mark:
            case "##":
                kind = value
            case "=":
                gold, golds = value, golds + 1
            case "+" | "-" if golds % every == 1 % every:
                yield kind, gold, value, mark == "+"


def math_verify_pays(gold: str, answer: str) -> bool:
    boxed = (f"\\boxed{{{text}}}" for text in (gold, answer))
    parsed = (math_verify.parse(text, parsing_timeout=TIMEOUT_SECONDS) for text in boxed)
    return bool(math_verify.verify(*parsed, timeout_seconds=TIMEOUT_SECONDS))


@pytest.mark.parametrize(
    "every",
    [20, pytest.param(4, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.slow)],
)
def test_fewer_wrong_verdicts_than_math_verify(
    every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: dict[str, Counter[str]] = {}
    for kind, gold, answer, is_right in pairs(every):
        counted = counts.setdefault(kind, Counter())
        counted["pairs"] += 1
        ours = reward(gold, answer, literal=kind.startswith("number")) == 1.0
        for name, paid in (("ours", ours), ("math-verify", math_verify_pays(gold, answer))):
            counted[f"{name} {'refused' if is_right else 'paid'}"] += paid != is_right
    whole = sum(counts.values(), Counter())
    names = ("pairs", "ours refused", "math-verify refused", "ours paid", "math-verify paid")
    table = [
        *HEAD,
        *(
            f"| {kind} | {' | '.join(str(counted[name]) for name in names)} |"
            for kind, counted in [*counts.items(), ("all", whole)]
        ),
    ]
    with capsys.disabled():
        print("", *table, sep="\n")
    assert whole["ours refused"] < whole["math-verify refused"]
    assert whole["ours paid"] < whole["math-verify paid"]
    if every == 1:
        assert "\n".join(table) in README.read_text(encoding="utf-8")


def test_a_gold_word_for_word_is_right() -> None:
    assert [gold for gold in PAID["word_for_word"] if reward(gold, gold) != 1.0] == []
