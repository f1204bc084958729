"""Computes the reward. In: a task, the messages and the ending. Out: an `Evaluation`.

It depends on the messages alone, whose calls are replayed in a fresh world. `evaluate` follows
tau2-bench's evaluator (src/tau2/evaluator) for every evaluation type: the product of the components
in the task's `reward_basis`. Where upstream's evaluator crashes (an assertion that raises) the
assertion fails, and `upstream_error` names the error.

The strict reward closes holes: calls must have all expected arguments, texts must match whole
words, expected texts count whatever the basis is, long messages do not help, and if doing nothing
would suffice, there must be a proof of work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..domains.world import Domain, World
from ..episodes import COMPLETE
from ..states import ReplayMismatch, replay_messages, set_up, start
from ..tasks import Assertion, Criteria, RewardType, TauMessage, TauTask
from .checks import Strictness, action_matches, information_given
from .proof import is_brief, is_proof_of_work

EvaluationType = Literal[
    "all",
    "env",
    "action",
    "communicate",
    "nl_assertions",
    "all_with_nl_assertions",
    "all_ignore_basis",
    "all_with_nl_assertions_ignore_basis",
]
EVALUATION_TYPES: tuple[EvaluationType, ...] = get_args(EvaluationType)


class EvaluationError(Exception):
    """A conversation cannot be evaluated: it cannot have happened so."""


class MissingVerdicts(EvaluationError):
    """A judge's verdicts are needed and were not given."""


@dataclass
class Evaluation:
    """The reward of a conversation and its components.

    Args:
        reward: 0 or 1.
        basis: the components that should count; None: none was evaluated.
        components: 0 or 1 for each component that was evaluated and counts.
        db_match: whether the data end as expected; None: not evaluated.
        env_assertions: each expected assertion's name, and whether it holds.
        action_matches: for each expected action, whether it was done.
        communicate: each expected text, and whether it was found.
        nl: the judge's verdicts; None: not requested.
        upstream_error: the error of tau2-bench's own evaluator here.
        gold: the expected world; None: not evaluated.
        predicted: the world after the conversation; None: not evaluated.
    """

    reward: float
    basis: list[RewardType] | None = None
    components: dict[str, float] = field(default_factory=dict)
    db_match: bool | None = None
    env_assertions: list[tuple[str, bool]] = field(default_factory=list)
    action_matches: list[bool] = field(default_factory=list)
    communicate: list[tuple[str, bool]] = field(default_factory=list)
    nl: list[bool] | None = None
    upstream_error: str | None = None
    gold: World | None = None
    predicted: World | None = None


def evaluate(
    domain: Domain,
    task: TauTask,
    messages: Sequence[TauMessage],
    ending: str,
    *,
    evaluation_type: EvaluationType = "all",
    nl_verdicts: Sequence[bool] | None = None,
    strictness: Strictness = Strictness.UPSTREAM,
) -> Evaluation:
    """Evaluates a conversation (all of its messages, with the task's history).

    Args:
        ending: why it ended (`episodes.Ending`); only a stop can earn a reward.
        nl_verdicts: a judge's verdicts on the task's `nl_assertions`.
    """
    if ending not in COMPLETE:
        return Evaluation(0.0)
    criteria = task.evaluation_criteria
    if criteria is None:
        return Evaluation(1.0)
    scope = _scope(evaluation_type, criteria)
    found = Evaluation(1.0, basis=scope.basis)
    if "ENV" in scope.parts:
        _look_at_env(found, domain, task, criteria, messages)
    if "ACTION" in scope.parts:
        _look_at_actions(found, criteria, messages, strictness)
    if "COMMUNICATE" in scope.parts:
        _look_at_communicate(found, criteria, messages, strictness)
    if "NL_ASSERTION" in scope.parts:
        _look_at_nl(found, criteria, nl_verdicts)
    counting = set(scope.counting)
    if strictness is Strictness.STRICT:
        counting |= _strict_components(found, domain, task, criteria, messages, counting)
    found.components = {name: found.components[name] for name in found.components.keys() & counting}
    found.reward = math.prod(found.components.values())
    return found


def pays_for_nothing(domain: Domain, task: TauTask) -> bool:
    """Would tau2-bench give the whole reward to an assistant that does and says nothing?

    A judge is taken to find that nothing was achieved.
    """
    criteria = task.evaluation_criteria
    if criteria is None:
        return True
    return _needs_nothing(domain, task, criteria, criteria.reward_basis)


@dataclass(frozen=True)
class _Scope:
    """The components to evaluate, those that make the reward, and the reported basis."""

    parts: frozenset[str]
    counting: frozenset[str]
    basis: list[RewardType] | None


def _scope(evaluation_type: EvaluationType, criteria: Criteria) -> _Scope:
    basis = criteria.reward_basis
    env = frozenset(basis) & {"DB", "ENV_ASSERTION"}
    if evaluation_type == "env":
        nothing = criteria.actions is None and criteria.env_assertions is None
        return _Scope(frozenset({"ENV"}), env, None if nothing else basis)
    if evaluation_type in ("action", "communicate", "nl_assertions"):
        part = "NL_ASSERTION" if evaluation_type == "nl_assertions" else evaluation_type.upper()
        return _Scope(frozenset({part}), frozenset({part}), None)
    parts = {"ENV", "ACTION", "COMMUNICATE"}
    if not evaluation_type.endswith("ignore_basis"):
        if "NL_ASSERTION" in basis or evaluation_type == "all_with_nl_assertions":
            parts.add("NL_ASSERTION")
        return _Scope(frozenset(parts), frozenset(basis), basis)
    everything: list[RewardType] = ["DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE"]
    if evaluation_type == "all_with_nl_assertions_ignore_basis":
        parts.add("NL_ASSERTION")
        everything.append("NL_ASSERTION")
    return _Scope(frozenset(parts), env | (parts - {"ENV"}), everything)


def _look_at_env(
    found: Evaluation,
    domain: Domain,
    task: TauTask,
    criteria: Criteria,
    messages: Sequence[TauMessage],
) -> None:
    """Evaluates the final data, and the assertions on them."""
    if criteria.actions is None and criteria.env_assertions is None:
        found.db_match = True
        return
    found.predicted = set_up(domain, task)
    try:
        replay_messages(found.predicted, messages)
    except ReplayMismatch as error:
        raise EvaluationError(str(error)) from error
    found.gold = expected_world(domain, task, criteria)
    found.db_match = found.predicted.same_as(found.gold)
    found.components["DB"] = float(found.db_match)
    for assertion in criteria.env_assertions or ():
        try:
            met = _holds(found.predicted, assertion)
        except Exception as error:  # noqa: BLE001 - what assertions raise is a part of the outcome
            found.upstream_error = found.upstream_error or str(error)
            met = False
        found.env_assertions.append((assertion.func_name, met))
    found.components["ENV_ASSERTION"] = float(all(met for _, met in found.env_assertions))


def expected_world(domain: Domain, task: TauTask, criteria: Criteria) -> World:
    """Returns the world after the expected actions; failed ones keep their changes so far."""
    world = start(domain, task)
    for action in criteria.actions or ():
        try:
            world.act(action.requestor, action.name, action.arguments)
        except Exception:  # noqa: BLE001 - some expected actions of tau2-bench fail
            continue
    return world


def _holds(world: World, assertion: Assertion) -> bool:
    outcome = world.run_function(assertion.env_type, assertion.func_name, assertion.arguments)
    if not isinstance(outcome, bool):
        raise TypeError(f"Function {assertion.func_name} returned {type(outcome)} instead of bool")
    return outcome == assertion.assert_value


def _look_at_actions(
    found: Evaluation, criteria: Criteria, messages: Sequence[TauMessage], strictness: Strictness
) -> None:
    found.action_matches = action_matches(criteria.actions or (), messages, strictness)
    found.components["ACTION"] = float(all(found.action_matches))


def _look_at_communicate(
    found: Evaluation, criteria: Criteria, messages: Sequence[TauMessage], strictness: Strictness
) -> None:
    expected = criteria.communicate_info or []
    given = information_given(expected, messages, strictness)
    found.communicate = list(zip(expected, given, strict=True))
    found.components["COMMUNICATE"] = float(all(given))


def _look_at_nl(found: Evaluation, criteria: Criteria, verdicts: Sequence[bool] | None) -> None:
    assertions = criteria.nl_assertions or []
    given = list(verdicts or ())
    if len(given) != len(assertions):
        raise MissingVerdicts(
            f"The task has {len(assertions)} assertions for a judge, and there are "
            f"{len(given)} verdicts."
        )
    found.nl = given
    found.components["NL_ASSERTION"] = float(all(given))


def _strict_components(
    found: Evaluation,
    domain: Domain,
    task: TauTask,
    criteria: Criteria,
    messages: Sequence[TauMessage],
    counting: Collection[str],
) -> set[str]:
    """Returns the components of the strict reward besides the basis."""
    said = {"COMMUNICATE"} if criteria.communicate_info else set()
    found.components["BRIEF"] = float(is_brief(messages))
    found.components["PROOF"] = 1.0
    if _needs_nothing(domain, task, criteria, {*counting, *said}):
        found.components["PROOF"] = float(is_proof_of_work(criteria, messages))
    return {*said, "BRIEF", "PROOF"}


def _needs_nothing(
    domain: Domain, task: TauTask, criteria: Criteria, counting: Collection[str]
) -> bool:
    """Returns whether a conversation without any action or message meets all conditions."""
    if "ACTION" in counting and criteria.actions:
        return False
    if "COMMUNICATE" in counting and criteria.communicate_info:
        return False
    if "NL_ASSERTION" in counting and criteria.nl_assertions:
        return False
    nothing = Evaluation(1.0)
    _look_at_env(nothing, domain, task, criteria, task.history)
    return all(
        nothing.components.get(name, 1.0) for name in ("DB", "ENV_ASSERTION") if name in counting
    )
