"""Checks the rewards that an environment returns against its declarations. Pure.

`envserver_records.tasks` says how rewards add up. A RewardError: the environment's code is wrong
and no retry helps.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import NoReturn

import msgspec
from envserver_records.errors import ConfigError, RewardError, RolloutError, ScorerError
from envserver_records.tasks import Result, RewardRange, Score, TurnReward, with_totals

from ..environment import AgentRole, Environment
from ..settings.section import AgentConfig
from ..tools.calling import place_of

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")


def roles_of(environment: Environment) -> dict[str, AgentRole]:
    """The agents of `environment` in its order, trained as the settings say."""
    declared, settings = environment.agents(), environment.config.agents
    if not isinstance(declared, Mapping):
        place = place_of(ConfigError(""), environment.agents)
        raise ConfigError(f"agents() must return a dict of roles, not {declared!r:.50} {place}")
    for name in declared:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"Environment {environment.name!r} declares an agent {name!r}.",
                hint="Names consist of lower-case letters, digits and _.",
            )
    for name in settings:
        if name not in declared:
            raise _unknown(environment.name, name, list(declared))
    return {name: _role(role, settings.get(name)) for name, role in declared.items()}


def _role(role: AgentRole, config: AgentConfig | None) -> AgentRole:
    if config is None or config.trained is None:
        return role
    return AgentRole(trained=config.trained)


def _unknown(environment: str, name: str, declared: list[str]) -> ConfigError:
    where = f"--env.agents.{name}: there is no agent {name!r} in {environment!r}."
    if not declared:
        return ConfigError(where, hint="Its rollouts have one agent, and it has no name.")
    near = difflib.get_close_matches(name, declared, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Its agents: {', '.join(declared)}."
    return ConfigError(where, hint=hint)


class RewardRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards that an environment declares. `agents`: whether each is trained, the main agent
    first; empty: one without a name."""

    environment: str
    range: RewardRange
    agents: dict[str, bool]
    weights: dict[str, float]


def rules_of_rewards(environment: Environment) -> RewardRules:
    return RewardRules(
        environment=environment.name,
        range=range_of(environment),
        agents={name: role.trained for name, role in roles_of(environment).items()},
        weights=dict(environment.component_weights),
    )


def range_of(environment: Environment) -> RewardRange:
    name = environment.name
    try:
        low, high = (float(end) for end in environment.reward_range)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}.reward_range is not a pair of numbers: {error}.") from error
    solved_at = high if environment.solved_at is None else float(environment.solved_at)
    if not low < high:
        raise ConfigError(f"{name}.reward_range is ({low}, {high}), which contains no reward.")
    if not math.isfinite(solved_at):
        raise ConfigError(
            f"{name}.reward_range has no upper end, so it does not say when a task is solved.",
            hint=f"Declare {name}.solved_at: the least reward of a solved task.",
        )
    if not low <= solved_at <= high:
        raise ConfigError(f"{name}.solved_at is {solved_at}, outside of its reward_range.")
    return RewardRange(low, high, solved_at)


def checked_score(score: object, result: Result, rules: RewardRules) -> Score:
    """Checks a score and returns it as plain numbers, without totals."""
    if not isinstance(score, Score):
        hint = "Write: return Score(reward=...)."
        _refuse(f"{type(score).__name__}, not a Score", hint, verb="returned")
    if score.error is not None:
        raise ScorerError(f"The scorer reported a failure: {score.error}")
    checked = Score(
        reward=None if score.reward is None else _reward("reward", score.reward),
        rewards=_rewards(score.rewards, rules),
        turns=[_turn(turn, result, rules) for turn in score.turns],
        components=_finite_numbers("components", score.components),
        metrics=_finite_numbers("metrics", score.metrics),
    )
    if checked.reward is None and not checked.rewards:
        checked.reward = _weighted(checked.components, rules)
    _check_agents_have_rewards(checked, rules)
    _check_range(checked, rules)
    return checked


def with_turn_rewards(score: object, result: Result, rules: RewardRules) -> object:
    """Returns a score with the rewards that the rollout gave with `run.reward`; a score without a
    reward stays so."""
    if not isinstance(score, Score) or not result.turn_rewards:
        return score
    is_weighted = bool(rules.weights and score.components)
    if score.reward is None and not (score.rewards or score.turns or is_weighted):
        return score
    return msgspec.structs.replace(score, turns=[*result.turn_rewards, *score.turns])


def delivered_score(score: Score, rules: RewardRules) -> Score:
    """Returns a scorer's score with the totals that trainers get."""
    return with_totals(score, rules.agents)


def _rewards(rewards: object, rules: RewardRules) -> dict[str, float]:
    if not isinstance(rewards, dict):
        _refuse("rewards that are not a dict")
    for name in rewards:
        if name not in rules.agents:
            _refuse(f"a reward for the agent {name!r}, which it does not declare", _known(rules))
    return {name: _reward(f"rewards[{name!r}]", value) for name, value in rewards.items()}


def _turn(turn: object, result: Result, rules: RewardRules) -> TurnReward:
    if not isinstance(turn, TurnReward):
        _refuse(f"turns with a {type(turn).__name__}, not a TurnReward")
    agent = turn.agent if turn.agent is not None else next(iter(rules.agents), None)
    if agent is not None and agent not in rules.agents:
        _refuse(f"a turn reward for the agent {agent!r}, which it does not declare", _known(rules))
    whose = "" if agent is None else f" of {agent!r}"
    value = _reward(f"the reward of turn {turn.turn}{whose}", turn.value)
    calls = result.calls.get(agent or "", [])
    number = turn.turn
    is_known = not result.calls or number < len(calls)  # a bare row has no calls
    if not isinstance(number, int) or number < 0 or not is_known:
        _refuse(
            f"a reward for turn {number!r}{whose}, which had {len(calls)}",
            "Turns count the calls that the agent received an answer to, from 0.",
        )
    return TurnReward(number, value, agent, calls[number] if calls else turn.call)


def _weighted(components: Mapping[str, float], rules: RewardRules) -> float | None:
    if not rules.weights or not components:
        return None
    missing = rules.weights.keys() - components.keys()
    if missing:
        _refuse(
            f"no component {min(missing)!r}, which component_weights names",
            "Give all of them, or a reward.",
        )
    return math.fsum(weight * components[name] for name, weight in rules.weights.items())


def _check_agents_have_rewards(score: Score, rules: RewardRules) -> None:
    if not score.rewards or score.reward is not None:
        return
    for name, trained in rules.agents.items():
        if trained and name not in score.rewards:
            _refuse(
                f"no reward for the trained agent {name!r}",
                "Name every trained agent in `rewards`, or give a `reward` for the others.",
            )


def _check_range(score: Score, rules: RewardRules) -> None:
    totals = with_totals(score, rules.agents)
    named = {f"the agent {name!r}": value for name, value in totals.rewards.items()}
    if totals.reward is not None:
        named["the rollout"] = totals.reward
    bounds = rules.range
    for whose, value in named.items():
        if not bounds.holds(value):
            _refuse(
                f"a reward of {value:g} for {whose}, which is outside of its reward_range "
                f"[{bounds.low:g}, {bounds.high:g}]",
                "Declare another Environment.reward_range (turn rewards count in the sum).",
            )


def _known(rules: RewardRules) -> str:
    if not rules.agents:
        return "Its rollouts have one agent without a name; Environment.agents declares agents."
    return f"It declares: {', '.join(rules.agents)}."


def _refuse(what: str, hint: str = "", verb: str = "gave") -> NoReturn:
    raise reward_error(f"The scorer {verb} {what}.", hint)


def reward_error(message: str, hint: str = "") -> RewardError:
    bug = f"A bug in the environment: {message} {hint}".strip()
    return RewardError(message, hint=hint, bug=bug)


def _finite_numbers(field: str, values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise ScorerError(f"The scorer gave {field} that are not a dict.")
    return {
        str(name): _finite(f"{field}[{name!r}]", value, ScorerError)
        for name, value in values.items()
    }


def _reward(name: str, value: object) -> float:
    if inspect.iscoroutine(value):
        value.close()
        _refuse(f"{name} = a coroutine", "`await` it, in an `async def`.")
    return _finite(name, value, reward_error)


def _finite(name: str, value: object, error: Callable[[str], RolloutError]) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise error(f"The scorer gave {name} = {str(value)[:50]}, which is not a finite number.")
    return float(value)
