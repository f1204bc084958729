"""Text completions are read in the form of chat answers."""

from __future__ import annotations

from typing import Any

import pytest
from envserver_records.errors import EngineGarbage
from support.fake_scale_out import ScaleOut
from support.templates import OWN, chat_format

from envserver.proxy.engine_client import stream_text, whole_text


def without_text(path: str, answer: dict[str, Any]) -> None:
    """Leaves the text out of the first choice."""
    del answer["choices"][0]["text"]


async def test_texts_are_completed_in_the_form_of_a_chat() -> None:
    engine = ScaleOut(chat_format(OWN["chatml"]), "Hello.")
    body = {"model": "tiny", "prompt": [[5], [6, 7]], "logprobs": 0, "return_token_ids": True}
    answer = await whole_text(engine, body, rollout_id="r", timeout_seconds=9)
    assert "prompt_token_ids" not in answer
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5], [6, 7]]
    for choice in answer["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "Hello."}
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    alone = await whole_text(engine, {**body, "prompt": [5]}, rollout_id="r", timeout_seconds=9)
    assert alone["prompt_token_ids"] == [5]
    texts, ids = "", []
    one = {**body, "prompt": [5], "logprobs": None}
    async with stream_text(engine, one, rollout_id="r", timeout_seconds=9) as chunks:
        async for chunk in chunks:
            for part in chunk["choices"]:
                texts += part["delta"]["content"]
                ids += part["token_ids"]
    assert (texts, ids) == ("Hello.", alone["choices"][0]["token_ids"])
    engine.spoil = without_text
    with pytest.raises(EngineGarbage, match="holds no text"):
        await whole_text(engine, body, rollout_id="r", timeout_seconds=9)
