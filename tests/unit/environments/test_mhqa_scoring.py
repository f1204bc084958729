"""The environment `mhqa`: what counts as the answer, and what it is worth."""

from typing import Any

import pytest
from envserver_environments.mhqa.env import Mhqa
from envserver_environments.mhqa.metrics import (
    Measure,
    answer_measure,
    evidence_measure,
    fact_measure,
    joint_measure,
    musique_answer_measure,
    normalize_answer,
    support_measure,
    wiki2_fact_measure,
)
from envserver_environments.mhqa.scoring import extract_answer
from hypothesis import given
from hypothesis import strategies as st
from support.cases import cases_of
from support.scripted_run import call

from envserver import Result, Score

CASES = cases_of(__file__, "mhqa_cases.json")


def scored(response: str, answer: str | list[str], **row: Any) -> Score:
    env = Mhqa()
    task = env.task_from_row({"question": "?", "answer": answer, **row})
    return env.score(task, env.response_from_row(response, []))


@pytest.mark.parametrize(("said", "golds", "em", "f1"), CASES["compared"])
def test_answers_are_compared_as_hotpot_does(
    said: str, golds: list[str], em: float, f1: float
) -> None:
    measure = answer_measure(said, golds)
    assert (measure.em, measure.f1) == (em, pytest.approx(f1))


def test_each_measure_of_an_answer_is_the_best_over_the_aliases() -> None:
    measure = answer_measure("Great Osk", ["Osk", "Great Osk Kingdom Union"])
    assert measure == Measure(0, pytest.approx(2 / 3), 1, 1)


def test_musique_knows_no_special_words_and_nothing_equals_nothing() -> None:
    assert musique_answer_measure("yes, it is", ["yes"]).f1 == pytest.approx(0.5)
    assert musique_answer_measure("the", [""]) == Measure(1, 1, 1, 1)
    assert musique_answer_measure("the", ["x"]) == Measure()


def test_supporting_facts() -> None:
    gold = [("A", 0), ("B", 1)]
    assert fact_measure([("A", 0), ("A", 0)], gold) == Measure(0, pytest.approx(2 / 3), 1, 0.5)
    assert fact_measure([], []) == Measure(1, 0, 0, 0)
    assert fact_measure([("a", 0)], [("A", 0)]).f1 == 0
    assert wiki2_fact_measure([("a", 0)], [("A", 0)]).f1 == 1
    assert support_measure(["1", 2, 3], [1, 2]) == Measure(0, pytest.approx(0.8), 2 / 3, 1)
    assert support_measure([], []).f1 == 1


def test_joint_is_the_product() -> None:
    joint = joint_measure(Measure(1, 1, 1, 1), Measure(0, 0.8, 1, 2 / 3), Measure(1, 1, 0.5, 1))
    assert joint == Measure(0, pytest.approx(4 / 7), 0.5, 2 / 3)


def test_evidence_may_be_said_in_any_of_its_forms() -> None:
    gold = [[("Osk", "ruler", "Ida"), ("Osk", "ruler", "Ida I.")], [("Ida", "born in", "Vell")]]
    assert evidence_measure([["osk", "Ruler", "Ida I"], ["Ida", "born in", "Vell"]], gold).em == 1
    assert evidence_measure([["Ida", "born in", "Vell"]], gold) == Measure(
        0, pytest.approx(2 / 3), 1, 0.5
    )
    assert evidence_measure([], gold) == Measure()


@pytest.mark.parametrize(("text", "answer"), CASES["found"])
def test_the_answer_is_found_in_a_text(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("said", "gold", "reward"),
    [
        ("Ida Vell", "Ida Vell", 1.0),
        ("Ida", "Ida Vell", 0.2 * 2 / 3),
        ("Ida Vell or Osk", "Ida Vell", 0.0),
        ("Ida Vell; Osk", "Ida Vell", 0.0),
        ("Ida Vell\nOsk", "Ida Vell", 0.0),
        ("life or death", "Life or Death", 1.0),
        ("the", "a", 0.0),
        ("w " * 11 + "Vell", "Vell", 0.2 * 2 / 13),
        ("w " * 12 + "Vell", "Vell", 0.2 * 2 / 14),
        ("w " * 13 + "Vell", "w " * 13 + "Vell", 1.0),
        ("x" * 65, "x" * 65, 1.0),
    ],
)
def test_what_an_answer_is_worth(said: str, gold: str, reward: float) -> None:
    score = scored(f"<answer>{said}</answer>", gold)
    assert score.reward == pytest.approx(reward)
    measure = answer_measure(said, [gold])
    assert score.components == {"em": measure.em, "f1": measure.f1}


@given(st.text(max_size=120), st.text(max_size=40).filter(str.strip))
def test_only_an_exact_answer_is_worth_more_than_a_fifth(said: str, gold: str) -> None:
    env = Mhqa()
    task = env.task_from_row({"question": "?", "golds": [gold]})
    score = env.score(task, Result(output={"answer": said, "text": ""}))
    exact = normalize_answer(said) == normalize_answer(gold)
    assert score.reward is not None and 0 <= score.reward <= 1
    assert score.components["em"] == exact
    assert exact or score.reward <= 0.2 + 1e-9
    assert normalize_answer(said) or score.reward == 0


def test_finish_wins_over_the_text_and_brings_what_it_rests_on() -> None:
    env = Mhqa(Mhqa.Config(support_weight=0.5))
    row = {"question": "?", "answer": "Vell", "supporting_facts": [["Osk", 1]]}
    task = env.task_from_row({**row, "evidences": [["Osk", "ruler", "Vell"]]})
    no, facts = "<answer>no</answer>", [["osk", 1], ["Osk", 7]]
    said = call("finish", no, answer="Vell", supporting_facts=facts)
    score = env.score(task, env.response_from_row(no, [said]))
    assert score.components["em"] == 1
    assert score.metrics["support_f1"] == pytest.approx(2 / 3)
    assert score.reward == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert score.metrics["joint_em"] == 0
