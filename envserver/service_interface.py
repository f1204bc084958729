"""What an environment runs on the server for its agents: services, with the state of each rollout.

Implementation: `proxy/services.py`. `Environment.services` returns them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envserver_records.tasks import Task


@dataclass(frozen=True)
class Caller:
    """The rollout on whose behalf a service is called.

    Args:
        group_id: the group whose rollouts are compared with this one.
        task: with its hidden part; the agent sees only what the service returns.
        flag: adds a flag to the trajectory, such as "web_leak_dropped".
        state: what `Services.state` made for this attempt; None without it.
    """

    rollout_id: str
    group_id: str
    task: Task
    flag: Callable[[str], object]
    state: Any = None


Service = Callable[[dict[str, Any], Caller], Awaitable[Any]]
"""Takes a JSON object and returns a JSON-like value. An InputError is shown to the agent. A
ServiceError, or any other exception, is the server's failure, and the rollout is retried."""


class Services(dict[str, Service]):
    """Services by name, with the state of each rollout, their counters and what they showed.

        def services(self):
            return nullcontext(Services({"guess": guess}, state=lambda task: Game(task.hidden)))

    Args:
        state: makes what one attempt at a task keeps on the server: a game, a simulated user. It is
            called at the attempt's first request to a service, which finds the state, as all later
            ones do, in `caller.state`. If it is an async context manager, it is entered then, left
            when the attempt has ended and none of its requests runs any more, and `caller.state` is
            what it returns. It must not block the server's event loop.
        counts: returns the number of requests since the start, by name, for `/metrics`.
        shown: returns what the rollouts of a group (by id) were shown, JSON-like. It is stored
            with the group so that a later run can be compared. Called once a group, at its end; may
            be async.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        *,
        state: Callable[[Task], Any] | None = None,
        counts: Callable[[], Mapping[str, float]] = dict,
        shown: Callable[[str], dict[str, Any] | Awaitable[dict[str, Any]]] = lambda group_id: {},
    ) -> None:
        super().__init__(services)
        self.state = state
        self.counts = counts
        self.shown = shown
