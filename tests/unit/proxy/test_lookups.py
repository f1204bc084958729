"""What clients look up beside their calls, asked for with the official clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
from support.proxy_house import ASK, House, house


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


async def test_the_model_is_found_by_its_name_in_both_forms(home: House) -> None:
    attempt, client = home.open()
    assert (await client.models.retrieve("tiny")).owned_by == "envserver"
    messages = home.claude(attempt.key)
    assert (await messages.models.retrieve("tiny")).display_name == "tiny"
    assert [model.id async for model in messages.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-x' here, but 'tiny'"):
        await client.models.retrieve("gpt-x")


async def test_a_response_is_found_unless_it_was_not_to_be_stored(home: House) -> None:
    attempt, client = home.open()
    made = await client.responses.create(model="any", input="hi")
    assert await client.responses.retrieve(made.id) == made
    unstored = await client.responses.create(model="any", input="hi", store=False)
    with pytest.raises(openai.NotFoundError, match="There is no stored response"):
        await client.responses.retrieve(unstored.id)
    assert len(attempt.calls) == 2


@pytest.mark.parametrize("path", ["", "/", "/v1"])
async def test_a_client_sees_that_there_is_a_server(home: House, path: str) -> None:
    attempt, _ = home.open()
    for ask in (home.http.head, home.http.get):
        async with ask(f"{home.url}/r/{attempt.key}{path}") as answer:
            assert answer.status == 200


async def test_what_is_not_offered_is_refused_in_the_clients_form(home: House) -> None:
    attempt, client = home.open()
    with pytest.raises(openai.NotFoundError, match="is not offered here"):
        await client.embeddings.create(model="any", input="hi")
    with pytest.raises(anthropic.NotFoundError) as refused:
        await home.claude(attempt.key).messages.batches.list()
    assert refused.value.body["error"]["type"] == "not_found_error"
    params = {"max_tokens": 9, "messages": ASK, "model": "any"}
    with pytest.raises(anthropic.NotFoundError):
        await home.claude(attempt.key).messages.batches.create(
            requests=[{"custom_id": "one", "params": params}]
        )
