"""All measurements of a server: what `/metrics`, `/v1/series`, alarms, `top` and the page read.

A source returns the values of some by name (`Reading`); this table says what each is and how it is
shown. Nothing is counted twice: what a part counts already is read from it when it is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .numbers import SECONDS, Counts, Distribution, Labelled

T = TypeVar("T")
Values = float | Distribution | Mapping[Any, float] | Mapping[Any, Distribution]
"""One value, or one by its label (by its labels in order, where there are several)."""
Reading = Mapping[str, Values]
"""Values by the name of their measurement."""

_TENTHS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_TURNS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 32.0, 64.0, 128.0)


class Measure(msgspec.Struct, frozen=True):
    """A measurement; `bounds` are those of a histogram that a `Meter` keeps."""

    kind: str
    words: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = SECONDS


_BOUNDS: Final = {"reward": _TENTHS, "group_deviation": _TENTHS[:6], "rollout_turns": _TURNS}


def _declared(table: str) -> dict[str, Measure]:
    """Reads a table with lines of the form `kind name{label,label} words`."""
    lines = re.findall(r"^(\w+) (\w+)(?:\{(.+?)\})? (.+)$", table, re.MULTILINE)
    return {
        name: Measure(
            kind, words, tuple(filter(None, labels.split(","))), _BOUNDS.get(name, SECONDS)
        )
        for kind, name, labels, words in lines
    }


_KEPT: Final = _declared("""
counter rollouts{environment,end} Finished rollouts by outcome
counter failed_attempts{environment,kind} Failed attempts
histogram reward{environment,agent} Rewards in delivered groups
histogram group_deviation{environment} Standard deviation of the rewards of a delivered group
counter groups_equal{environment} Groups, delivered or not, whose rewards are all equal
counter groups_alike{environment,alike} Groups whose rollouts all say the same, or whose rewards \
are all at a bound
counter groups_delivered{environment} Groups made durable
counter groups_dropped{environment,reason} Groups not delivered
histogram rollout_seconds{environment} From start to result
histogram rollout_turns{environment} Turns of a scored rollout
counter tool_errors{environment} Failed tool calls of rollouts in delivered groups
counter tokens{environment,kind} Tokens of scored rollouts
counter tokens_cost{environment,currency} Cost of the tokens of scored rollouts
counter flags{flag} Rollouts by flag of their tokens
counter untrained_tokens{environment,flag} Sampled tokens that flags mask or drop
gauge untrained_share{environment} Share of the sampled tokens of the latest groups that flags \
mask or drop
gauge tasks_solved_share{environment} Share of recently scored tasks solved more often than not
histogram engine_seconds{path} Duration of answered calls
counter engine_errors{kind} Calls that failed
gauge engine_calls Calls not answered yet
gauge calls_at_engine Agents' calls in flight
gauge calls_waiting Calls held by a pause
gauge paused 1 while calls are paused
gauge policy_version Last published version, -1 before any
gauge replica_calls{replica} Calls in flight at this replica
gauge replica_limit{replica} Maximum number of calls in flight at this replica
gauge replica_waiting{replica} Calls waiting for this replica
gauge replica_breaker{replica} 0: used, 1: on trial, 2: set aside
gauge replica_version{replica} Policy version of its weights, -1 if not known
gauge replica_standing{replica,standing} 1 for how this replica is used
gauge engines{standing} Replicas by how they are used
gauge workers{environment} Worker processes alive
gauge rollouts_running{environment} Rollouts in workers
counter worker_deaths{environment,kind} Worker deaths by kind
gauge sandboxes{environment} Open sandboxes of agents
gauge joined_environments{environment,standing} Environments on other machines: present, silent, \
gone
gauge joined_open_groups{environment} Groups in progress on other machines
counter stored_groups{environment} Groups stored, of this server's rollouts and others'
counter stored_equal_groups{environment} Stored groups whose rewards are all equal
counter stored_tokens{environment} Sampled tokens in stored groups
histogram stored_reward{environment} Rewards in stored groups
gauge groups{state} Groups of the shared queue by state
gauge queue_depth{run} Groups queued or leased for each open run
counter leases{end} Leases by outcome (expired: since the store was created)
counter nacks{reason} Leases given back, by reason
histogram staleness_versions Versions behind the policy, per leased group
counter store_events{event} Events counted since the store was created
histogram store_commit_seconds From the first statement until durable
gauge store_waiting Operations waiting for a commit
gauge loop_lag_p99_seconds 99th percentile of the delay over the last minute
gauge part_ready{part} 1 if it was ready when last checked
gauge children_resident_bytes Resident memory of the child processes
gauge followers Servers that follow this one
""")
"""Those whose curves a server keeps for weeks."""
MEASURES: Final[Mapping[str, Measure]] = _KEPT | _declared("""
counter reward_points{environment,agent,sign} Sum of the positive, or of the negative, rewards in \
delivered groups
counter groups_again{environment} Groups of tasks re-sampled by the curriculum
counter tasks_passed_over{environment} Tasks skipped as solved too often or never
gauge tasks_remembered{environment} Tasks that the curriculum may re-sample
gauge evaluation{environment,measure} Results of the last evaluation of the held-out split
gauge evaluation_policy_version Policy version at the start of the last evaluation, -1 before any
gauge evaluation_other_versions Rollouts of the last evaluation with tokens of another version
gauge evaluation_running 1 while an evaluation runs
counter evaluations{end} Evaluations by outcome; skipped: not started
counter judge_calls{end} Calls to the judge by outcome
counter judge_again Calls repeated because an answer could not be read
counter judge_tokens{kind} Tokens of the judge's engine
counter judge_cost{currency} Cost of the judge's tokens
histogram proxy_added_seconds{environment} Proxy time of answered calls, without the engine's (no \
streams)
gauge proxy_connections{environment} Open connections of agents
counter proxy_refused{environment,bound} Requests refused by a limit of one rollout
counter egress_requests{environment,end} Requests of agents to hosts outside by outcome
counter egress_bytes{environment} Bytes to and from hosts outside
counter worker_restarts{environment} Workers replaced
counter services{count} Counters of the environments' services
gauge sandbox_machine_up{machine} 1 while it answers
gauge sandbox_machine_places{machine} Maximum sandboxes
gauge sandbox_machine_open{machine} Its open sandboxes, of all clients
gauge sandbox_machine_waiting{machine} Requests waiting for a sandbox, of all clients
gauge sandbox_machine_own{machine} Sandboxes of this process there, with requested ones
counter sandbox_machine_events{machine,event} opened: sandboxes; unreachable, lost: failures of \
the machine
gauge joined_capacity_groups{environment} Groups that present runners can make at a time
gauge joined_wanted_groups{environment} Groups that they should make at a time for the \
trainers; scale runners by it
gauge deliveries{queue,environment,state} Groups by queue, environment and state
counter groups_set_aside{reason} Groups that trainers set aside, by reason
histogram store_commit_operations Operations in one commit
gauge build_info{version,python} Version and build of this server
gauge threads Threads of the server's process
gauge children Processes below the server's
gauge children_cpu_seconds CPU time of the live ones together; falls when one ends
counter http_requests{method,route,status} Requests answered, by route
histogram http_request_seconds{route} Seconds from request to end of response, including long polls
histogram loop_lag_seconds Delay of a task that wakes every 50 ms
gauge ready 1 while every part works
gauge leader 1 if this server leads those that share its store, 0 if it follows
gauge alarms{name} Active alarms by name
gauge sandboxes_open Open sandboxes
gauge sandboxes_waiting Requests waiting for a sandbox
gauge sandboxes_limit Maximum sandboxes
counter sandbox_programs{end} Programs by outcome
gauge sandbox_programs_running Programs running
gauge sandbox_programs_queued Programs waiting
gauge sandbox_programs_limit Maximum programs at a time
counter sandbox_programs_cpu_seconds CPU seconds of programs
""")
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


def of_each(items: Mapping[str, T], **values: Callable[[T], Any]) -> dict[str, dict[str, Any]]:
    """Returns measurements that have a value of each item, by the item's name."""
    return {
        name: {key: value(item) for key, item in items.items()} for name, value in values.items()
    }


class Meter:
    """The counts that a part keeps, by the names of their measurements."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, Counts | Labelled] = {
            name: Labelled(measure.bounds) if measure.kind == "histogram" else Counts()
            for name in names
            for measure in [MEASURES[name]]
        }

    def counts(self, name: str) -> Mapping[tuple[str, ...], float]:
        found = self.values[name]
        assert isinstance(found, Counts)
        return found

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
