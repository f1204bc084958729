"""Alarms in words: none in a healthy run, each in one sentence, none that flaps."""

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import structlog
from envserver_records.errors import StoreError
from support.api import running_api
from support.waiting import until

from envserver.http.health import Metrics
from envserver.settings.server import AlarmsConfig
from envserver.store import open_store
from envserver.telemetry.alarm_facts import Alarm, AlarmFacts
from envserver.telemetry.alarms import AlarmBook
from envserver.telemetry.history import MOST_NAMES, History, Name, curves
from envserver.telemetry.measures import Reading
from envserver.trainers.status import AlarmWatch, Recorder

START = 1_700_000_000.0


class Run:
    """A run whose numbers are written by hand, every ten seconds of its own clock."""

    def __init__(self, facts: AlarmFacts | None = None, **config: Any) -> None:
        self.now = START
        self.history = History(720)
        self.numbers: Counter[Name] = Counter()
        self.facts = facts or AlarmFacts()
        self.watch = AlarmWatch(AlarmsConfig(**config), lambda: self.facts)

    def add(self, name: str, count: float = 1.0, **labels: str) -> None:
        """Adds to a number of the environment `code`."""
        self.numbers[_name(name, labels)] += count

    def set(self, name: str, value: float, **labels: str) -> None:
        self.numbers[_name(name, labels)] = value

    def restart(self) -> None:
        """The server starts again: it counts from 0."""
        self.numbers.clear()

    async def step(self, *, check: bool = True) -> dict[str, str]:
        """Records the numbers of now and returns the sentences of the active alarms."""
        self.now += 10
        self.history.add(self.now, dict(self.numbers))
        if check:
            await self.watch.check(self.now, self.history)
        return {one.name: one.text for one in self.watch.book.active}

    async def steps(self, count: int, *, quiet: bool = False) -> dict[str, str]:
        """The sentences after the last of so many steps; where it is quiet, no step has any."""
        for _ in range(count):
            sentences = await self.step()
            assert not (quiet and sentences), sentences
        return sentences

    def group(
        self,
        rewards: list[float],
        tokens: float = 800,
        environment: str = "code",
        agent: str = "",
    ) -> None:
        """Counts a group as the server does."""
        of = {"environment": environment}
        for _ in rewards:
            self.add("rollouts_total", end="scored", **of)
            self.add("tokens_total", tokens, kind="completion", **of)
            self.add("rollout_seconds_sum", 40, **of)
            self.add("rollout_seconds_count", **of)
        if len(set(rewards)) == 1:
            self.add("groups_equal_total", **of)
            self.add("groups_dropped_total", reason="zero_variance", **of)
            if rewards[0] in (0, 1):
                self.add("groups_alike_total", alike=("lowest", "highest")[int(rewards[0])], **of)
            return
        self.add("groups_delivered_total", **of)
        self.add("reward_sum", sum(rewards), agent=agent, **of)
        self.add("reward_count", len(rewards), agent=agent, **of)


def _name(name: str, labels: dict[str, str]) -> Name:
    return Name.of(f"envserver_{name}", labels)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(one, marks=pytest.mark.thorough) for one in (1, 2))]
)
async def test_a_healthy_run_of_thousands_of_groups_raises_nothing(seed: int) -> None:
    """Two hours: rewards rise slowly, answers vary, some rollouts are lost or cut, weights are
    updated, trainers take a batch every few minutes, and the server is started again once."""
    rng = random.Random(seed)
    run = Run(AlarmFacts(groups_wanted=16, audited=400, differing=1))
    seen: dict[str, str] = {}
    waiting = 0
    for row in range(720):
        for environment, level in (("code", 0.3), ("math", 0.6)):
            for _ in range(rng.randrange(2, 5)):
                chance = min(0.95, max(0.02, rng.gauss(level + 0.2 * row / 720, 0.25)))
                rewards = [float(rng.random() < chance) for _ in range(8)]
                run.group(rewards, rng.lognormvariate(6.5, 0.6), environment)
                waiting += len(set(rewards)) > 1
            of = {"environment": environment}
            run.add("failed_attempts_total", rng.random() < 0.3, kind="engine_timeout", **of)
            run.add("rollouts_total", rng.random() < 0.2, end="lost", **of)
            run.add("rollouts_total", rng.randrange(4), end="limit_tokens", **of)
            run.add("worker_deaths_total", row % 300 == 7, kind="worker_died", **of)
            run.set("untrained_share", 0.03 * rng.random(), **of)
            run.set("rollouts_running", 64, **of)
            run.set("workers", 2, **of)
        if row % 30 == 29:  # a step of the trainer takes five minutes
            run.add("leases_total", end="leased")
            run.add("groups_dropped_total", rng.randrange(4), environment="code", reason="stale")
            run.set("policy_version", row // 30)
            waiting = 0
        run.set("paused", row % 30 == 0)
        run.set("groups", waiting, state="queued")
        run.add("store_commit_seconds_sum", 0.3)
        run.add("store_commit_seconds_count", 10)
        run.set("replica_breaker", 0, replica="http://a:8000")
        if row == 400:
            run.restart()
        seen |= await run.step(check=row % 10 < 2)
    assert seen == {}


async def test_answers_that_grow_for_nothing_are_told_and_those_that_pay_are_not() -> None:
    paid, unpaid = Run(), Run()
    for row in range(200):
        for run, reward in ((paid, min(7, 2 + row // 40)), (unpaid, 3)):
            run.group([1.0] * reward + [0.0] * (8 - reward), 400 + 4 * row)
            await run.step(check=row > 195)
    assert paid.watch.book.active == []
    (alarm,) = unpaid.watch.book.active
    assert alarm.text.startswith("The answers of code grow longer, from 502 to 1,")


@pytest.mark.parametrize(("agent", "whose"), [("", "code"), ("solver", "code (solver)")])
async def test_a_reward_that_falls_is_told_until_it_is_good_again(agent: str, whose: str) -> None:
    run, said = Run(), []
    for version, solved, groups in ((6, 7, 60), (7, 1, 25), (8, 7, 30)):
        run.set("policy_version", version)
        for _ in range(groups):
            run.group([1.0] * solved + [0.0] * (8 - solved), agent=agent)
            said.append((await run.step()).get("reward_fell", ""))
    assert not any(said[:60])
    assert said[84] == f"The reward of {whose} fell from 0.88 to 0.12 since version 7."
    assert not said[-1]


RECENTLY = "in the last 20 seconds"
STALE = f"were dropped as stale {RECENTLY}"


@pytest.mark.parametrize(
    ("name", "value", "labels", "sentence"),
    [
        ("rollouts_total", 30, {"end": "limit_turns"},
         f"50 % of the rollouts of code (30 of 60 {RECENTLY}) end at a limit, most at the limit of "
         "turns (env.max_turns)."),
        ("flags_total", 15, {"flag": "truncated_length"},
         f"50 % of the rollouts (15 of 30 {RECENTLY}) have an answer that is cut off at its limit "
         "of tokens (sampling.max_tokens)."),
        ("groups_dropped_total", 30, {"reason": "stale"},
         f"30 groups of 60 {STALE}: rollouts take too long for the trainer's versions."),
        ("store_events_total", 20, {"event": "stale_dropped"},
         f"20 groups of 30 {STALE}: the trainer takes them too slowly."),
    ],
)  # fmt: skip
async def test_what_is_cut_or_stale_is_told(
    name: str, value: float, labels: dict[str, str], sentence: str
) -> None:
    run = Run()
    await run.step()
    run.add("rollouts_total", 30, end="scored", environment="code")
    run.add("groups_delivered_total", 30, environment="code")
    run.add(name, value, environment="code", **labels)
    assert [*(await run.steps(2)).values()] == [sentence]


async def test_what_needs_facts_is_told() -> None:
    broken = {"engine": "no answer within 2 seconds", "disk": "full"}
    run = Run(AlarmFacts(audited=40, differing=30, broken=broken))
    run.set("policy_version", 5)
    run.set("replica_breaker", 2, replica="http://name:secret@a:8000")
    run.set("joined_environments", 1, environment="code", standing="silent")
    for number in range(100):
        run.group([1.0] * 8)
        if number == 49:
            await run.step()
    run.add("groups_delivered_total", environment="code")
    run.add("groups_alike_total", alike="highest", environment="code")
    run.add("flags_total", 7, flag="weights_lost")
    assert await run.steps(2) == {
        "disk_full": "The disk of the store is full: new groups are refused.",
        "engine_down": "The engine does not answer: no answer within 2 seconds.",
        "logprobs_differ": "The logprobs of 75 % of the audited rows (30 of 40) differ from what "
        "the engine computes again.",
        "old_weights": "The engine serves older weights than those of version 5, which were "
        "published: it was restarted. 7 rollouts in the last 20 seconds are not delivered.",
        "reward_always_highest": "The reward of code is always 1 (51 groups in the last 20 "
        "seconds): its tasks are too easy, or the policy hacks the reward.",
        "runners_silent": "1 runner of code on another machine is silent.",
    }
    run.facts = AlarmFacts()
    assert (await run.steps(3))["engine_down"] == (
        "The replica http://a:8000 of the engine is set aside after failures (1 of 1)."
    )


async def test_conversations_that_are_not_continued_are_told_with_the_first_message() -> None:
    first = "messages[0], role user, content: parts text, text (rollout a/0)"
    run = Run(AlarmFacts(differs_at=first))
    await run.step()
    for split in (0, 0, 1, 3, 3, 3):
        run.group([1.0, 0.0] * 5)
        run.add("flags_total", split, flag="render_mismatch")
        sentences = await run.step()
    said = "10 of 60 in the last 1 minute) have a row for each call (render_mismatch)"
    assert sentences == {
        "conversations_split": f"17 % of the rollouts ({said}; the engine first rendered "
        f"differently at {first}."
    }


async def test_engines_that_get_no_calls_are_told_of() -> None:
    run = Run()
    run.set("engines", 1, standing="used")
    run.set("engines", 1, standing="old")
    await run.steps(60, quiet=True)
    said = {"engines_unused": "Engines have received no calls for 10 minutes: 1 old."}
    assert await run.steps(5) == said
    run.set("engines", 0, standing="used")
    said = {"engines_unused": "Calls wait, since no engine can be used: 1 old."}
    assert await run.steps(12) == said
    run.set("engines", 1, standing="used")
    run.set("engines", 0, standing="old")
    assert await run.steps(5) == {}


async def test_first_rollouts_that_take_long_do_not_hang_while_calls_are_answered() -> None:
    run = Run()
    run.set("rollouts_running", 8, environment="code")
    for _ in range(90):
        run.add("engine_seconds_count", path="/v1/chat/completions")
        await run.steps(1, quiet=True)
    said = {"rollouts_hang": "No rollout of code has ended for 25 minutes, while 8 rollouts run."}
    assert await run.steps(62) == said


async def test_workers_that_the_model_ends_are_not_told_as_deaths() -> None:
    run = Run(off=["rollouts_cut"])
    for deaths in (1, 1, 1, 1, 5):
        run.add("worker_deaths_total", deaths, kind="worker_died", environment="code")
        run.add("rollouts_total", 1, end="limit_crash", environment="code")
        run.add("rollouts_total", 20, end="scored", environment="code")
        await run.steps(1, quiet=True)
    for _ in range(4):
        run.add("worker_deaths_total", kind="worker_died", environment="code")
        sentences = await run.step()
    said = {"workers_die": "8 workers of code died in the last 80 seconds (worker_died)."}
    assert sentences == said


def test_an_alarm_that_comes_and_goes_is_not_told_each_time() -> None:
    book, heard = AlarmBook(), []
    book.listeners.append(lambda alarm, begins: heard.append((alarm.name, begins)))
    found = [Alarm(name="no_trainer", severity="warning", text="Nobody.")]
    with structlog.testing.capture_logs() as lines:
        for row in range(200):
            book.update(START + 10 * row, found if row % 4 else [])
        assert heard == [("no_trainer", True)]  # a single check without it does not end it
        for row in range(200, 400):
            book.update(START + 10 * row, found if row % 20 < 10 else [])
    assert len(heard) == 20
    assert 2 < len([line for line in lines if line["event"] == "alarm_began"]) < 8


async def test_alarms_go_on_after_a_restart_and_the_route_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, now = tmp_path / "s.db", [START]
    metrics = Metrics()
    metrics.add(AsyncMock(return_value={"groups": {"queued": 5.0}}))  # no trainer comes
    for steps in (30, 12):  # of a minute
        watch = AlarmWatch(AlarmsConfig(no_trainer_minutes=15))
        async with open_store(place) as store:
            recorder = Recorder(metrics, store, lambda: now[0], watch.check)
            await recorder.load()
            for _ in range(steps):
                now[0] += 60
                await recorder.record()
    (alarm,) = watch.book.active
    assert alarm.text == "No trainer has leased for 41 minutes, while 5 groups wait."
    assert alarm.since == pytest.approx(START + 60, abs=60)
    watch = AlarmWatch(AlarmsConfig(no_trainer_minutes=0))
    monkeypatch.setattr(Recorder, "run", Recorder.load)  # else it checks now and then, too
    async with running_api(tmp_path / "t.db", metrics=metrics, alarms=watch) as api:
        assert (await api.get("/v1/alarms"))["alarms"] == []
        for at in (START, START + 1):
            history = History(2)
            history.add(at, {Name("envserver_groups", (("state", "queued"),)): 5.0})
            await watch.check(at, history)
        found = await api.get("/v1/alarms")
        assert found["checked_at"] == START + 1
        assert [(one["name"], one["since"]) for one in found["alarms"]] == [("no_trainer", START)]
        assert 'envserver_alarms{name="no_trainer"} 1.0' in (await api.http.get("/metrics")).text


async def test_alarms_can_be_turned_off_and_a_broken_rule_stops_none() -> None:
    run = Run(AlarmFacts(broken={"engine": ""}), off=["disk_full"], disk_free_gb=np.inf)
    run.facts = AlarmFacts(broken={"engine": "", "disk": ""}, audited="many")  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as lines:
        assert await run.steps(3) == {"engine_down": "The engine does not answer."}
    failed = [one["rule"] for one in lines if one["event"] == "alarm_rule_failed"]
    assert failed == ["logprobs_differ"]


# The server's numbers over time: in memory for hours, in the store for weeks

DELIVERED = Name("envserver_groups_delivered_total", (("environment", "math"),))


class Server:
    """What a server counts, and its clock."""

    def __init__(self) -> None:
        self.now, self.delivered = 6_000_000.0, 0.0
        self.metrics = Metrics()
        self.metrics.add(self.read)

    async def read(self) -> Reading:
        return {"groups_delivered": {"math": self.delivered}, "worker_restarts": {"math": 1}}

    async def record(self, recorder: Recorder, *, after: float, delivered: float) -> None:
        self.now += after
        self.delivered = delivered
        await recorder.record()


async def test_minutes_survive_a_restart_and_come_before_what_memory_has(where: str) -> None:
    server = Server()
    async with open_store(where) as store:
        recorder = Recorder(server.metrics, store, lambda: server.now)
        for after, delivered in ((0, 1), (10, 2), (50, 3), (30, 4)):
            await server.record(recorder, after=after, delivered=delivered)
        rows = await recorder.between(server.now - 3600, server.now, 100)
        assert [numbers[DELIVERED] for _, numbers in rows] == [1, 2, 3, 4]
        assert {one.name for one in rows[0][1]} > {"process_cpu_seconds_total", DELIVERED.name}
        assert "envserver_worker_restarts_total" not in {one.name for one in rows[0][1]}
    async with open_store(where) as store:
        recorder = Recorder(server.metrics, store, lambda: server.now)
        await server.record(recorder, after=60, delivered=5)
        rows = await recorder.between(server.now - 3600, server.now, 100)
        assert [numbers[DELIVERED] for _, numbers in rows] == [1, 3, 5]
        later = await recorder.between(rows[1][0], server.now, 100)
        assert [numbers[DELIVERED] for _, numbers in later] == [3, 5]
        await server.record(recorder, after=30 * 24 * 3600, delivered=6)
        left = await store.minutes_between(0, int(server.now // 60), 1)
        assert len(left) == 2  # the minute thirty days ago, and this one


async def test_a_minute_that_the_store_refuses_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_minute(*_: object) -> None:
        raise StoreError("The disk is full.")

    server = Server()
    async with open_store(str(tmp_path / "s.db")) as store:
        monkeypatch.setattr(store, "put_minute", put_minute)
        recorder = Recorder(server.metrics, store, lambda: server.now)
        await server.record(recorder, after=0, delivered=1)
        assert len(await recorder.between(server.now - 3600, server.now, 10)) == 1


async def test_the_route_answers_curves(tmp_path: Path) -> None:
    async with running_api(tmp_path / "s.db", metrics=Server().metrics) as api:
        path = f"/v1/series?names={DELIVERED.name}"

        async def is_recorded() -> bool:
            return bool((await api.get(path))["series"])

        await until(is_recorded)
        found = await api.get(path)
        (one,) = found["series"]
        assert (one["name"], one["labels"]) == (DELIVERED.name, {"environment": "math"})
        assert set(one["values"]) == {0.0} and len(one["values"]) == len(found["times"])
        assert (await api.get("/v1/series?end=5"))["times"] == []
        assert await api.status("GET", "/v1/series?points=0") == 422


def test_curves_are_thinned_out_to_their_last_rows_and_names_are_bounded() -> None:
    history = History(100)
    for at in range(150):
        history.add(float(at), {DELIVERED: float(at), Name("late", ()): 1.0} if at > 120 else {})
    found = curves(history.between(0, 200), 3, frozenset([DELIVERED.name]))
    assert found["times"] == [50.0, 99.0, 149.0]
    assert [one["values"] for one in found["series"]] == [[None, None, 149.0]]
    history.add(200.0, {Name(str(index), ()): 0.0 for index in range(2 * MOST_NAMES)})
    assert len(history.between(200, 200)[0][1]) == MOST_NAMES - 2
