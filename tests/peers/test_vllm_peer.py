"""What a real vLLM does that others rely on: ids, grammars, templates, logprobs, arrivals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.cases import cases_of
from support.fleets import attributed, fleet_house, versioned_vllm
from support.foreign_trainers import told
from support.learning import variables
from support.odd_prompts import assert_renders_as_we_do
from support.sdk_house import vllm_house
from support.sim import EXACT, TOOLS, ask, engine, logprobs_of, tool, user
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

import envserver
from envserver import Group, OpenAIConfig, pack
from envserver.models.engine import EngineRequest
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import probe
from envserver.proxy.endpoint import Capabilities, capabilities_of
from envserver.settings.config import TokensConfig
from envserver.tokens.builder import build

TABLES = cases_of(__file__)

pytestmark = pytest.mark.vllm


def test_ids_and_logprobs_come_and_tools_are_in_the_prompt(vllm_server: VllmServer) -> None:
    def answered(**more: Any) -> dict[str, Any]:
        body = {"model": vllm_server.model, "messages": user("What is 2 + 2?"), **more}
        url = f"{vllm_server.base_url}/chat/completions"
        return dict(httpx.post(url, json=body, timeout=PATIENCE).raise_for_status().json())

    reply = answered(max_tokens=12, **EXACT)
    (choice,) = reply["choices"]
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    told = answered(max_tokens=1, tools=[tool("calculate")])
    assert told["usage"]["prompt_tokens"] > reply["usage"]["prompt_tokens"]


def test_it_renders_any_conversation_as_we_do(vllm_server: VllmServer) -> None:
    server = vllm_server
    assert_renders_as_we_do(server.root_url, server.model, server.model_folder)


# Constraints: logprobs are those after the grammar's mask


def models_own(server: VllmServer, prompt: list[int], answer: list[int]) -> np.ndarray:
    """The logprobs that the engine gives to the tokens of an answer without its grammar."""
    ids = [*prompt, *answer]
    body = {"model": server.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
        scored = client.post("/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    return np.array([scored[at][str(ids[at])]["logprob"] for at in range(len(prompt), len(ids))])


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
COUNT = {"type": "function", "function": {"name": "count", "strict": True, "parameters": SCHEMA}}


def differences(server: VllmServer, **more: Any) -> np.ndarray:
    """Recorded logprobs of an answer minus those that the engine gives to the same tokens."""
    asked = {"model": server.model, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
        body = {**asked, "messages": user("Count."), "max_tokens": 24, "logprobs": True, **more}
        answer = client.post("/chat/completions", json=body).json()
        choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
        ids = choice["token_ids"]
    return np.array(logprobs_of(choice)) - models_own(server, prompt, ids)


def test_raw_logprobs_are_taken_after_the_grammars_mask(vllm_server: VllmServer) -> None:
    """The day this fails, vLLM gives the model's own: then constrained calls need no mask."""
    assert np.abs(differences(vllm_server)).max() < 1e-4
    assert differences(vllm_server, response_format=FORM).max() > 1
    assert differences(vllm_server, tools=[COUNT], tool_choice="required").max() > 1


def test_calls_with_strict_tools_are_trained_as_the_models_own(vllm_server: VllmServer) -> None:
    with vllm_house(vllm_server.base_url, vllm_server.model) as house, house.seat() as seat:
        for more in ({"tools": [COUNT]}, {"response_format": FORM}):
            seat.openai.chat.completions.create(
                model=seat.model, messages=user("Count."), max_tokens=24, **more
            )
        free, forced = seat.calls
        assert "strict_dropped" in free.flags
        assert "structured_output_masked" in forced.flags
        (row,) = build(seat.calls)
        assert row.tokens[row.mask == 1].tolist() == free.completion_ids.tolist()


# Chat templates with variables: `learning_vllm` has one that switches thinking off


OFF = {"enable_thinking": False}


async def capabilities(server: VllmServer, kwargs: dict[str, Any] | None) -> Capabilities:
    async with OpenAIEngine(OpenAIConfig(base_url=server.base_url)) as engine:
        found = await probe(engine, model=server.model)
    return capabilities_of(found, TokensConfig(), kwargs)


async def test_the_probe_finds_the_variable_or_names_the_setting(learning_vllm: VllmServer) -> None:
    for kwargs in (None, OFF):
        found = await capabilities(learning_vllm, kwargs)
        assert found.format is not None, found.why_not
        assert found.format.defaults == OFF
        assert found.probe_result.reasoning_parser
    wrong = await capabilities(learning_vllm, {})
    assert wrong.format is None
    assert "--openai.default_template_kwargs '{\"enable_thinking\":false}'" in wrong.why_not


def test_a_conversation_is_one_row_and_a_request_may_switch_back(learning_vllm: VllmServer) -> None:
    with (
        vllm_house(learning_vllm.base_url, learning_vllm.model, think="keep") as house,
        house.seat(max_turns=9) as seat,
    ):
        said: list[Any] = []
        for kwargs in ({}, {}, {}, {"enable_thinking": True}):
            said.append({"role": "user", "content": f"Say number {len(said)}."})
            answer = seat.openai.chat.completions.create(
                model=seat.model,
                messages=said,
                max_tokens=6,
                extra_body={"chat_template_kwargs": kwargs},
            )
            said.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert [call.edge == "root" for call in seat.calls] == [True, False, False, True]
        assert not any("render_mismatch" in call.flags for call in seat.calls)
        assert len(seat.sequences) == 2, seat.edges
        seat.assert_exact()


# Logprobs after the temperature, and the trainer


TEMPERATURE = 0.7


def test_rows_say_how_they_were_sampled_and_the_trainer_computes_the_same(
    learning_vllm: VllmServer, learn_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    learning_vllm.begin_anew(tmp_path)
    environment = tmp_path / "babble.py"
    environment.write_text(TABLES["environment"])
    groups: list[Group] = list(
        envserver.groups(
            str(environment),
            openai={"base_url": learning_vllm.base_url, "model_name": learning_vllm.model},
            sampling={"temperature": TEMPERATURE, "top_p": 1.0},
            env={"group_size": 2, "total_steps": 2},
        )
    )
    rows = [row for group in groups for one in group.trajectories for row in one.sequences]
    assert len(rows) >= 4
    for row in rows:
        assert {(span.temperature, span.logprobs, span.altered) for span in row.sampling} == {
            (TEMPERATURE, "processed", ())
        }
        named = [at for span in row.sampling for at in range(span.start, span.end)]
        assert set(row.mask.nonzero()[0].tolist()) <= set(named)
    files = [tmp_path / f"group-{number}" for number in range(len(groups))]
    for path, group in zip(files, groups, strict=True):
        path.write_bytes(pack(group))
    found = told(
        learn_python,
        "-c",
        TABLES["trainer"],
        learning_vllm.model_folder,
        *files,
        env=variables(),
        seconds=None,
    )
    assert found["batch"]["rows_refused"] == 0
    assert found["batch"]["rows_learned"] == len(rows)
    warm, plain = found["warm"], found["plain"]
    tell(
        f"vLLM with processed logprobs at temperature {TEMPERATURE}: "
        f"{found['batch']['tokens_trained']} tokens, the trainer's logprobs at most "
        f"{warm['mismatch_max']:.1e} nats away (divided by 1: {plain['mismatch_mean']:.2f} on "
        "average)"
    )
    assert warm["mismatch_max"] < 1e-3
    assert warm["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert plain["mismatch_mean"] > 0.1


# The simulated engine has its fields where a real vLLM has them


OURS_ONLY = {".system_fingerprint"}
"""The simulated engine names itself in every chunk, vLLM only in the last."""

Shape = dict[str, set[str]]


def shape(value: Any, place: str = "") -> Shape:
    """Every place in a JSON value with the kinds of value that stand there; ids as keys are `*`."""
    found: Shape = {}
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        found[place] = {"object"}
        children = [
            (f"{place}.{'*' if key.isdigit() else key}", item) for key, item in value.items()
        ]
        if place.endswith("top_logprobs[]") and "token" not in value:
            children = [(f"{place}.*", item) for item in value.values()]
    elif isinstance(value, list):
        found[place] = {"list"}
        children = [(f"{place}[]", item) for item in value]
    else:
        found[place] = {"null" if value is None else type(value).__name__}
    for name, item in children:
        for at, kinds in shape(item, name).items():
            found.setdefault(at, set()).update(kinds)
    return found


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def merged(values: list[Any]) -> Shape:
    return {place[2:]: kinds for place, kinds in shape(values).items() if place.startswith("[]")}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", ask(top_logprobs=2, n=2, max_tokens=8, prompt_logprobs=2)),
    ("/v1/chat/completions", ask(max_tokens=3, return_tokens_as_token_ids=True)),
    ("/v1/chat/completions", ask(tools=TOOLS, max_tokens=4)),
    ("/v1/completions", {"prompt": "A box", "logprobs": 2, "n": 2, "return_token_ids": True,
                         "prompt_logprobs": 0}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}),
    ("/tokenize", {"messages": ask()["messages"]}),
    ("/tokenize", {"prompt": "A box", "return_token_strs": True}),
    ("/detokenize", {"tokens": [70, 71]}),
]  # fmt: skip
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", ask(n=2, max_tokens=8, top_logprobs=2)),
    ("/v1/completions", {"prompt": "A box", "logprobs": 1, "return_token_ids": True, "n": 2}),
]


def compare(ours: Shape, theirs: Shape) -> None:
    """No place of our own, no place of vLLM's left out unless it is null, no other type."""
    assert set(ours) - set(theirs) <= OURS_ONLY
    assert all(theirs[place] == {"null"} for place in set(theirs) - set(ours))
    for place in ours.keys() & theirs.keys():
        solid = (ours[place] | theirs[place]) - {"null"}
        assert len(solid) <= 1, f"{place}: {ours[place]} but vLLM {theirs[place]}"


def vllms(server: VllmServer, path: str, body: dict[str, Any]) -> httpx.Response:
    body = {**body, "model": server.model}
    response = httpx.post(server.root_url + path, json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(("path", "body"), CASES, ids=lambda case: str(case)[:60])
async def test_answers_are_vllms(vllm_server: VllmServer, path: str, body: dict[str, Any]) -> None:
    ours = await engine().post(EngineRequest(path, {**body, "model": "sim"}, "", 10))
    compare(shape(ours), shape(vllms(vllm_server, path, body).json()))


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=lambda case: str(case)[:60])
async def test_chunks_are_vllms(vllm_server: VllmServer, path: str, body: dict[str, Any]) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    theirs = events(vllms(vllm_server, path, body).text)
    async with engine().stream(EngineRequest(path, {**body, "model": "sim"}, "", 10)) as stream:
        ours = [chunk async for chunk in stream]
    compare(merged(ours), merged(theirs))
    compare(shape(ours[0]), shape(theirs[0]))
    compare(shape(ours[-1]), shape(theirs[-1]))


# Engines that come while a server runs


async def test_a_real_engine_comes_and_its_tokens_have_its_version(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    async with versioned_vllm(3) as stranger, fleet_house(tmp_path / "s.db") as house:
        await house.publish(3)
        row = await house.register(vllm_server.base_url, version=3, model="tiny", wait_seconds=60)
        assert (row["standing"], row["weights_version"]) == ("used", 3)
        problem = await house.register(stranger.url, status=409, version=3, wait_seconds=60)
        assert "It differs from the other engines: it can be called in mode" in problem["detail"]
        assert "it renders the same messages to other token ids" in problem["detail"]
        call = await house.ask(house.open("r"))
        assert call.exact and attributed(call) == [3]
        await house.tell(vllm_server.root_url, "pause")
        await house.tell(vllm_server.root_url, "resume", version=4)
        assert attributed(await house.ask(house.open("s"))) == [4]
