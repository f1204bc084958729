"""The score of one rollout: how alike its plan is to the right one, and what running it gave.

A plan that is not valid scores 0: there is nothing for form alone. Otherwise the reward is the
likeness of the plans; where plans are run, three tenths of that and seven tenths of the outcome. A
plan that had to be repaired gets four fifths of it, for each repair. Where any plan will do (a
teacher writes plans for queries), a valid one gets 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envserver_environments.code.scoring import References
from envserver_environments.code.scoring import ScoringRules as CodeRules
from envserver_environments.code.scoring import score_rollout as score_program
from envserver_environments.math.scoring import ScoringRules as MathRules
from envserver_environments.math.scoring import score_rollout as score_number
from envserver_environments.mhqa.metrics import normalize_answer

from envserver import ConfigError, Result, Sandboxes, Score, Task

from .agent import READERS
from .course_metrics import course_metrics
from .matching import NOTHING, Likeness, likeness
from .plans import Plan, PlanError, plan_of

PLAN_SHARE = 0.3
REPAIR_FACTOR = 0.8
"""Factor of the reward for each repair of the plan."""


@dataclass(frozen=True)
class ModelPlan:
    """A rollout's final output; see `agent.solve`."""

    plan: str = ""
    repaired: int = 0
    cut_off: bool = False
    executed: bool = False
    answer: str | None = None
    program: str | None = None


async def score_rollout(
    task: Task, result: Result, *, execute: bool, sandboxes: Sandboxes | None
) -> Score:
    """The score of `result`.

    Args:
        execute: plans are run, where the task has an answer.
        sandboxes: for functions that are the answer.
    """
    model_plan = read_plan(result)
    # If the plan was executed, only text after it was cut off.
    cut_off = model_plan.cut_off or (result.truncated and not model_plan.executed)
    metrics = {"truncated": float(result.truncated), "repaired": float(model_plan.repaired)}
    target = task.hidden.get("target")
    if target is not None and not cut_off:
        metrics |= course_metrics(model_plan.plan, target)
    try:
        plan = None if cut_off else READERS[task.public["profile"]](model_plan.plan)
    except PlanError as error:
        metrics[f"invalid_{error.kind}"] = 1.0
        plan = None
    if plan is None:
        return Score(reward=0.0, components=_components(NOTHING, valid=0.0), metrics=metrics)
    metrics["steps"] = float(len(plan.steps))
    alike = _alike(plan, task)
    components = _components(alike, valid=1.0)
    if execute and task.hidden["answer"] is not None:
        components["outcome"] = await outcome(task, model_plan, sandboxes)
    elif task.hidden.get("any_plan"):
        components["plan"] = 1.0
    reward = _reward(components)
    if reward is not None:
        reward *= REPAIR_FACTOR**model_plan.repaired
    return Score(reward=reward, components=components, metrics=metrics)


def read_plan(result: Result) -> ModelPlan:
    """Reads the plan from the rollout's output or, if there is none, from the conversation."""
    output = result.output
    if isinstance(output, dict):
        repaired = output.get("repaired")
        return ModelPlan(
            plan=_text(output.get("plan")) or "",
            # A number of repairs; rows of before have a boolean.
            repaired=max(0, int(repaired)) if isinstance(repaired, int) else 0,
            cut_off=output.get("cut_off") is True,
            executed=output.get("executed") is True,
            answer=_text(output.get("answer")),
            program=_text(output.get("program")),
        )
    if isinstance(output, str):
        return ModelPlan(plan=output)
    return last_plan(result.messages)


def last_plan(messages: list[dict[str, Any]]) -> ModelPlan:
    """Reads the plan from the last assistant message; those before it were repaired."""
    texts = [_text(m.get("content")) or "" for m in messages if m.get("role") == "assistant"]
    return ModelPlan(plan=texts[-1], repaired=len(texts) - 1) if texts else ModelPlan()


async def outcome(task: Task, model_plan: ModelPlan, sandboxes: Sandboxes | None) -> float:
    """1.0 where the run of the plan gave the task's answer, else 0.0."""
    answer = task.hidden["answer"]
    match answer["kind"]:
        case "function":
            return await _passes(task, model_plan.program, sandboxes)
        case "number":
            return max(_is_number(gold, model_plan.answer) for gold in answer["answers"])
    given = normalize_answer(model_plan.answer or "")
    return float(bool(given) and given in map(normalize_answer, answer["answers"]))


def _alike(plan: Plan, task: Task) -> Likeness | None:
    gold = task.hidden["plan"]
    return None if gold is None else likeness(plan, plan_of(gold))


def _components(alike: Likeness | None, *, valid: float) -> dict[str, float]:
    if alike is None:
        return {"valid": valid}
    return {
        "valid": valid,
        "node_f1": alike.node_f1,
        "edge_f1": alike.edge_f1,
        "arguments": alike.arguments,
        "plan": alike.score,
    }


def _reward(components: dict[str, float]) -> float | None:
    """Returns the reward of a valid plan, or None if it cannot be compared."""
    plan, done = components.get("plan"), components.get("outcome")
    if plan is None or done is None:
        return done if plan is None else plan
    return PLAN_SHARE * plan + (1 - PLAN_SHARE) * done


def _is_number(gold: str, answer: str | None) -> float:
    """Judges by the rules of the environment `math`."""
    public = {"question": "", "options": []}
    task = Task("number", public, {"answer": gold, "kind": "number"})
    result = Result(output={"answer": answer or "", "text": ""})
    return float(score_number(task, result, MathRules()).reward or 0.0)


async def _passes(task: Task, program: str | None, sandboxes: Sandboxes | None) -> float:
    """Judges by the rules of the environment `code`."""
    if program is None:
        return 0.0
    if sandboxes is None:
        raise ConfigError("Programs are scored in a sandbox, but none is available.")
    answer = task.hidden["answer"]
    public = {"entry_point": answer["entry_point"], "preamble": "", "tests": []}
    hidden = {"tests": answer["tests"], "code": answer["code"]}
    result = Result(output={"code": program, "text": ""})
    judged = Task(task.id, public, hidden)
    score = await score_program(judged, result, CodeRules(), sandboxes, _REFERENCES)
    return float(score.reward or 0.0)


_REFERENCES = References()
"""Results of reference functions; each is computed once per process."""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
