"""Routed experts from an engine to trainers and files: over HTTP, through proxy and server."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import orjson
import pytest
from envserver_clients import SyncEnvClient
from envserver_clients.adapters.skyrl import output_of
from envserver_clients.adapters.slime import samples_of
from envserver_clients.adapters.verl import outputs_of
from envserver_local.simulated.answers import Plan
from envserver_local.simulated.engine import SimEngine
from envserver_local.simulated.policy import TextSolver
from envserver_local.simulated.server import sim_app
from envserver_records.errors import ConfigError, InputError
from envserver_records.experts import experts_from, table_from_text, table_to_text
from envserver_records.records import Group, Trajectory, pack, unpack
from msgspec.structs import replace
from openai import InternalServerError
from support.beside import in_a_thread
from support.proxy_house import chat, house
from support.serving import serving
from support.trajectories import sequence, trajectory
from support.waiting import PATIENCE

import envserver
from envserver import Environment, Score, Settings, SimConfig, Task, TokensConfig
from envserver.export import group_line
from envserver.export.stored import group_of, group_record
from envserver.running.delivered import read_line
from envserver.running.engines import make_endpoint

LAYERS, EACH = 3, 2
Json = dict[str, Any]


class _Answer:
    """An answer with routed experts: [:, :, 0] is the number of the call, [:, :, 1] the position
    of the token (modulo 256)."""

    def __init__(self, answer: Any, number: int, start: int) -> None:
        self._answer, self._number, self._start = answer, number, start

    def whole(self) -> Json:
        answer: Json = self._answer.whole()
        for choice in answer["choices"]:
            prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if prompt is None:
                continue
            positions = np.arange(self._start, len(prompt) + len(choice["token_ids"]) - 1)
            table = np.zeros((len(positions), LAYERS, EACH), np.uint8)
            table[..., 0] = self._number
            table[..., 1] = (positions % 256)[:, None]
            choice["routed_experts"] = table_to_text(table)
        return answer


class RoutingSim(SimEngine):
    """Keeps in `starts` from which token on experts were asked for, call by call."""

    def __init__(self, solver: TextSolver) -> None:
        super().__init__(SimConfig(latency_seconds=0), solver)
        self.starts: list[int] = []
        self.url = ""

    def plan(self, path: str, body: Any, rollout_id: str = "") -> Plan:
        start = body.pop("routed_experts_prompt_start", 0)
        plan = super().plan(path, body, rollout_id)
        self.starts.append(start)
        answer: Any = _Answer(plan.answer, len(self.starts) % 256, start)
        return msgspec.structs.replace(plan, answer=answer)


@contextlib.contextmanager
def routing_sim(solver: TextSolver) -> Iterator[RoutingSim]:
    engine = RoutingSim(solver)
    with in_a_thread(lambda: serving(sim_app(engine))) as url:
        engine.url = f"{url}/v1"
        yield engine


ROUTED: Any = {"tokens": {"experts": True}}


class Twice(Environment):
    """Asks, and asks again in the same conversation."""

    def tasks(self, split: str) -> Any:
        for number in range(9):
            yield Task(f"t-{number}", {"word": f"word-{number}"})

    async def rollout(self, task: Any, run: Any) -> Any:
        messages = [{"role": "user", "content": task.public["word"]}]
        messages.append((await run.chat(messages)).message)
        messages.append({"role": "user", "content": "Again, please."})
        return (await run.chat(messages)).content

    def score(self, task: Any, result: Any) -> Score:
        return Score(reward=1.0)


@pytest.mark.thorough
def test_experts_of_each_turn_reach_trainers_and_files(tmp_path: Path) -> None:
    settings: Any = {"store": str(tmp_path / "groups.db"), "server": {"port": 0}, **ROUTED}
    with routing_sim(TextSolver([])) as engine:
        openai = {"base_url": engine.url, "model_name": "sim"}
        env = {"group_size": 2, "total_steps": 1, "ensure_scores_are_not_same": False}
        with envserver.serve(Twice, env=env, openai=openai, **settings) as server:
            with SyncEnvClient(server.url, run="trainer", batch_size=1) as client:
                batch = next(client.batches(idle_seconds=PATIENCE))
            (group,) = batch.groups
            shown = httpx.get(f"{server.url}/v1/groups/{group.group_id}", timeout=PATIENCE).json()
    assert len(group.rows) == 2
    for row in group.rows:
        assert row.experts is not None and row.experts.shape == (len(row.tokens) - 1, LAYERS, EACH)
        assert np.array_equal(row.experts[:, 0, 1], np.arange(len(row.tokens) - 1) % 256)
        first, second = np.unique(row.calls[row.calls >= 0])
        seam = np.flatnonzero(row.calls == first)[-1]  # the second call computed this token
        by = row.experts[:, -1, 0]
        assert len({*by[:seam].tolist()}) == len({*by[seam:].tolist()}) == 1
        assert by[seam] > by[seam - 1]
        assert seam in engine.starts and second > first
    told = [table_from_text(text) for text in shown["group"]["experts"]]
    for row, one in zip(group.rows, told, strict=True):
        assert row.experts is not None and np.array_equal(row.experts, one)
    _check_files(unpack(group.body, Group))


def _check_files(group: Group) -> None:
    form: Any = {"include_messages": True, "score_range": "unit"}
    assert "experts" not in orjson.loads(group_line(group, **form))["envserver"]
    line = orjson.loads(group_line(group, include_experts=True, **form))
    again = group_record(group_of(line, "line 1"))
    rows = [row for one in (group, again) for t in one.trajectories for row in t.sequences]
    assert [pack(row.experts) for row in rows[:2]] == [pack(row.experts) for row in rows[2:]]
    assert read_line(orjson.dumps(line), 1).findings == []
    texts = line["envserver"]["experts"]
    short = table_to_text(table_from_text(texts[1])[:3])
    for wrong in ([texts[0]], [texts[0], short], [texts[0], 7], [texts[0], "!"], {}):
        line["envserver"]["experts"] = wrong
        found = read_line(orjson.dumps(line), 1).findings
        assert ("experts", 1) in [(one.kind, one.row) for one in found]
        with pytest.raises(InputError, match="line 1"):
            group_of(line, "line 1")


def test_an_engine_that_tells_no_experts_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="returns no routed experts") as caught:
        make_endpoint(Settings(**ROUTED), SimEngine(SimConfig()))
    assert "--enable-return-routed-experts" in str(caught.value.hint)


def table(tokens: int) -> str:
    return table_to_text(np.full((tokens - 1, 2, 2), 200, np.uint8))


async def test_the_record_has_them_bounded_no_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envserver.proxy.engine_answer.MOST_BYTES", 200)
    async with house(experts=table, tokens=TokensConfig(experts=True)) as home:
        attempt, client = home.open()
        for streamed in (False, True):
            assert "routed_experts" not in str(await chat(client, streamed))
        first, second = attempt.calls
        assert 100 < first.experts.ids.nbytes <= 200 and first.flags == []
        assert second.experts is None and second.flags == ["experts_missing"]


@pytest.mark.parametrize("wrong", [lambda tokens: table(tokens - 1), lambda tokens: None])
async def test_experts_that_do_not_fit_are_the_engines_failure(wrong: Any) -> None:
    async with house(experts=wrong, tokens=TokensConfig(experts=True)) as home:
        attempt, client = home.open()
        with pytest.raises(InternalServerError):
            await chat(client.with_options(max_retries=0))
        assert attempt.calls == [] and attempt.engine_failure.kind == "engine_garbage"
        home.fake.finish = "abort"  # what the engine broke off may lack them
        await chat(client)
        assert attempt.calls[0].experts is None and "experts_missing" in attempt.calls[0].flags


def routed() -> Trajectory:
    """Two tokens of prompt, two trained, one that teaches nothing."""
    row = sequence([5, 6, 7, 8, 9], [0, 0, 1, 1, 0])
    experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    return trajectory("r", replace(row, experts=experts_from(experts)))


def test_trainers_get_them_in_their_form() -> None:
    made = routed()
    experts = made.sequences[0].experts
    assert experts is not None
    (verl,) = outputs_of(made, "one", prompt_length=9, response_length=9)
    assert np.array_equal(verl["routed_experts"], experts.table[:3])
    (cut,) = outputs_of(made, "one", prompt_length=9, response_length=1)
    assert len(cut["routed_experts"]) == 3
    skyrl = output_of([made], None, step_wise=False)["rollout_expert_indices"]
    assert skyrl == [[*experts.table[:3].tolist(), [[0, 0], [0, 0]]]]
    plain = trajectory("r", sequence([5, 6], [0, 1]))
    assert output_of([plain], None, step_wise=False)["rollout_expert_indices"] is None
    with pytest.raises(InputError, match="Some rows"):
        output_of([made, plain], None, step_wise=False)

    class Sample(SimpleNamespace):
        Status = SimpleNamespace(COMPLETED="completed", TRUNCATED="truncated")

    (slime,) = samples_of(made, Sample(metadata={}, rollout_id=None, index=0))
    assert slime.rollout_routed_experts.shape == (len(slime.tokens) - 1, 2, 2)
