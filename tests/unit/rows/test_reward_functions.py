"""Reward functions in the signatures of TRL and verifiers, and plain ones, are called as there."""

import asyncio
from typing import Any

import pytest

from envserver import Result, Score, ScorerError, from_rows

ROW = {"prompt": "What is 2 + 3?", "answer": "5", "level": 2}
TALK = {**ROW, "prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
SAID = [{"role": "assistant", "content": "5"}]


def score(reward: Any, row: dict[str, Any] = ROW, said: str = "5", **settings: Any) -> Score:
    made = from_rows([row], reward=reward, **settings)()
    (task,) = made.tasks("train")
    value = made.score(task, Result(output=said))
    if isinstance(value, Score):
        return value

    async def awaited() -> Score:
        return await value

    return asyncio.run(awaited())


def test_functions_of_trl_get_lists_of_one() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        seen.update(columns, prompts=prompts, completions=completions)
        columns["log_metric"]("seen", 1.0)
        return [0.5]

    given = score(reward)
    assert given.reward == 0.5 and given.metrics == {"seen": 1.0}
    assert seen["prompts"] == ["What is 2 + 3?"] and seen["completions"] == ["5"]
    assert seen["answer"] == ["5"] and seen["level"] == [2]


def test_an_annotation_says_whether_completions_are_texts() -> None:
    def messages(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [float(one[0]["content"]) / 10 for one in completions]

    def texts(completions: list[str], **_: Any) -> list[float]:
        return [float(one) / 10 for one in completions]

    for row in (ROW, TALK):
        assert score(messages, row).reward == score(texts, row).reward == 0.5


def test_functions_of_verifiers_and_plain_ones_get_what_they_name() -> None:
    def verifiers(completion: Any, answer: str, state: dict[str, Any], level: int) -> float:
        assert completion == SAID and state["answer"] == answer and level == 2
        assert not state["is_truncated"] and state["completion"] == SAID
        return 1.0

    def parsed(parser: Any, completion: Any, answer: str) -> float:
        return float(parser.parse_answer(completion) == answer)

    async def plain(answer: str, output: str) -> bool:
        return answer == output

    class Rubric:
        """As `verifiers.MathRubric`: its functions are called with its parser."""

        class parser:
            @staticmethod
            def parse_answer(completion: Any) -> str:
                return f"of the rubric: {completion[-1]['content']}"

        def of_rubric(self, parser: Any, completion: Any, **_: Any) -> float:
            return float(parser.parse_answer(completion) == "of the rubric: 5")

    components = score([verifiers, plain, parsed, Rubric().of_rubric]).components
    assert components == {"verifiers": 1.0, "plain": 1.0, "parsed": 1.0, "of_rubric": 1.0}
    assert score({verifiers: 1.0, plain: -0.5}).reward == 0.5
    made = from_rows([ROW], reward={verifiers: 1.0, plain: -0.5})()
    assert made.reward_range == (-0.5, 1.0)


def test_none_leaves_a_function_out_as_in_trl() -> None:
    def none(completions: Any, **_: Any) -> list[None]:
        return [None]

    def half(answer: str, output: str) -> float:
        return 0.5

    assert score([(none, 2.0), (half, 1.0)]).reward == 0.5
    assert score(none).reward is None  # not scorable: dropped, never a reward of 0


def test_what_a_function_may_not_do_is_said() -> None:
    def asks(solution: str, output: str) -> float:
        return 1.0

    def words(output: str) -> str:
        return "1.0"

    def two(completions: Any) -> list[float]:
        return [1.0, 1.0]

    def tokens(completion_ids: Any) -> list[float]:
        return [float(len(completion_ids[0]))]

    for function, message in (
        (asks, "'asks' asks for solution; there are answer, "),
        (words, "returned '1.0', not a number"),
        (two, "not a list with one reward"),
        (tokens, "asks for completion_ids"),
    ):
        with pytest.raises(ScorerError, match=message):
            score(function)
    assert score(asks, columns={"solution": "answer"}).reward == 1.0
