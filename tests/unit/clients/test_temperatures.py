"""Rows tell trainers how they were sampled; adapters refuse what their trainer would get wrong."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from envserver_clients.adapters import slime, verl
from envserver_clients.adapters.skyrl import EnvserverGenerator
from envserver_clients.adapters.temperatures import check_spans
from envserver_clients.records import ClientGroup
from envserver_records import Trajectory
from envserver_records.sampling import SamplingSpan
from support.api import native_group
from support.trajectories import sequence, trajectory

from envserver import Group, InputError, pack
from envserver.formats.atropos import group_to_atropos

WARM = SamplingSpan(2, 5, 0.7, "processed")


def group(*spans: SamplingSpan) -> Group:
    made = native_group("g")
    for one in made.trajectories:
        for row in one.sequences:
            row.sampling = list(spans)
    return made


def rows(body: bytes, form: str) -> list[Any]:
    return ClientGroup("g", "math", form, 7, memoryview(body)).rows


@pytest.mark.parametrize("form", ["group", "atropos"])
def test_rows_say_it_over_both_wires(form: str) -> None:
    def sent(made: Group) -> bytes:
        told = group_to_atropos(made, include_messages=False)
        return pack(made) if form == "group" else json.dumps(told).encode()

    assert [row.sampling for row in rows(sent(group(WARM)), form)] == [[WARM]] * 2
    plain = rows(sent(group(SamplingSpan(2, 5, 1.0, "raw"))), form)[0].sampling
    assert all(span.is_plain for span in plain) or form == "atropos"
    # A server of an older version gives the settings of all rollouts alone.
    assert rows(sent(group()), form)[0].sampling == [SamplingSpan(0, 5, 0.7)]


def warm() -> Trajectory:
    row = sequence([1, 2, 3], [0, 1, 1])
    row.sampling = [SamplingSpan(1, 3, 0.7, "processed")]
    return trajectory("r", row)


@pytest.mark.parametrize(
    ("span", "temperature", "said"),
    [
        (WARM, 1.0, "sampled at temperature 0.7, the trainer divides by 1"),
        (msgspec.structs.replace(WARM, logprobs="raw"), 0.7, "logprobs are from before it"),
        (msgspec.structs.replace(WARM, altered=("top_p", "min_p")), None, "with top_p, min_p"),
    ],
)
def test_what_a_trainer_would_get_wrong_is_refused(
    span: SamplingSpan, temperature: float | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check_spans([span], temperature, "x")
    check_spans([WARM], 0.7, "x")
    check_spans([SamplingSpan(2, 5, 1.0, "raw")], 1.0, "x")


async def test_the_others_need_the_same_in_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def complete(*_: object, **__: object) -> list[list[Trajectory]]:
        return [[warm()]]

    for module in ("slime", "verl", "skyrl"):
        monkeypatch.setattr(f"envserver_clients.adapters.{module}.complete_groups", complete)
    named = {"task_id": "t", "environment": "math"}
    args = SimpleNamespace(envserver_url="http://127.0.0.1:1", rollout_temperature=1.0)
    with pytest.raises(InputError, match="divides by 1") as refused:
        await slime.generate(args, SimpleNamespace(metadata=named), {})
    assert "--rollout-temperature" in refused.value.hint
    lengths = SimpleNamespace(prompt_length=9, response_length=9, temperature=1.3)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=lengths))
    loop = verl.EnvserverLoop(SimpleNamespace(config=config), url="http://127.0.0.1:1")
    with pytest.raises(InputError, match=r"divides by 1\.3"):
        await loop.run({}, extra_info=named)
    asked = {"prompts": ["p"], "env_classes": ["math"], "env_extras": [named]}
    with pytest.raises(InputError, match="divides by 1"):
        await EnvserverGenerator("http://127.0.0.1:1").generate(asked)
    right = EnvserverGenerator("http://127.0.0.1:1", temperature=0.7)
    assert (await right.generate(asked))["response_ids"] == [[2, 3]]
