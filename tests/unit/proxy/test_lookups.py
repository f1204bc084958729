"""Beside calls: what clients look up, and how each API words a refusal and a full context."""

import json
from itertools import product
from pathlib import Path

import anthropic
import openai
import pytest
from support.cases import cases_of
from support.commands import envserver, read_jsonl
from support.proxy_house import ASK, House, house

from envserver.models.probe import ProbeResult
from envserver.proxy.endpoint import Capabilities

CASES = cases_of(__file__)

BODIES = cases_of(__file__, "test_services.toml")["bodies"]


async def test_what_there_is_is_found_by_the_official_clients(home: House) -> None:
    attempt, client = home.open()
    claude = home.claude(attempt.key)
    assert (await client.models.retrieve("tiny")).owned_by == "envserver"
    assert (await claude.models.retrieve("tiny")).display_name == "tiny"
    for models in (client.models, claude.models):
        assert [model.id async for model in models.list()] == ["tiny"]
    (model,) = (await client.models.list()).data
    assert "max_model_len" not in model.model_dump()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-x' here: the model is 'tiny'"):
        await client.models.retrieve("gpt-x")
    with pytest.raises(anthropic.NotFoundError, match="does not count"):
        await claude.messages.count_tokens(model="any", messages=ASK)

    made = await client.responses.create(model="any", input="hi")
    assert await client.responses.retrieve(made.id) == made
    unstored = await client.responses.create(model="any", input="hi", store=False)
    with pytest.raises(openai.NotFoundError, match="There is no stored response"):
        await client.responses.retrieve(unstored.id)
    assert len(attempt.calls) == 2

    for path in ("", "/", "/v1"):  # is there a server?
        for ask in (home.http.head, home.http.get):
            async with ask(f"{home.url}/r/{attempt.key}{path}") as answer:
                assert answer.status == 200


async def test_the_models_list_says_the_size_of_the_context() -> None:
    async def find() -> Capabilities:
        return Capabilities(probe_result=ProbeResult(mode="chat", model="tiny", max_model_len=2048))

    async with house(find=find) as home:
        _, client = home.open()
        (model,) = (await client.models.list()).data
        assert model.model_dump()["max_model_len"] == 2048


async def test_what_is_not_offered_is_refused_in_the_form_of_the_api_meant(home: House) -> None:
    attempt, _ = home.open()
    for key in (attempt.key, "nonsense"):
        for path in ("v1/messages/files", "v1/messages/batches?beta=true", "v1/messages/batches"):
            status, answer = await home.post(key, path, {})
            assert (status, answer["type"]) == (404, "error")
            assert answer["error"]["type"] == "not_found_error"
        for path in ("v1/responses/resp_1", "v1/messagesx", "v1/embeddings", "v1/files", "generate",
                     "x", "v1", ""):  # fmt: skip
            status, answer = await home.post(key, path, {})
            assert (status, answer["error"]["code"]) == (404, "not_found")
    assert (await home.get(attempt.key, "v1/chat/completions"))[0] == 405
    status, answer = await home.get(attempt.key, "v1/messages")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    _, answer = await home.post(attempt.key, "v1/messages", {}, **{"x-api-key": "other"})
    assert answer["error"]["type"] == "authentication_error"
    assert home.fake.requests == []


async def test_a_body_that_nests_too_deep_is_refused(home: House) -> None:
    attempt, _ = home.open()
    many = ((90, {200, 400}), (120, {413}), (1000, {413}))
    for path, (levels, statuses) in product(BODIES, many):
        nested = "[" * levels + "]" * levels
        name, value = {
            "v1/responses": ("metadata", '{"deep": %s}'),
            "v1/messages": ("tools", '[{"name": "add", "input_schema": {"deep": %s}}]'),
        }.get(path, ("stop", "%s"))
        body = json.dumps(BODIES[path])[:-1] + f', "{name}": {value % nested}}}'
        status, answer = await home.post(attempt.key, path, body.encode())
        assert status in statuses, (path, levels)
        assert bool(answer.get("error")) == (status != 200)


async def test_each_api_says_in_its_own_words_that_the_context_is_full(home: House) -> None:
    for words, known in CASES["full"]:
        attempt, _ = home.open()
        home.fake.faults.extend([(400, words)] * 3)
        for path in ("v1/chat/completions", "v1/responses", "v1/messages"):
            status, answer = await home.post(attempt.key, path, BODIES[path])
            error = answer["error"]
            if path == "v1/messages":
                assert (status, error["type"]) == (400, "invalid_request_error")
                assert error["message"].startswith(known), words
            else:
                assert (status, error["code"]) == (400, "context_length_exceeded"), words
                assert "This model's maximum context length is" in error["message"]
        assert (attempt.limit, attempt.engine_failure) == ("context", None), words


@pytest.mark.thorough
def test_the_count_is_that_of_the_prompt_and_a_shortened_talk_goes_on(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(CASES["counting"])
    ran = envserver(
        "process", "--env", "counting.py", "--model", "sim", "--sim.latency_seconds", 0,
        "--sim.context_tokens", 32768, "--env.max_token_length", 131072,
        "--workers.processes", 1, "--env.group_size", 1, "--env.total_steps", 1,
        "--env.data_path_to_save_groups", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (rollout,) = read_jsonl(tmp_path / "out.jsonl")[0]["envserver"]["rollouts"]
    output = rollout["output"]
    assert [counted for counted, _ in output["counts"]] == [used for _, used in output["counts"]]
    assert output["counts"][1][0] > output["counts"][0][0] > 0
    assert output["message"] == f"prompt is too long: {output['long']} tokens > 32768 maximum"
    assert output["limit"] == {"limit": "context"}
    assert (rollout["limit"], rollout["truncated"], rollout["turns"]) == (None, False, 3)
