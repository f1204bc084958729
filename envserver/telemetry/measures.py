"""All measurements of a server: what `/metrics`, `/v1/series`, alarms, `top` and the page read.

A source returns the values of some by name (`Reading`); this table says what each is and how it is
shown. Nothing is counted twice: what a part counts already is read from it when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .numbers import SECONDS, Counts, Distribution, Labelled

Values = float | Distribution | Mapping[Any, float] | Mapping[Any, Distribution]
"""One value, or one by its label (by its labels in order, where there are several)."""
Reading = Mapping[str, Values]
"""Values by the name of their measurement."""

_TENTHS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_TURNS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 32.0, 64.0, 128.0)


class Measure(msgspec.Struct, frozen=True):
    """A measurement; `bounds` are those of a histogram that a `Meter` keeps."""

    kind: Literal["counter", "gauge", "histogram"]
    words: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = SECONDS


def _counter(words: str, *labels: str) -> Measure:
    return Measure("counter", words, labels)


def _gauge(words: str, *labels: str) -> Measure:
    return Measure("gauge", words, labels)


def _histogram(words: str, *labels: str, bounds: tuple[float, ...] = SECONDS) -> Measure:
    return Measure("histogram", words, labels, bounds)


_KEPT: Final = {
    # rollouts
    "rollouts": _counter("Finished rollouts by outcome", "environment", "end"),
    "failed_attempts": _counter("Failed attempts", "environment", "kind"),
    "reward": _histogram("Rewards in delivered groups", "environment", "agent", bounds=_TENTHS),
    "group_deviation": _histogram(
        "Standard deviation of the rewards of a delivered group", "environment", bounds=_TENTHS[:6]
    ),
    "groups_equal": _counter(
        "Groups, delivered or not, whose rewards are all equal", "environment"
    ),
    "groups_alike": _counter(
        "Groups whose rollouts all say the same, or whose rewards are all at a bound",
        "environment",
        "alike",
    ),
    "groups_delivered": _counter("Groups made durable", "environment"),
    "groups_dropped": _counter("Groups not delivered", "environment", "reason"),
    "rollout_seconds": _histogram("From start to result", "environment"),
    "rollout_turns": _histogram("Turns of a scored rollout", "environment", bounds=_TURNS),
    "tokens": _counter("Tokens of scored rollouts", "environment", "kind"),
    "tokens_cost": _counter("Cost of the tokens of scored rollouts", "environment", "currency"),
    "flags": _counter("Rollouts by flag of their tokens", "flag"),
    "untrained_tokens": _counter("Sampled tokens that flags mask or drop", "environment", "flag"),
    "untrained_share": _gauge(
        "Share of the sampled tokens of the latest groups that flags mask or drop", "environment"
    ),
    "tasks_solved_share": _gauge(
        "Share of recently scored tasks solved more often than not", "environment"
    ),
    # engine
    "engine_seconds": _histogram("Duration of answered calls", "path"),
    "engine_errors": _counter("Calls that failed", "kind"),
    "engine_calls": _gauge("Calls not answered yet"),
    "calls_at_engine": _gauge("Agents' calls in flight"),
    "calls_waiting": _gauge("Calls held by a pause"),
    "paused": _gauge("1 while calls are paused"),
    "policy_version": _gauge("Last published version, -1 before any"),
    "replica_calls": _gauge("Calls in flight at this replica", "replica"),
    "replica_limit": _gauge("Maximum number of calls in flight at this replica", "replica"),
    "replica_waiting": _gauge("Calls waiting for this replica", "replica"),
    "replica_breaker": _gauge("0: used, 1: on trial, 2: set aside", "replica"),
    "replica_version": _gauge("Policy version of its weights, -1 if not known", "replica"),
    "replica_standing": _gauge("1 for how this replica is used", "replica", "standing"),
    "engines": _gauge("Replicas by how they are used", "standing"),
    # environments
    "workers": _gauge("Worker processes alive", "environment"),
    "rollouts_running": _gauge("Rollouts in workers", "environment"),
    "worker_deaths": _counter("Worker deaths by kind", "environment", "kind"),
    "sandboxes": _gauge("Open sandboxes of agents", "environment"),
    "joined_environments": _gauge(
        "Environments on other machines: present, silent, gone", "environment", "standing"
    ),
    "joined_open_groups": _gauge("Groups they make", "environment"),
    # store
    "stored_groups": _counter(
        "Groups stored, of this server's rollouts and others'", "environment"
    ),
    "stored_equal_groups": _counter("Stored groups whose rewards are all equal", "environment"),
    "stored_tokens": _counter("Sampled tokens in stored groups", "environment"),
    "stored_reward": _histogram("Rewards in stored groups", "environment"),
    "groups": _gauge("Groups of the shared queue by state", "state"),
    "queue_depth": _gauge("Groups queued or leased for each open run", "run"),
    "leases": _counter("Leases by outcome (expired: since the store was created)", "end"),
    "nacks": _counter("Leases given back, by reason", "reason"),
    "staleness_versions": _histogram("Versions behind the policy, per leased group"),
    "store_events": _counter("Events counted since the store was created", "event"),
    "store_commit_seconds": _histogram("From the first statement until durable"),
    "store_waiting": _gauge("Operations waiting for a commit"),
    # server
    "loop_lag_p99_seconds": _gauge("99th percentile of the delay over the last minute"),
    "part_ready": _gauge("1 while it is, as last seen", "part"),
    "children_resident_bytes": _gauge("Resident memory of the child processes"),
    "followers": _gauge("Servers that follow this one"),
}
"""Those whose curves a server keeps for weeks."""
MEASURES: Final[Mapping[str, Measure]] = {
    **_KEPT,
    # rollouts
    "reward_points": _counter(
        "Sum of the positive, or of the negative, rewards in delivered groups",
        "environment",
        "agent",
        "sign",
    ),
    "groups_again": _counter("Groups of tasks re-sampled by the curriculum", "environment"),
    "tasks_passed_over": _counter("Tasks skipped as solved too often or never", "environment"),
    "tasks_remembered": _gauge("Tasks that the curriculum may re-sample", "environment"),
    "evaluation": _gauge(
        "Results of the last evaluation of the held-out split", "environment", "measure"
    ),
    "evaluation_policy_version": _gauge(
        "Policy version at the start of the last evaluation, -1 before any"
    ),
    "evaluation_other_versions": _gauge(
        "Rollouts of the last evaluation with tokens of another version"
    ),
    "evaluation_running": _gauge("1 while an evaluation runs"),
    "evaluations": _counter("Evaluations by how they ended; skipped: not begun", "end"),
    "judge_calls": _counter("Calls to the judge by what answered them", "end"),
    "judge_again": _counter("Calls repeated because an answer could not be read"),
    "judge_tokens": _counter("Tokens of the judge's engine", "kind"),
    "judge_cost": _counter("Cost of the judge's tokens", "currency"),
    # environments
    "proxy_added_seconds": _histogram(
        "Proxy time of answered calls, without the engine's (no streams)", "environment"
    ),
    "proxy_connections": _gauge("Open connections of agents", "environment"),
    "proxy_refused": _counter(
        "What was refused to agents over a bound of one rollout", "environment", "bound"
    ),
    "egress_requests": _counter(
        "Requests of agents to hosts outside by how they ended", "environment", "end"
    ),
    "egress_bytes": _counter("Bytes to and from hosts outside", "environment"),
    "worker_restarts": _counter("Workers replaced", "environment"),
    "services": _counter("Counters of the environments' services", "count"),
    "sandbox_machine_up": _gauge("1 while it answers", "machine"),
    "sandbox_machine_places": _gauge("Maximum sandboxes", "machine"),
    "sandbox_machine_open": _gauge("Its open sandboxes, of all clients", "machine"),
    "sandbox_machine_waiting": _gauge("Requests for one, of all clients", "machine"),
    "sandbox_machine_own": _gauge(
        "Sandboxes of this process there, with those that are wanted", "machine"
    ),
    "sandbox_machine_events": _counter(
        "opened: sandboxes; unreachable, lost: failures of the machine", "machine", "event"
    ),
    "joined_capacity_groups": _gauge(
        "Groups that those present could make at a time", "environment"
    ),
    "joined_wanted_groups": _gauge(
        "Groups that trainers would have them make at a time; scale runners by it", "environment"
    ),
    # store
    "deliveries": _gauge("Groups by queue, environment and state", "queue", "environment", "state"),
    "groups_set_aside": _counter("Groups that trainers set aside, by reason", "reason"),
    "store_commit_operations": _histogram("Operations in one commit"),
    # server
    "build_info": _gauge("Version and build of this server", "version", "python"),
    "threads": _gauge("Threads of the server's process"),
    "children": _gauge("Processes below the server's"),
    "children_cpu_seconds": _gauge("CPU time of those that live, together; falls when one ends"),
    "http_requests": _counter("Requests answered, by route", "method", "route", "status"),
    "http_request_seconds": _histogram(
        "Seconds from request to end of response, long polls included", "route"
    ),
    "loop_lag_seconds": _histogram("Delay of a task that wakes every 50 ms"),
    "ready": _gauge("1 while every part works"),
    "leader": _gauge("1 if this server leads those that share its store, 0 if it follows"),
    "alarms": _gauge("Active alarms by name", "name"),
    # a machine for sandboxes
    "sandboxes_open": _gauge("Open sandboxes"),
    "sandboxes_waiting": _gauge("Requests for one"),
    "sandboxes_limit": _gauge("Maximum sandboxes"),
    "sandbox_programs": _counter("Programs by how they ended", "end"),
    "sandbox_programs_running": _gauge("Programs that run"),
    "sandbox_programs_queued": _gauge("Programs that wait for room"),
    "sandbox_programs_limit": _gauge("Maximum programs at a time"),
    "sandbox_programs_cpu_seconds": _counter("CPU seconds of programs"),
}
"""By name, which begins with `envserver_` at `/metrics`; docs/observing.md lists them for users."""

_SUFFIXES: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_sum", "_count")}


def samples_of(name: str) -> list[str]:
    """The names of the samples of a measurement (of a histogram: its sum and its count)."""
    return [f"envserver_{name}{suffix}" for suffix in _SUFFIXES[MEASURES[name].kind]]


KEPT: Final = frozenset(
    ["process_resident_memory_bytes", "process_cpu_seconds_total"]
    + [sample for name in _KEPT for sample in samples_of(name)]
)
"""Names of the samples whose curves are kept."""


class Meter:
    """What a part counts itself, by the names of its measurements."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, Counts | Labelled] = {
            name: Labelled(measure.bounds) if measure.kind == "histogram" else Counts()
            for name in names
            for measure in [MEASURES[name]]
        }

    def add(self, name: str, *labels: str, value: float = 1) -> None:
        self.values[name].add(labels, value)

    async def read(self) -> Reading:
        return self.values


def families(reading: Reading) -> Iterator[Metric]:
    for name, values in reading.items():
        measure = MEASURES[name]
        shown = f"envserver_{name}", measure.words
        each: Mapping[Any, Any] = values if isinstance(values, Mapping) else {(): values}
        labelled = [
            ((key,) if isinstance(key, str) else key, value) for key, value in sorted(each.items())
        ]
        if measure.kind == "histogram":
            histogram = HistogramMetricFamily(*shown, labels=measure.labels)
            for labels, value in labelled:
                histogram.add_metric(labels, _buckets(value), value.total)
            yield histogram
            continue
        kind = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
        family = kind(*shown, labels=measure.labels)
        for labels, value in labelled:
            family.add_metric(labels, float(value))
        yield family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    buckets, below = [], 0
    bounds = [*map(str, map(float, distribution.bounds)), "+Inf"]
    for bound, count in zip(bounds, distribution.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets
