"""What a GAIA reward hangs on: what the server counted and recorded, and what agents are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from envserver_environments.gaia.agents.prompts import (
    FAILED,
    GO_ON,
    NO_CALL,
    NO_CODE,
    OBSERVED,
    PLAN,
    question,
    system_prompt,
)
from envserver_environments.gaia.env import Gaia
from envserver_tools.documents import document_tools
from envserver_tools.web import LEAK, LEAK_SEEN, remote_tools

from envserver import Result
from envserver.tokens import DEFAULT


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
    seen = env.score(task, Result(output=output, messages=told(), turns=1, flags=["web_leak_seen"]))
    assert (seen.reward, seen.metrics["contaminated"]) == (reward, 1.0)
    kept = env.score(
        task, Result(output=output, messages=told(), turns=1, flags=["web_leak_dropped"])
    )
    assert (kept.reward, kept.metrics["contaminated"]) == (1.0, 0.0)
    task.hidden["task_id"] = "0383a3ee-47a7-41a4-b493-519bdefe0488"
    page = told(f"{OBSERVED}0383A3EE-47a7-41a4-b493-519bdefe0488,2,egalitarian")
    assert env.score(task, Result(output=output, turns=2, messages=page)).reward == reward


def test_what_the_web_flags_is_for_the_environment_to_judge() -> None:
    assert DEFAULT.worst([LEAK, LEAK_SEEN]) == "train"


@pytest.mark.parametrize("kind", ["code", "tools", "plain"])
def test_what_an_agent_is_told_is_true(kind: str, tmp_path: Path) -> None:
    tools = [*document_tools(tmp_path).values(), *remote_tools(None).values()]  # type: ignore[arg-type]
    alone = system_prompt(kind, tools[:2])
    assert "there is no internet" in alone and "web_search" not in alone
    online = system_prompt(kind, tools, ("statistics",))
    assert "by web_search, visit_page, find_in_page alone" in online
    assert "no internet" not in online and "Imported already: statistics." in online
    assert ("read_document(path, member=None" in online) is (kind == "code")
    assert "Files:" not in question({"question": "How many?", "files": []})
