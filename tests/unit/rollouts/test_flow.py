"""Rollouts and groups that are late, stale or lost are handled by declared rules."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from envserver_records.errors import Outcome, Stale
from envserver_records.records import Call, VersionSpan
from hypothesis import given
from hypothesis import strategies as st
from support.api import native_group
from support.serving import attempt_spec

from envserver import Group, RolloutsConfig, Score, pack, unpack
from envserver.proxy import ProxyAttempt
from envserver.rollouts import StalenessMonitor, is_stale
from envserver.rollouts.policy import (
    Drop,
    GroupRules,
    group_seconds_left,
    is_retried,
    judge_group,
    judge_losses,
    rules_of,
)

VERSIONS = st.integers(-1, 20)
MOST = st.none() | st.integers(0, 6)
KINDS = ("engine_unavailable", "agent_error", "unscorable", "straggler", "stale")
LOST = st.lists(st.sampled_from(KINDS), max_size=8)
RULES = st.builds(
    GroupRules,
    size=st.just(8),
    least=st.integers(1, 8),
    failed=st.sampled_from(["shrink", "drop_group"]),
    late=st.sampled_from(["shrink", "drop_group"]),
)


def call(version: int, *, trained: bool = True) -> Call:
    nothing = np.zeros(3, np.int32)
    return Call(
        index=0,
        model="m",
        prompt_ids=nothing,
        completion_ids=nothing,
        logprobs=nothing.astype(np.float32),
        versions=[VersionSpan(version, 0, 3)],
        exact=True,
        finish_reason="stop",
        message={},
        messages=[],
        trained=trained,
    )


def attempt(*calls: Call) -> ProxyAttempt:
    made = ProxyAttempt("key", attempt_spec())
    made.commit(list(calls))
    return made


@given(VERSIONS, VERSIONS, MOST)
def test_a_token_is_stale_when_it_is_further_behind_than_it_may_be(
    oldest: int, version: int, most: int | None
) -> None:
    behind = version - oldest if oldest >= 0 else 0
    assert is_stale(oldest, version, most) == (most is not None and behind > most)


@given(st.lists(st.tuples(VERSIONS, st.booleans()), max_size=5), st.none() | VERSIONS)
def test_the_oldest_token_is_a_trained_one_also_of_a_call_at_the_engine(
    made: list[tuple[int, bool]], at_engine: int | None
) -> None:
    known = [version for version, trained in made if trained and version >= 0]
    one = attempt(*(call(version, trained=trained) for version, trained in made))
    assert one.oldest_version == min(known, default=-1)
    if at_engine is not None:
        with one.sampling(at_engine):
            known += [at_engine] * (at_engine >= 0)
            assert one.oldest_version == min(known, default=-1)


@given(MOST, st.lists(VERSIONS, min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=5))
def test_after_a_publish_nothing_goes_on_that_is_too_old(
    most: int | None, oldest: list[int], published: list[int]
) -> None:
    async def run() -> None:
        staleness = StalenessMonitor(most)
        ended: dict[int, Stale] = {}

        async def rollout(number: int, one: ProxyAttempt) -> None:
            try:
                async with staleness.watching(one):
                    await asyncio.Event().wait()
            except Stale as error:
                ended[number] = error

        attempts = [attempt(call(version)) for version in oldest]
        running = [asyncio.create_task(rollout(*one)) for one in enumerate(attempts)]
        await asyncio.sleep(0)
        gone: set[int] = set()
        for version in published:
            staleness.publish(version)
            gone |= {n for n, first in enumerate(oldest) if is_stale(first, version, most)}
            for _ in range(4):
                await asyncio.sleep(0)
            assert set(ended) == gone
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert all(not is_retried(error, 1, 3) for error in ended.values())
        assert all(error.outcome is Outcome.DROP for error in ended.values())

    asyncio.run(run())


async def test_what_is_cancelled_from_outside_is_not_called_stale() -> None:
    staleness = StalenessMonitor(0)

    async def rollout() -> None:
        async with staleness.watching(attempt(call(3))):
            await asyncio.Event().wait()

    running = asyncio.create_task(rollout())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(TimeoutError):
        async with staleness.watching(attempt()):
            raise TimeoutError


@given(LOST, RULES)
def test_what_a_group_may_lack_is_declared(lost: list[str], rules: GroupRules) -> None:
    counted = Counter(lost)
    late = counted["straggler"] + counted["stale"]
    kept = (
        8 - len(lost) >= rules.least
        and not (late and rules.late == "drop_group")
        and not (len(lost) > late and rules.failed == "drop_group")
    )
    drop = judge_losses(counted, rules)
    assert (drop is None) == kept
    if drop is not None:  # where all are too old nothing has failed
        is_stale = set(lost) == {"stale"}
        assert (drop.reason, drop.failed) == (
            ("stale", False) if is_stale else ("incomplete", True)
        )


@given(LOST, st.sampled_from(KINDS), RULES)
def test_a_group_that_is_given_up_would_never_have_been_delivered(
    lost: list[str], kind: str, rules: GroupRules
) -> None:
    if judge_losses(Counter(lost), rules) is not None:
        assert judge_losses(Counter([*lost, kind]), rules) is not None


@given(st.floats(0, 100), st.none() | st.floats(0, 50), st.none() | st.floats(0, 50), st.booleans())
def test_the_rest_of_a_group_has_its_time_and_not_more(
    age: float, since_enough: float | None, grace: float | None, cancels: bool
) -> None:
    if not cancels:
        rollouts = RolloutsConfig(stragglers="wait", group_timeout_seconds=60)
        assert group_seconds_left(rollouts, age, since_enough) is None
        return
    rollouts = RolloutsConfig(
        group_timeout_seconds=60, min_group_size=2, straggler_grace_seconds=grace
    )
    left = group_seconds_left(rollouts, age, since_enough)
    assert left is not None
    assert 0 <= left <= max(0.0, 60 - age)
    if grace is not None and since_enough is not None:
        assert left <= max(0.0, grace - since_enough)


def group(version: int = 7, **changes: object) -> Group:
    made = native_group("g", 2)
    made.policy_version = version
    made.asked = 2
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@given(VERSIONS, VERSIONS, MOST, st.sampled_from(["drop", "deliver"]))
def test_a_group_that_is_finished_too_old_is_dropped_where_that_is_declared(
    oldest: int, version: int, most: int | None, policy: str
) -> None:
    rollouts = RolloutsConfig.model_validate(
        {"max_staleness_at_delivery": most, "stale_groups": policy}
    )
    rules = rules_of(rollouts, size=2, drop_zero_variance=True, max_token_length=99)
    drop = judge_group(group(oldest), rules, version)
    if policy == "drop" and is_stale(oldest, version, most):
        assert drop is not None
        assert (drop.reason, drop.failed) == ("stale", False)
    else:
        assert drop is None


def test_other_reasons_not_to_deliver_a_group() -> None:
    rules = GroupRules(size=2, least=2, drop_zero_variance=True, max_token_length=4)
    long = judge_group(group(), rules, -1)
    same = group()
    for one in same.trajectories:
        one.sequences, one.score = [], Score(reward=1.0)
    equal = judge_group(same, rules, -1)
    lacking = judge_group(group(lost={"scorer_error": 1}), rules, -1)
    reasons = [drop.reason for drop in (long, equal, lacking) if isinstance(drop, Drop)]
    assert reasons == ["too_long", "zero_variance", "incomplete"]


def test_a_group_says_how_it_came_about_and_older_ones_can_still_be_read() -> None:
    said = unpack(pack(group(asked=8, lost={"straggler": 5, "stale": 1})), Group)
    assert (said.asked, said.lost, len(said.trajectories)) == (8, {"straggler": 5, "stale": 1}, 2)
    fields = unpack(pack(said), dict)
    old = unpack(pack({k: v for k, v in fields.items() if k not in ("asked", "lost")}), Group)
    assert (old.asked, old.lost) == (0, {})


def test_a_grace_without_a_least_size_is_refused() -> None:
    for wrong in ({}, {"min_group_size": 2, "stragglers": "wait"}):
        with pytest.raises(ValueError, match="straggler_grace_seconds works only"):
            RolloutsConfig.model_validate({"straggler_grace_seconds": 5} | wrong)
