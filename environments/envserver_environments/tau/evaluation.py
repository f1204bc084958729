"""Scores one conversation: the reward by tau2-bench's rule or strictly, and metrics."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from envserver_records.tasks import Json
from pydantic import BaseModel, ValidationError

from envserver import Judge, Score, pass_hat_k

from .domains.world import Domain, World
from .episodes import COMPLETE, OUT_OF_SCOPE, TRANSFER
from .prompts import judge_messages
from .tasks import (
    Action,
    Assertion,
    Criteria,
    ReplayMismatch,
    RewardType,
    TauMessage,
    TauTask,
    calls_with_results,
    has_text,
    replay_messages,
    set_up,
    start,
)

# A reward depends on the messages alone, whose calls are replayed in a fresh world. `evaluate`
# follows tau2-bench's evaluator (src/tau2/evaluator) for every evaluation type: the product of the
# components in the task's `reward_basis`. Where upstream's evaluator crashes (an assertion that
# raises) the assertion fails, and `upstream_error` names the error.
#
# The strict reward closes holes: calls must have all expected arguments, texts must match whole
# words, expected texts count whatever the basis is, long messages do not help, and if doing nothing
# would suffice, there must be a proof of work.

# `Strictness.UPSTREAM` has the holes of tau2-bench: a call with fewer arguments than expected
# matches, from either side, and "5" is found in "50".


class Strictness(enum.Enum):
    """The rules of a check."""

    UPSTREAM = "upstream"
    STRICT = "strict"


def calls_of(messages: Sequence[TauMessage]) -> list[Json]:
    return [call for message in messages for call in message.get("tool_calls") or ()]


def action_matches(
    actions: Sequence[Action],
    messages: Sequence[TauMessage],
    strictness: Strictness = Strictness.UPSTREAM,
) -> list[bool]:
    """Returns for each expected action whether any call of the conversation matches it."""
    calls = calls_of(messages)
    return [any(same_call(action, call, strictness) for call in calls) for action in actions]


def same_call(action: Action, call: Json, strictness: Strictness = Strictness.UPSTREAM) -> bool:
    """Only `compare_args` count, none if that is empty. If it is unset, upstream compares the
    arguments that the call has; strictly, those that the action has."""
    if action.name != call["name"] or not isinstance(call["arguments"], Mapping):
        return False
    arguments: Mapping[str, Any] = call["arguments"]
    strict = strictness is Strictness.STRICT
    if strict and call.get("requestor", "assistant") != action.requestor:
        return False
    compared = action.compare_args
    if compared is None:
        compared = list(action.arguments if strict else arguments)
    return _part(arguments, compared) == _part(action.arguments, compared)


def _part(arguments: Mapping[str, Any], names: Sequence[str]) -> Json:
    return {name: value for name, value in arguments.items() if name in names}


def information_given(
    expected: Sequence[str],
    messages: Sequence[TauMessage],
    strictness: Strictness = Strictness.UPSTREAM,
) -> list[bool]:
    """Whether any message of the assistant has each expected text, in any case. Upstream removes
    commas from the messages and matches anywhere; strictly, commas are ignored only in numbers, and
    the text must not be part of a longer word or number."""
    said = [m["content"] for m in messages if m["role"] == "assistant" and has_text(m)]
    is_in = _is_said_strictly if strictness is Strictness.STRICT else _is_said
    return [any(is_in(info, content) for content in said) for info in expected]


def _is_said(info: str, content: str) -> bool:
    return info.lower() in content.lower().replace(",", "")


def _is_said_strictly(info: str, content: str) -> bool:
    wanted = _without_thousands_commas(info.strip().casefold())
    text = _without_thousands_commas(content.casefold())
    if not wanted:
        return True
    before = r"(?<![\w.])(?<!\d,)" if wanted[0].isalnum() else ""
    after = r"(?!\w)(?!\.\d)" if wanted[-1].isalnum() else ""
    return re.search(before + re.escape(wanted) + after, text) is not None


def _without_thousands_commas(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def is_success(reward: float) -> bool:
    return abs(reward - 1.0) <= 1e-6


def pass_hat_ks(rewards: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """pass^k for every k that all tasks allow, the mean over the tasks; by task, the rewards of its
    attempts."""
    fewest = min((len(attempts) for attempts in rewards.values()), default=0)
    if not fewest:
        raise ValueError("Each task needs at least one attempt.")
    return {
        k: sum(
            pass_hat_k(len(attempts), sum(map(is_success, attempts)), k)
            for attempts in rewards.values()
        )
        / len(rewards)
        for k in range(1, fewest + 1)
    }


HAND_OVER = "transfer_to_human_agents"

MAX_SAID_CHARACTERS = 20_000
"""Maximum length of all the assistant's messages in a conversation."""


def is_brief(messages: Sequence[TauMessage]) -> bool:
    """Returns whether the messages are too short to repeat a whole database."""
    said = sum(len(m["content"]) for m in messages if m["role"] == "assistant" and has_text(m))
    return said <= MAX_SAID_CHARACTERS


def is_proof_of_work(criteria: Criteria, messages: Sequence[TauMessage]) -> bool:
    """The assistant looked into the matter, if changing nothing is right: it did one of the
    expected actions exactly (for a transfer, the text does not count), or if none is expected, any
    call."""
    if criteria.actions:
        actions = [
            action.model_copy(update={"compare_args": []}) if action.name == HAND_OVER else action
            for action in criteria.actions
        ]
        return any(action_matches(actions, messages, Strictness.STRICT))
    return any(
        call["requestor"] == "assistant" and not result["error"]
        for call, result in calls_with_results(messages)
    )


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
    """The reward of a conversation and its components."""

    reward: float  # 0 or 1
    basis: list[RewardType] | None = None  # what should count; None: none was evaluated
    components: dict[str, float] = field(default_factory=dict)  # 0 or 1, of what counts
    db_match: bool | None = None  # the data end as expected
    env_assertions: list[tuple[str, bool]] = field(default_factory=list)  # does it hold?
    action_matches: list[bool] = field(default_factory=list)  # was it done?
    communicate: list[tuple[str, bool]] = field(default_factory=list)  # was it said?
    nl: list[bool] | None = None  # the judge's verdicts
    upstream_error: str | None = None  # of tau2-bench's own evaluator here
    gold: World | None = None  # the expected world
    predicted: World | None = None  # the world after the conversation


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
    """Evaluates all messages of a conversation, with the task's history; only a stop as `ending`
    can earn a reward."""
    if ending not in COMPLETE:
        return Evaluation(0.0)
    criteria = task.evaluation_criteria
    if criteria is None:
        return Evaluation(1.0)
    scope = _scope(evaluation_type, criteria)
    found = Evaluation(1.0, basis=scope.basis)
    if "ENV" in scope.parts:
        _look_at_env(found, domain, task, messages)
    if "ACTION" in scope.parts:
        found.action_matches = action_matches(criteria.actions or (), messages, strictness)
        found.components["ACTION"] = float(all(found.action_matches))
    if "COMMUNICATE" in scope.parts:
        expected = criteria.communicate_info or []
        given = information_given(expected, messages, strictness)
        found.communicate = list(zip(expected, given, strict=True))
        found.components["COMMUNICATE"] = float(all(given))
    if "NL_ASSERTION" in scope.parts:
        found.nl = _given_verdicts(criteria, nl_verdicts)
        found.components["NL_ASSERTION"] = float(all(found.nl))
    counting = set(scope.counting)
    if strictness is Strictness.STRICT:
        counting |= _strict_components(found, domain, task, messages, counting)
    found.components = {name: found.components[name] for name in found.components.keys() & counting}
    found.reward = math.prod(found.components.values())
    return found


def pays_for_nothing(domain: Domain, task: TauTask) -> bool:
    """Would tau2-bench give the whole reward to an assistant that does and says nothing? A judge is
    taken to find that nothing was achieved."""
    criteria = task.evaluation_criteria
    return criteria is None or _needs_nothing(domain, task, criteria.reward_basis)


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
    found: Evaluation, domain: Domain, task: TauTask, messages: Sequence[TauMessage]
) -> None:
    criteria = task.criteria
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


def _given_verdicts(criteria: Criteria, verdicts: Sequence[bool] | None) -> list[bool]:
    assertions = criteria.nl_assertions or []
    given = list(verdicts or ())
    if len(given) != len(assertions):
        raise MissingVerdicts(
            f"The task has {len(assertions)} assertions for a judge, and there are "
            f"{len(given)} verdicts."
        )
    return given


def _strict_components(
    found: Evaluation,
    domain: Domain,
    task: TauTask,
    messages: Sequence[TauMessage],
    counting: Collection[str],
) -> set[str]:
    said = {"COMMUNICATE"} if task.criteria.communicate_info else set()
    found.components["BRIEF"] = float(is_brief(messages))
    found.components["PROOF"] = 1.0
    if _needs_nothing(domain, task, {*counting, *said}):
        found.components["PROOF"] = float(is_proof_of_work(task.criteria, messages))
    return {*said, "BRIEF", "PROOF"}


def _needs_nothing(domain: Domain, task: TauTask, counting: Collection[str]) -> bool:
    """Returns whether a conversation without any action or message meets all conditions."""
    criteria = task.criteria
    if "ACTION" in counting and criteria.actions:
        return False
    if "COMMUNICATE" in counting and criteria.communicate_info:
        return False
    if "NL_ASSERTION" in counting and criteria.nl_assertions:
        return False
    nothing = Evaluation(1.0)
    _look_at_env(nothing, domain, task, task.history)
    return all(
        nothing.components.get(name, 1.0) for name in ("DB", "ENV_ASSERTION") if name in counting
    )


# tau2-bench's policies demand an explicit yes before every change, but its reward ignores it. A
# change is confirmed if the customer's last message before it says yes, and the assistant's message
# before that names one of the ids among the arguments of the call.

_YES = re.compile(
    r"\b(yes|yeah|yep|sure|ok|okay|confirm(ed)?|agreed?|correct|proceed|go ahead|do (it|so|that)|"
    r"please do|sounds good|that works|all right|alright)\b",
    re.IGNORECASE,
)
_NO = re.compile(r"\b(no|not|don't|do not|never|wait|stop)\b", re.IGNORECASE)


def unconfirmed_writes(
    messages: Sequence[TauMessage], mutates: Callable[[str], bool]
) -> list[Json]:
    return [
        call
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
        for call in message.get("tool_calls") or ()
        if mutates(call["name"]) and not _is_confirmed(call, messages[:place])
    ]


def _is_confirmed(call: Json, before: Sequence[TauMessage]) -> bool:
    texts = [m for m in before if has_text(m) and m["role"] != "tool"]
    answers = [place for place, m in enumerate(texts) if m["role"] == "user"]
    if not answers:
        return False
    answer = texts[answers[-1]]["content"]
    if not _YES.search(answer) or _NO.search(answer):
        return False
    proposals = [m["content"] for m in texts[: answers[-1]] if m["role"] == "assistant"]
    ids = [value.casefold() for value in _texts(call["arguments"]) if re.search(r"\d", value)]
    proposal = proposals[-1].casefold() if proposals else ""
    return bool(proposals) and (not ids or any(name in proposal for name in ids))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def score_conversation(
    domain: Domain,
    task: TauTask,
    messages: Sequence[TauMessage],
    ending: str,
    *,
    evaluation_type: EvaluationType = "all",
    nl_verdicts: Sequence[bool] | None = None,
    strictness: Strictness = Strictness.UPSTREAM,
) -> Score:
    """If a judge's verdicts are missing, there is no reward; if the recorded results cannot be
    those of the calls, the score is an error."""
    try:
        found = evaluate(
            domain,
            task,
            messages,
            ending,
            evaluation_type=evaluation_type,
            nl_verdicts=nl_verdicts,
            strictness=strictness,
        )
    except MissingVerdicts:
        return Score(reward=None, metrics={"missing_verdicts": 1.0})
    except EvaluationError as error:
        return Score(reward=None, error=f"The conversation cannot have happened so: {error}")
    metrics = _metrics(domain, task, messages, found)
    metrics |= {"complete": float(ending in COMPLETE), f"ended_{ending}": 1.0}
    components = {name.lower(): value for name, value in found.components.items()}
    return Score(reward=found.reward, components=components, metrics=metrics)


def _metrics(
    domain: Domain, task: TauTask, messages: Sequence[TauMessage], found: Evaluation
) -> dict[str, float]:
    world = domain.world()

    def mutates(name: str) -> bool:
        tool = world.tool(name)
        return tool is not None and tool.mutates

    made = list(calls_with_results(messages))
    metrics = {
        "messages": float(len(messages)),
        "tool_calls": float(len(made)),
        "tool_errors": float(sum(bool(result.get("error")) for _, result in made)),
        "upstream_crashes": float(found.upstream_error is not None),
    }
    gold = [action for action in task.criteria.actions or () if mutates(action.name)]
    writes = [call for call, result in made if not result.get("error") and mutates(call["name"])]
    metrics["unconfirmed_writes"] = float(len(unconfirmed_writes(messages, mutates)))
    same = [[same_call(a, call, Strictness.STRICT) for call in writes] for a in gold]
    expected = sum(map(any, zip(*same, strict=True)))
    metrics["extra_writes"] = float(len(writes) - expected)
    if gold:
        metrics["gold_writes_done"] = sum(map(any, same)) / len(gold)
    last = next((m for m in reversed(messages) if m["role"] == "user"), {})
    content = last.get("content") or ""
    metrics["transferred"] = float(TRANSFER in content)
    metrics["out_of_scope"] = float(OUT_OF_SCOPE in content)
    return metrics


class _Verdict(BaseModel):
    met: bool


class _Verdicts(BaseModel):
    results: list[_Verdict]


def verdicts(judge: Judge, assertions: Sequence[str], messages: Sequence[TauMessage]) -> list[bool]:
    """Returns whether each assertion is met; without assertions no model is called."""
    if not assertions:
        return []
    prompt = judge_messages(assertions, messages)
    return judge.ask_blocking(prompt, lambda text: read_verdicts(text, len(assertions)))


def read_verdicts(text: str, count: int) -> list[bool]:
    """Parses the verdicts in an answer; raises ValueError if they are invalid or not `count`."""
    start, end = text.find("{"), text.rfind("}")
    try:
        read = _Verdicts.model_validate(json.loads(text[start : end + 1]), strict=True)
    except (ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(read.results) != count:
        raise ValueError(f"{len(read.results)} verdicts, not {count}")
    return [result.met for result in read.results]
