"""What a run counts."""

from __future__ import annotations

from envserver_records.errors import WorkerError

from envserver.rollouts.events import RolloutFailed
from envserver.running.tally import Tally


def failed(group_id: str, message: str) -> RolloutFailed:
    return RolloutFailed(
        group_id=group_id,
        index=0,
        task_id="task",
        rollout_id=f"{group_id}-0",
        attempt=1,
        failure=WorkerError(message).failure(),
        final=False,
        at=0.0,
    )


def test_a_group_is_dropped_with_its_own_failure() -> None:
    tally = Tally()
    tally(failed("one", "exited with code 3"))
    tally(failed("two", "timed out"))
    assert (tally.failure_of("one"), tally.failure_of("three")) == ("exited with code 3", "")
