"""The cause of a rollout's end decides who is at fault and how long until a retry."""

from __future__ import annotations

import pytest
from envserver_clients.http import Retries
from envserver_records.errors import (
    AgentError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    Failure,
    LimitReached,
    RolloutError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    WorkerDied,
    WorkerError,
    WorkerGarbage,
    WorkerHung,
)
from hypothesis import given
from hypothesis import strategies as st
from support.forests import call
from support.serving import attempt_spec

from envserver.models import Replica
from envserver.proxy import ProxyAttempt
from envserver.rollouts import ending_limit
from envserver.rollouts.policy import counts_as_attempt, limit_of_death, retry_delay_seconds

AWAY, REFUSED = EngineUnavailable("away"), EngineRefused("no such field")
LOST, NO_ROOM = SandboxLost("it is gone"), SandboxUnavailable("no room")
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


@pytest.mark.parametrize(
    ("attempt", "limit"),
    [
        (ended(None), None),
        (ended(None, limit="turns"), "turns"),
        (ended(None, REFUSED), None),
        (ended(LIMITED), "turns"),
        (ended(LIMITED, limit="tokens"), "tokens"),
        (ended(RAISED, limit="turns"), "turns"),
    ],
)
def test_what_is_the_models_is_scored(attempt: ProxyAttempt, limit: str | None) -> None:
    assert ending_limit(attempt) == limit


@pytest.mark.parametrize(
    ("attempt", "blamed"),
    [
        (ended(None, AWAY), EngineUnavailable),
        (ended(RAISED), AgentError),
        (ended(RAISED, AWAY), EngineUnavailable),
        (ended(RAISED, REFUSED), EngineRefused),
        (ended(LIMITED, AWAY, limit="turns"), EngineUnavailable),
        (ended(AWAY), EngineUnavailable),
        (ended(LOST), SandboxLost),
        (ended(None, sandbox=LOST), SandboxLost),
        (ended(RAISED, sandbox=NO_ROOM), SandboxUnavailable),
        (ended(LIMITED, limit="time", sandbox=NO_ROOM), SandboxUnavailable),
        (ended(RAISED, AWAY, sandbox=LOST), EngineUnavailable),
        (ProxyAttempt("key", attempt_spec()), WorkerGarbage),
    ],
)
def test_what_is_not_the_models_is_never_scored(
    attempt: ProxyAttempt, blamed: type[RolloutError]
) -> None:
    with pytest.raises(RolloutError) as caught:
        ending_limit(attempt)
    assert type(caught.value) is blamed


def over_bound(attempt: ProxyAttempt, *, spoke: bool = True) -> ProxyAttempt:
    attempt.flags.add("over_bound")
    attempt.calls += [call(0, [1], [2])] if spoke else []
    return attempt


@pytest.mark.parametrize("posted", [RAISED, WorkerGarbage("?"), None])
def test_who_asks_too_much_of_the_proxy_pays_for_what_came_of_it(
    posted: RolloutError | None,
) -> None:
    def one() -> ProxyAttempt:
        return ended(posted) if posted else ProxyAttempt("key", attempt_spec())

    assert ending_limit(over_bound(one()), "sandboxed") == "crash"
    for attempt, isolation in (
        (over_bound(one(), spoke=False), "sandboxed"),
        (over_bound(one()), "dedicated"),
    ):
        with pytest.raises((AgentError, WorkerGarbage)):
            ending_limit(attempt, isolation)  # type: ignore[arg-type]
    without_engine = over_bound(one())
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
    for later in (LOST, NO_ROOM):
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
    failure = Failure(**{**_fields(RAISED.failure()), "detail": {"message": "m", "hint": "h"}})
    attempt = ProxyAttempt("key", attempt_spec(), posted=True, failure=failure)
    with pytest.raises(AgentError) as caught:
        ending_limit(attempt)
    assert caught.value.detail == {"message": "m", "hint": "h"}


def _fields(failure: Failure) -> dict[str, object]:
    return {name: getattr(failure, name) for name in failure.__struct_fields__}


KILLED, EXITED = WorkerDied("killed", signal="SIGKILL"), WorkerDied("gone", exit_code=0)
HUNG = WorkerHung("It went on after it was cancelled.")


@pytest.mark.parametrize(
    ("death", "limit"),
    [
        (KILLED, "crash"),
        (EXITED, "crash"),
        (HUNG, "time"),
        (WorkerDied("our code raised", exit_code=70), None),
        (WorkerDied("the machine had no memory", signal="SIGKILL", out_of_memory=True), None),
        (WorkerDied("another one's", signal="SIGKILL", mate=True), None),
        (WorkerDied("nobody saw it"), None),
        (WorkerGarbage("?"), None),
    ],
)
def test_who_ends_its_own_worker_is_scored_and_ours_are_not(
    death: WorkerError, limit: str | None
) -> None:
    assert limit_of_death(death, "sandboxed", spoke=True, overdue=True) == limit
    assert limit_of_death(death, "sandboxed", spoke=False, overdue=True) is None
    assert limit_of_death(death, "dedicated", spoke=True, overdue=True) is None


def test_a_worker_that_fell_silent_before_its_deadline_may_be_ours() -> None:
    assert limit_of_death(HUNG, "sandboxed", spoke=True, overdue=False) is None


def test_only_the_pool_says_that_a_death_was_anothers() -> None:
    assert not counts_as_attempt(WorkerDied("killed", mate=True))
    assert counts_as_attempt(AgentError("raised", mate=True))


@given(st.integers(1, 10**7), st.floats(0, 1))
def test_pauses_are_bounded_after_any_number_of_failures(failures: int, jitter: float) -> None:
    assert 0 < retry_delay_seconds(failures, jitter) <= 10
    assert 0 < Retries().pause_seconds(failures) <= 10


def test_an_engine_may_be_away_for_any_number_of_requests() -> None:
    replica = Replica("http://engine", 1, lambda: 0.0)
    for _ in range(5000):
        replica.refused("no connection")
    assert replica.aside_until <= 30
