"""Rollouts and groups that are late, stale, lost or ended: declared rules and causes decide."""

import asyncio
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from envserver_records import errors
from envserver_records.errors import (
    AgentError,
    AllFailed,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    LimitReached,
    Outcome,
    RolloutError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    Stale,
    TooMuchUntrained,
    WorkerDied,
    WorkerGarbage,
)
from envserver_records.records import Call, VersionSpan
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.api import native_group, requested
from support.cases import cases_of
from support.extent import examples
from support.forests import call
from support.serving import attempt_spec
from support.waiting import settled

from envserver import Group, RolloutsConfig, Score
from envserver.proxy.attempts import ProxyAttempt
from envserver.rollouts.attempt import StalenessMonitor, ending_limit
from envserver.rollouts.events import Event, GroupDropped
from envserver.rollouts.policy import (
    Drop,
    GroupRules,
    Tries,
    Untrained,
    UntrainedCeiling,
    blames_model,
    counts_as_attempt,
    group_seconds_left,
    is_retried,
    is_stale,
    judge_group,
    judge_losses,
    limit_of_death,
    rules_of,
    untrained_of,
)
from envserver.rollouts.scheduler import Scheduler
from envserver.rollouts.stream import GroupRequest
from envserver.settings.section import EnvironmentConfig
from envserver.tokens.builder import build
from envserver.tokens.flags import Actions

CASES = cases_of(__file__)
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


def versioned(version: int, *, trained: bool = True) -> Call:
    return call(0, [0] * 3, [0] * 3, versions=[VersionSpan(version, 0, 3)], trained=trained)


def attempt(*calls: Call) -> ProxyAttempt:
    made = ProxyAttempt("key", attempt_spec())
    made.commit(list(calls))
    return made


@given(VERSIONS, VERSIONS, MOST)
def test_a_token_is_stale_when_too_far_behind(oldest: int, version: int, most: int | None) -> None:
    behind = version - oldest if oldest >= 0 else 0
    assert is_stale(oldest, version, most) == (most is not None and behind > most)


def test_the_oldest_token_is_a_trained_one_also_of_a_call_at_the_engine() -> None:
    one = attempt(versioned(1, trained=False), versioned(5))
    assert one.oldest_version == 5
    with one.sampling(3):
        assert one.oldest_version == 3


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

        attempts = [attempt(versioned(version)) for version in oldest]
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
        async with staleness.watching(attempt(versioned(3))):
            await asyncio.Event().wait()

    running = asyncio.create_task(rollout())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(TimeoutError):
        async with staleness.watching(attempt()):
            raise TimeoutError


@given(LOST, RULES, st.sampled_from(KINDS))
@example(["stale"] * 8, GroupRules(size=8, least=1), "stale")
def test_what_a_group_may_lack_is_declared(lost: list[str], rules: GroupRules, kind: str) -> None:
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
        assert (drop.reason, drop.failed) == (
            ("stale", False) if (set(lost) == {"stale"}) else ("incomplete", True)
        )
        # A group that is given up would never have been delivered.
        assert judge_losses(Counter([*lost, kind]), rules) is not None


def test_the_rest_of_a_group_has_its_time_and_not_more() -> None:
    times: Any = {"group_timeout_seconds": 60, "min_group_size": 2, "straggler_grace_seconds": 5}
    rollouts = RolloutsConfig(**times)
    left = [group_seconds_left(rollouts, *ages) for ages in ((50, None), (10, 3), (70, 1))]
    assert left == [10, 2, 0]
    waits = RolloutsConfig(stragglers="wait", group_timeout_seconds=60)
    assert group_seconds_left(waits, 70, 1) is None


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
    config = EnvironmentConfig(group_size=2, max_token_length=99)
    rules = rules_of(rollouts, config, drop_zero_variance=True)
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
    assert long is not None
    assert "--env.max_token_length" in long.message


AWAY, REFUSED = EngineUnavailable("away"), EngineRefused("no such field", status=400)
GONE, NO_ROOM = SandboxLost("it is gone"), SandboxUnavailable("no room")
RAISED, LIMITED = AgentError("KeyError: 'x'"), LimitReached("no turns are left", limit="turns")


def ended(
    posted: RolloutError | None,
    engine: EngineError | None = None,
    limit: str | None = None,
    sandbox: SandboxError | None = None,
) -> ProxyAttempt:
    """An attempt whose worker posted a result, or `posted`."""
    failure = None if posted is None else posted.failure()
    attempt = ProxyAttempt("key", attempt_spec(), posted=True, failure=failure)
    if limit is not None:
        attempt.reached(limit, "")
    if engine is not None:
        attempt.engine_failed(engine, recorded=False)
    if sandbox is not None:
        attempt.sandbox_failed(sandbox)
    return attempt


@pytest.mark.parametrize("case", CASES["ended"], ids=" ".join)
def test_what_is_the_models_is_scored_and_nothing_else(case: list[str]) -> None:
    *names, outcome = case
    posted, engine, limit, sandbox = (globals().get(name) or name or None for name in names)
    try:
        assert ending_limit(ended(posted, engine, limit, sandbox)) == (outcome or None)
    except RolloutError as error:
        assert type(error).__name__ == outcome


@pytest.mark.parametrize("posted", [RAISED, WorkerGarbage("?"), REFUSED, None])
@pytest.mark.parametrize("engine", [None, REFUSED])
def test_who_asks_too_much_of_the_proxy_or_the_engine_pays_for_it(
    posted: RolloutError | None, engine: EngineError | None
) -> None:
    def one() -> ProxyAttempt:
        attempt = ended(posted, engine) if posted else ProxyAttempt("key", attempt_spec())
        if engine is None:
            attempt.flags.add("over_bound")
        return attempt

    def spoke(attempt: ProxyAttempt) -> ProxyAttempt:
        attempt.calls.append(call(0, [1], [2]))
        return attempt

    assert ending_limit(spoke(one()), "sandboxed") == "crash"
    for attempt, isolation in ((one(), "sandboxed"), (spoke(one()), "dedicated")):
        with pytest.raises((AgentError, WorkerGarbage, EngineRefused)):
            ending_limit(attempt, isolation)  # type: ignore[arg-type]
    without_engine = spoke(one())
    without_engine.engine_failed(AWAY, recorded=False)
    with pytest.raises(RolloutError):
        ending_limit(without_engine, "sandboxed")


def test_an_engine_that_came_back_is_not_blamed_for_what_the_agent_did_later() -> None:
    attempt = ended(RAISED, AWAY)
    attempt.engine_answered()
    with pytest.raises(AgentError):
        ending_limit(attempt)


def test_a_sandbox_that_came_late_is_no_failure_and_one_that_was_lost_always_is() -> None:
    attempt = ended(None, sandbox=NO_ROOM)
    attempt.sandbox_opened()
    assert ending_limit(attempt) is None
    for later in (GONE, NO_ROOM):
        attempt.sandbox_failed(later)
        attempt.sandbox_opened()
    with pytest.raises(SandboxLost):
        ending_limit(attempt)


def test_a_failure_of_the_engine_costs_no_turn() -> None:
    attempt = ProxyAttempt("key", attempt_spec(max_turns=1))
    for _ in range(3):
        attempt.take_turn()
        attempt.engine_failed(AWAY, recorded=False)
    attempt.take_turn()
    attempt.engine_failed(REFUSED, recorded=False)
    with pytest.raises(LimitReached):
        attempt.take_turn()


def test_a_worker_may_call_its_facts_as_it_likes() -> None:
    failure = msgspec.structs.replace(RAISED.failure(), detail={"message": "m", "hint": "h"})
    attempt = ProxyAttempt("key", attempt_spec(), posted=True, failure=failure)
    with pytest.raises(AgentError) as caught:
        ending_limit(attempt)
    assert caught.value.detail == {"message": "m", "hint": "h"}
    with pytest.raises(WorkerGarbage):
        ending_limit(ProxyAttempt("key", attempt_spec()))


@pytest.mark.parametrize(("name", "facts", "limit"), CASES["deaths"])
def test_who_ends_its_worker_is_scored_ours_not(
    name: str, facts: dict[str, Any], limit: str | None
) -> None:
    death, limit = getattr(errors, name)("gone", **facts), limit or None
    assert limit_of_death(death, spoke=True, overdue=True) == limit
    assert limit_of_death(death, spoke=False, overdue=True) is None
    early = limit_of_death(death, spoke=True, overdue=False)
    assert early == ("crash" if name == "WorkerHung" else limit)
    tries = Tries()
    tries.add(death)
    assert blames_model(RolloutsConfig(), tries.deaths) == (limit is not None)
    assert not blames_model(RolloutsConfig(worker_deaths=None), tries.deaths)
    assert blames_model(RolloutsConfig(max_attempts=1), 0)


def test_only_the_pool_says_that_a_death_was_anothers() -> None:
    assert not counts_as_attempt(WorkerDied("killed", mate=True))
    assert counts_as_attempt(AgentError("raised", mate=True))


class Maker:
    """Makes the first group, and drops the second while the first is being stored."""

    environment: Any = SimpleNamespace(config=SimpleNamespace(group_size=1))
    rollouts = RolloutsConfig(max_concurrent=2)
    ceiling = UntrainedCeiling(0.1, 1)

    def __init__(self) -> None:
        self.storing, self.dropped = asyncio.Event(), asyncio.Event()

    def observer(self, event: Event) -> None:
        if isinstance(event, GroupDropped):
            self.dropped.set()

    async def make(self, request: GroupRequest) -> Group | Drop:
        if request.index == 0:
            return native_group(request.group_id)
        await self.storing.wait()
        return Drop("untrained", "too much", True)


class Sink:
    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.stored: list[str] = []

    async def put(self, group: Group) -> None:
        self.maker.storing.set()
        await self.maker.dropped.wait()
        await settled()
        self.stored.append(group.group_id)

    async def known(self, group_ids: list[str]) -> set[str]:
        return set()

    async def wait_for_capacity(self) -> None:
        return


async def test_a_run_that_ends_by_one_group_stores_those_that_are_made() -> None:
    maker = Maker()
    sink = Sink(maker)
    scheduler = Scheduler(maker, map(requested, range(9)), sink, wanted=None, stop_on_failures=True)
    with pytest.raises(TooMuchUntrained):
        await scheduler.run()
    assert (sink.stored, scheduler.delivered) == (["g0"], 1)


class Dropping(Maker):
    """Drops each group for the next reason, and delivers those that have none."""

    rollouts = RolloutsConfig(max_concurrent=1, stop_after_failed_groups=3)

    def __init__(self, reasons: list[str]) -> None:
        super().__init__()
        self.dropped.set()
        self._reasons = reasons

    async def make(self, request: GroupRequest) -> Group | Drop:
        reason = self._reasons[request.index]
        said = f"{request.index} tokens"
        return Drop(reason, said, False) if reason else native_group(request.group_id)


class Taking(Sink):
    async def put(self, group: Group) -> None:
        self.stored.append(group.group_id)


@pytest.mark.parametrize(
    ("reasons", "ends", "warned"),
    [
        (["too_long"] * 6, r"The last 3 groups were all dropped, most .* too_long: 2 tok", False),
        (["too_long", "too_long", "", *["too_long"] * 3], None, False),
        (["too_long", "zero_variance", "too_long", "too_long"], None, True),
        (["zero_variance"] * 6, None, True),
    ],
)
async def test_a_run_whose_first_groups_are_all_dropped_says_so_at_once(
    reasons: list[str], ends: str | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for stops in (True, False):  # `process`, `serve`
        maker = Dropping(reasons)
        requests = map(requested, range(len(reasons)))
        run = Scheduler(maker, requests, Taking(maker), wanted=None, stop_on_failures=stops).run()
        with pytest.raises(AllFailed, match=ends) if ends and stops else nullcontext():
            await run
        said = capsys.readouterr().out.count("groups.all_dropped")
        assert said == (warned or (bool(ends) and not stops))


FLAGS = ("structured_output_masked", "undelivered_completion", "truncated_length")


def sampled(index: int, size: int, flags: list[str], versions: list[int], exact: bool) -> Call:
    cut = size // 2 if len(versions) > 1 else size
    spans = [VersionSpan(versions[0], 0, cut), VersionSpan(versions[-1], cut, size)]
    kept = [span for span in spans if span.start < span.end]
    return call(index, [index, 1], [7] * size, versions=kept, flags=flags, exact=exact)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.lists(st.sampled_from(FLAGS), max_size=2, unique=True),
            st.sampled_from([[3], [3, 4]]),
            st.booleans(),
        ),
        max_size=4,
    )
)
@settings(max_examples=examples(80))
def test_trained_and_untrained_tokens_are_all_that_was_sampled(
    drawn: list[tuple[int, list[str], list[int], bool]],
) -> None:
    calls = [sampled(index, *facts) for index, facts in enumerate(drawn)]
    for actions in (Actions(), Actions({"mixed_versions": "mask"})):
        rows = build(calls, actions)
        counted = untrained_of(calls, rows, [], actions, need_exact=True)
        trained = sum(int(row.mask.sum()) for row in rows)
        assert counted.sampled == sum(len(one.completion_ids) for one in calls if one.exact)
        assert counted.tokens + trained == counted.sampled
        assert all(actions.of(flag) != "train" for flag in counted.by_flag)


def test_a_dropped_rollout_counts_whole_where_exact_tokens_are_needed() -> None:
    calls = [sampled(0, 5, [], [3], True), sampled(1, 4, ["missing_logprobs"], [3], False)]
    flags = ["missing_logprobs", "truncated_length"]
    rows = build(calls)
    counted = untrained_of(calls, rows, flags, Actions(), need_exact=True)
    assert counted == Untrained(9, {"missing_logprobs": 9})
    assert untrained_of(calls, rows, flags, Actions(), need_exact=False) == Untrained(5, {})


def test_groups_over_the_share_are_not_offered_while_a_full_window_is_over_it() -> None:
    ceiling = UntrainedCeiling(0.1, 3)
    bad, good = Untrained(10, {"finish_abort": 5}), Untrained(10)
    judged = [ceiling.judge(one) is None for one in (bad, good, bad, good, good, good, bad, good)]
    assert judged == [True, True, False, True, True, True, False, True]
    assert ceiling.is_over
    assert ceiling.report()["tokens"] == {"finish_abort": 5}
    assert "--tokens.train finish_abort" in ceiling.hint()
    for _ in range(3):
        ceiling.judge(good)
    assert not ceiling.is_over and ceiling.report()["message"] == ""
    assert UntrainedCeiling(1.0, 1).judge(Untrained(10, {"finish_abort": 10})) is None
