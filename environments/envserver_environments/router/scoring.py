"""The score of one rollout. A plan that is not valid scores 0; another the likeness to the right
plan, or where plans are run three tenths of that and seven of the outcome, times 0.8 for each
repair. Where any plan will do (a teacher writes plans), a valid one gets 1."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from envserver_environments.answers import text_in
from envserver_environments.code.scoring import References
from envserver_environments.code.scoring import ScoringRules as CodeRules
from envserver_environments.code.scoring import score_rollout as score_program
from envserver_environments.math.scoring import ScoringRules as MathRules
from envserver_environments.math.scoring import score_rollout as score_number
from envserver_environments.mhqa.metrics import normalize_answer
from envserver_tools.calculator import calculate

from envserver import ConfigError, Result, Sandboxes, Score, Task

from .agent import READERS, ModelPlan
from .course import TOOLS, Plan, PlanError, Step, course_metrics, plan_of

# The likeness of two plans is the F1 of their steps, edges and arguments, under the best map.
# A map pairs steps of one plan with steps of the other, each at most once, and only steps of the
# same agent. A pair counts 1 if the tool is the same, too, else 1/2. The best map has the largest
# sum; among those, the most edges that it maps to edges; among those, the arguments that are most
# alike: two calculations by their results, all else by the F1 of numbers and words, where 0.5 is
# full, as a request can be worded in many ways, and 0.2 is nothing.

NODE_SHARE = 0.6
FORM_SHARE = 0.25
"""Share paid for a plan of the right form whose arguments do not match the query at all."""
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]{3,}")


@dataclass(frozen=True)
class Likeness:
    """All in [0, 1]; all but a quarter of `score` depends on the arguments."""

    node_f1: float
    edge_f1: float
    arguments: float

    @property
    def score(self) -> float:
        form = NODE_SHARE * self.node_f1 + (1 - NODE_SHARE) * self.edge_f1
        return form * (FORM_SHARE + (1 - FORM_SHARE) * self.arguments)


NOTHING = Likeness(0.0, 0.0, 0.0)


def likeness(plan: Plan, gold: Plan) -> Likeness:
    """Returns the similarity of `plan` and `gold`; both have at most eight steps."""
    mine, theirs = _edges(plan), _edges(gold)
    halves, hits, alike = _Search(plan.steps, gold.steps, mine, theirs).best()
    steps, edges = len(plan.steps) + len(gold.steps), len(mine) + len(theirs)
    return Likeness(
        node_f1=halves / steps,
        edge_f1=2 * hits / edges if edges else 1.0,
        arguments=2 * alike / steps,
    )


def _edges(plan: Plan) -> set[tuple[int, int]]:
    place = {step.id: number for number, step in enumerate(plan.steps)}
    return {(place[name], place[step.id]) for step in plan.steps for name in step.depends_on}


def _halves(step: Step, other: Step) -> int:
    if step.agent != other.agent:
        return 0
    return 2 if step.tool == other.tool else 1


def _step_likeness(step: Step, gold: Step) -> float:
    given, wanted = _request(step), _request(gold)
    if given == wanted:
        return 1.0
    if step.tool == gold.tool == "calculate":
        result = calculate(wanted)
        if not result.startswith("error"):
            return float(calculate(given) == result)
    mine, theirs = (Counter(_WORD.findall(text.lower())) for text in (given, wanted))
    f1 = 2 * (mine & theirs).total() / max(1, (mine + theirs).total())
    return min(1.0, max(0.0, (f1 - 0.2) / 0.3))


def _request(step: Step) -> str:
    return str(step.args.get(TOOLS[step.agent][step.tool]["required"][0], ""))


def _sums_of_rest(values: list[int]) -> list[int]:
    """The sum of `values` from each place on."""
    return [*accumulate(reversed(values), initial=0)][::-1]


class _Search:
    """Searches all maps, step by step; skips branches that cannot become the best."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        gold: tuple[Step, ...],
        edges: set[tuple[int, int]],
        gold_edges: set[tuple[int, int]],
    ) -> None:
        self._worth = [[_halves(step, other) for other in gold] for step in steps]
        self._alike = [[_step_likeness(step, other) for other in gold] for step in steps]
        # Upper bounds of what the remaining steps can add.
        self._rest = _sums_of_rest([max(worth) for worth in self._worth])
        # An edge is decided at its later end.
        self._decided = [[e for e in edges if max(e) == number] for number in range(len(steps))]
        self._open = _sums_of_rest([len(decided) for decided in self._decided])
        self._gold_edges = gold_edges
        self._map: list[int | None] = []
        self._best = (0, 0, 0.0)

    def best(self) -> tuple[int, int, float]:
        """The sum in halves, the edges that are carried over, and the sum of the arguments."""
        self._go_on(0, 0, 0.0)
        return self._best

    def _go_on(self, halves: int, hits: int, alike: float) -> None:
        number = len(self._map)
        left = len(self._worth) - number
        bound = (halves + self._rest[number], hits + self._open[number], alike + left)
        if number and bound <= self._best:
            return
        if not left:
            self._best = max(self._best, (halves, hits, alike))
            return
        worth = self._worth[number]
        pairs = [other for other in range(len(worth)) if worth[other] and other not in self._map]
        for other in [*sorted(pairs, key=lambda other: -worth[other]), None]:
            self._map.append(other)
            gained, same = (0, 0.0) if other is None else (worth[other], self._alike[number][other])
            self._go_on(halves + gained, hits + self._hits(number), alike + same)
            self._map.pop()

    def _hits(self, number: int) -> int:
        return sum(
            (self._map[before], self._map[after]) in self._gold_edges
            for before, after in self._decided[number]
        )


PLAN_SHARE = 0.3
REPAIR_FACTOR = 0.8
"""Factor of the reward for each repair of the plan."""


async def score_rollout(
    task: Task, result: Result, *, execute: bool, sandboxes: Sandboxes | None
) -> Score:
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
    gold = task.hidden["plan"]
    alike = None if gold is None else likeness(plan, plan_of(gold))
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
    output = result.output
    if isinstance(output, dict):
        repaired = output.get("repaired")
        return ModelPlan(
            plan=text_in(output.get("plan")) or "",
            # A number of repairs; rows of before have a boolean.
            repaired=max(0, int(repaired)) if isinstance(repaired, int) else 0,
            cut_off=output.get("cut_off") is True,
            executed=output.get("executed") is True,
            answer=text_in(output.get("answer")),
            program=text_in(output.get("program")),
        )
    if isinstance(output, str):
        return ModelPlan(plan=output)
    return last_plan(result.messages)


def last_plan(messages: list[dict[str, Any]]) -> ModelPlan:
    """Reads the plan from the last assistant message; those before it were repaired."""
    texts = [text_in(m.get("content")) or "" for m in messages if m.get("role") == "assistant"]
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


def _components(alike: Likeness | None, *, valid: float) -> dict[str, float]:
    if alike is None:
        return {"valid": valid}
    return {"valid": valid, **asdict(alike), "plan": alike.score}


def _reward(components: dict[str, float]) -> float | None:
    plan, done = components.get("plan"), components.get("outcome")
    if plan is None or done is None:
        return done if plan is None else plan
    return PLAN_SHARE * plan + (1 - PLAN_SHARE) * done


def _is_number(gold: str, answer: str | None) -> float:
    public = {"question": "", "options": []}
    task = Task("number", public, {"answer": gold, "kind": "number"})
    result = Result(output={"answer": answer or "", "text": ""})
    return float(score_number(task, result, MathRules()).reward or 0.0)


async def _passes(task: Task, program: str | None, sandboxes: Sandboxes | None) -> float:
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
