"""Scores texts by reward functions of the verifiers package: in its own way, and on rows here.

    PEER_PYTHON verifiers_rubrics.py OUR_SITE_PACKAGES

prints one JSON object: for each function a list of pairs (there, here). What envserver needs and
the peer lacks is imported from OUR_SITE_PACKAGES, after the peer's own packages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import verifiers as vf

ROOT = Path(__file__).parents[2]
sys.path += [sys.argv[1], *(str(ROOT / name) for name in (".", "clients", "tools"))]

from envserver import Result, from_rows  # noqa: E402

ROW = {"question": "What is a half?", "answer": r"\frac{1}{2}"}
TEXTS = [
    r"It is \boxed{0.5}",
    r"<think>easy</think> \boxed{\frac12}",
    "<think>\nx\n</think>\n<answer>\n0.5\n</answer>",
    r"\boxed{2} or \boxed{1/2}",
    "none",
    "",
]


async def there(rubric: Any, text: str) -> float:
    state = vf.State(
        prompt=[{"role": "user", "content": ROW["question"]}],
        completion=[{"role": "assistant", "content": text}],
        answer=ROW["answer"],
        task="",
        info={},
        input={},
        trajectory=[],
    )
    await rubric.score_rollout(state)
    return float(state["reward"])


def here(function: Any, text: str) -> Any:
    made = from_rows([ROW], prompt="question", reward=function)()
    (task,) = made.tasks("train")
    score: Any = made.score(task, Result(output=text))

    async def awaited() -> Any:
        return await score

    return (asyncio.run(awaited()) if inspect.isawaitable(score) else score).reward


def mentions_half(prompt: Any, completion: Any, answer: str, state: Any, **objects: Any) -> float:
    """As its documentation writes them: any of the names, in any order."""
    asked, said = prompt[-1]["content"], completion[-1]["content"]
    return float("half" in asked and "1/2" in said and state["answer"] == answer) / 2


def main() -> None:
    math = vf.MathRubric()
    found = {"MathRubric": [(there(math, text), here(math.correct_answer, text)) for text in TEXTS]}
    functions = {
        "XMLParser": vf.XMLParser(["think", "answer"]).get_format_reward_func(),
        "ThinkParser": vf.ThinkParser().get_format_reward_func(),
        "Parser": vf.Parser().get_format_reward_func(),
        "own": mentions_half,
    }
    for name, function in functions.items():
        rubric = vf.Rubric(funcs=[function])
        found[name] = [(there(rubric, text), here(function, text)) for text in TEXTS]
    told = {
        name: [(asyncio.run(theirs), ours) for theirs, ours in pairs]
        for name, pairs in found.items()
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
