"""GAIA's answers and rewards: the official rules, which part of a text is the answer, what is paid.

What the server counted and recorded counts. Cases are in test_gaia_scoring.toml.
"""

import dataclasses
from typing import Any

import pytest
from envserver_environments.gaia.agents.prompts import (
    FAILED,
    GO_ON,
    NO_CALL,
    NO_CODE,
    OBSERVED,
    PLAN,
)
from envserver_environments.gaia.env import Gaia
from envserver_environments.gaia.scoring import (
    Facts,
    Weights,
    extract_answer,
    fold,
    items,
    question_scorer,
)
from envserver_tools.web import LEAK, LEAK_SEEN
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples

from envserver import Result
from envserver.tokens.flags import DEFAULT

CASES = cases_of(__file__)
OTHER = {
    "right": [(17, "17"), (17.0, "17"), (True, "true"), (["a", "b"], "a, b"), ((1, 2), "1, 2")],
    "wrong": [(None, "none"), ({"a"}, "a"), ({"a": 1}, "a"), ([None], "none"), (10**5000, "inf")],
}
"""Answers that are no texts; the last one Python does not write out."""


@pytest.mark.parametrize("kind", ["numbers", "lists", "texts", "others"])
def test_the_official_rules_hold(kind: str) -> None:
    verdicts = CASES.get(kind, OTHER)
    assert [pair for pair in verdicts["right"] if question_scorer(*pair) is not True] == []
    assert [pair for pair in verdicts["wrong"] if question_scorer(*pair) is not False] == []


def test_the_answer_is_what_follows_the_last_marker() -> None:
    for said, answer in [*CASES["said"]["extracted"], (["red", 2], "red, 2"), (0, "0")]:
        assert extract_answer(said) == answer, said
    for nothing in ("FINAL ANSWER: ", " ", None, {"answer": "42"}, "x" * 10_001, 10**5000):
        assert extract_answer(nothing) is None


def test_the_score_has_our_verdict_and_the_leaderboards() -> None:
    env = Gaia()
    CASES["taken"]["by_nobody"].append((None, "None"))
    for name, verdicts in {"by_both": (1, 1), "by_us": (1, 0), "by_nobody": (0, 0)}.items():
        for submitted, truth in CASES["taken"][name]:
            task = env.task_from_row({"Question": "q", "Final answer": truth})
            score = env.score(task, Result(output={"answer": submitted}))
            found = (score.components["correct"], score.metrics["leaderboard_correct"])
            assert found == verdicts, submitted


counts = st.integers(0, 10**6)
limits = st.integers(1, 10**5)
weights = st.builds(
    Weights,
    steps=st.floats(0, 0.1), tokens=st.floats(0, 0.1), format=st.floats(0, 0.1),
    errors=st.floats(0, 0.1), ungrounded=st.floats(0, 0.1), free_share=st.floats(0, 0.9),
    free_errors=st.integers(0, 5),
)  # fmt: skip
facts = st.builds(
    Facts,
    correct=st.booleans(), turns=counts, turn_limit=limits, tokens=counts, token_limit=limits,
    steps=counts, malformed=counts, failed=counts, grounded=st.booleans(),
)  # fmt: skip


def reward(fact: Facts, weight: Weights) -> float:
    return fold(items(fact, weight), weight)


@settings(max_examples=examples(200))
@given(
    facts,
    facts,
    weights,
    counts,
    st.sampled_from(["turns", "tokens", "malformed", "failed"]),
    st.sampled_from(["steps", "tokens", "format", "errors", "ungrounded"]),
)
def test_right_beats_wrong_and_more_of_anything_never_pays(
    one: Facts, other: Facts, weight: Weights, more: int, counted: str, item: str
) -> None:
    right, wrong = (dataclasses.replace(one, correct=correct) for correct in (True, False))
    least = reward(right, weight)
    most = reward(dataclasses.replace(other, correct=False), weight)
    assert least >= 0.5 - 1e-9 and -0.1 <= most <= 0.0 < least <= 1.0
    assert reward(right, Weights()) >= 0.8 - 1e-9
    # A wrong answer is paid neither for haste nor for patience.
    changed = dataclasses.replace(
        wrong, turns=other.turns, tokens=other.tokens, grounded=other.grounded
    )
    assert reward(wrong, weight) == reward(changed, weight)
    worse = dataclasses.replace(one, **{counted: getattr(one, counted) + more})
    assert reward(worse, weight) <= reward(one, weight)
    # A weight of nothing removes its item.
    without = weight.model_copy(update={item: 0.0})
    found = items(one, without)
    assert fold(found, without) == fold(dataclasses.replace(found, **{item: 0.0}), without)


def told(*replies: str) -> list[dict[str, Any]]:
    """A conversation whose model was told `replies`, and then answered."""
    said = {"role": "assistant", "content": "..."}
    asked = [{"role": "system", "content": "Error: "}, {"role": "user", "content": "Error: ?"}]
    replied = [part for reply in replies for part in (said, {"role": "user", "content": reply})]
    return [*asked, *replied, said]


def test_the_reward_is_of_what_the_proxy_counted_and_recorded() -> None:
    env = Gaia(Gaia.Config(max_steps=40, max_completion_tokens=1000))
    task = next(env.tasks("train"))
    gold = task.hidden["answer"]

    def score(answer: Any, *replies: str, turns: int = 0, tokens: int = 1, **of: Any) -> Any:
        output = {"answer": answer, "state": "answered", "steps": of.pop("steps", [])}
        messages = told(*replies)
        turns = turns or len(replies) + 1
        facts = {"messages": messages, "turns": turns, "completion_tokens": tokens, **of}
        return env.score(task, Result(output=output, **facts))

    fine, failed, tool = f"{OBSERVED}Error: 1", f"{FAILED}Error: 1", "Error: no such file."
    assert score(gold, fine, fine, tokens=250).reward == 1.0
    assert score(gold, *[fine] * 39, tokens=1000).reward == pytest.approx(0.9)
    assert score(gold, NO_CODE, fine, fine).reward == pytest.approx(1 - 0.05 / 4)
    assert score(gold, failed, tool).reward == 1.0
    assert score(gold, failed, tool, failed).reward == pytest.approx(1 - 0.05 / 4)
    plan = f"{fine}\n\n{PLAN}"  # what is said to a plan is not a step
    assert score(gold, NO_CALL, plan, GO_ON).components["format"] == pytest.approx(1 / 3)
    wrong = score("7x", NO_CODE)
    assert wrong.reward == 0.0 and wrong.metrics["folded"] == pytest.approx(-0.025)
    assert score(None).reward == 0.0
    forged = [{"error": None, "observation": ""}] * 4
    honest = [{"error": {"kind": "parsing"}, "observation": gold}] * 4
    bad = score(gold, NO_CODE, failed, failed, failed, steps=forged)
    assert (bad.components["format"], bad.components["errors"]) == pytest.approx((1 / 5, 1 / 5))
    assert score(gold, fine, steps=honest).reward == 1.0
    hidden = score(gold, turns=3)  # two of its calls are missing in what it sent last
    assert (hidden.components["format"], hidden.metrics["agent_steps"]) == (pytest.approx(2 / 3), 3)
    env = Gaia(Gaia.Config(unfinished="drop"))
    assert score(None).reward is None and score("7x").reward == 0.0


@pytest.mark.parametrize(("policy", "reward"), [("drop", None), ("zero", 0.0), ("score", 1.0)])
def test_what_was_seen_of_the_task_on_the_web_decides_by_policy(
    policy: Any, reward: float | None
) -> None:
    env = Gaia(Gaia.Config(contaminated=policy))
    task = next(env.tasks("train"))
    output = {"answer": task.hidden["answer"]}
    for flag, found in (("web_leak_seen", (reward, 1.0)), ("web_leak_dropped", (1.0, 0.0))):
        seen = env.score(task, Result(output=output, messages=told(), turns=1, flags=[flag]))
        assert (seen.reward, seen.metrics["contaminated"]) == found
    # The flags are for the environment to judge.
    assert DEFAULT.worst([LEAK, LEAK_SEEN]) == "train"
    task.hidden["task_id"] = "0383a3ee-47a7-41a4-b493-519bdefe0488"
    page = told(f"{OBSERVED}0383A3EE-47a7-41a4-b493-519bdefe0488,2,egalitarian")
    assert env.score(task, Result(output=output, turns=2, messages=page)).reward == reward
