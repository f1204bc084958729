"""An Engine in this process that answers as vLLM's token endpoints do; it samples nothing.

Its ids are those of a real vocabulary, and its quirks are those measured on vLLM 0.32: a derendered
text keeps the token that ended it, its `finish_reason` stays "stop", it refuses empty answers; a
generated answer's logprobs name at least one alternative. The parser it has is a plain one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from envserver_records.errors import EngineRefused

from envserver.models import ReplicaHealth
from envserver.models.decoding import Decoder
from envserver.tokens import ChatFormat

Json = dict[str, Any]
ASK: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 200,
    "logprobs": True,
    "return_token_ids": True,
}
END = "<|im_end|>"
_OWN_LIMIT = 16
"""Of sampling parameters without one; what is rendered leaves it out, and has no limit then."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ScaleOut:
    """What it answers, and how.

    Args:
        texts: of the choices, one after the other.
        reasons: it tells reasoning from content.
        spoil: changes an answer before it is given; gets the path and the answer or chunk.
    """

    kind = "openai"
    exact = True

    def __init__(
        self,
        format: ChatFormat,
        *texts: str,
        reasons: bool = False,
        spoil: Callable[[str, Json], None] | None = None,
    ) -> None:
        self.texts = texts
        self.reasons = reasons
        self.spoil = spoil or (lambda path, answer: None)
        self.requests: list[tuple[str, Json]] = []
        self.rollouts: set[str] = set()
        self.seconds: list[float] = []
        self._format = format
        self._end = format.encode(END)[0]
        self._answers: dict[str, Callable[[Json], Json]] = {
            "/v1/chat/completions": self._chat,
            "/v1/chat/completions/render": self._render,
            "/v1/chat/completions/derender": self._derender,
            "/inference/v1/generate": self._generate,
            "/v1/completions": self._completions,
            "/tokenize": lambda body: {"tokens": format.encode(body["prompt"])},
        }

    @property
    def paths(self) -> list[str]:
        """The last parts of the paths that were asked."""
        return [path.rpartition("/")[2] for path, _ in self.requests]

    async def __aenter__(self) -> ScaleOut:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def model_name(self) -> str:
        return "tiny"

    async def get(self, path: str) -> Json:
        raise EngineRefused("There is nothing to get.", status=404)

    async def health(self) -> list[ReplicaHealth]:
        return []

    def replicas(self) -> list[ReplicaHealth]:
        return []

    async def post(
        self,
        path: str,
        body: Json,
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> Json:
        body = self._noted(path, body, rollout_id, timeout_seconds)
        answer = json.loads(json.dumps(self._answers[path](body)))
        self.spoil(path, answer)
        return _decoded(answer, form)

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: Json,
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> AsyncIterator[AsyncIterator[Json]]:
        body = self._noted(path, body, rollout_id, timeout_seconds)
        chunks = self._chunks(path, self._answers[path](body))
        yield (_decoded(chunk, form) async for chunk in chunks)

    def _noted(self, path: str, body: Json, rollout_id: str, timeout_seconds: float) -> Json:
        """Returns `body` as it comes over the wire."""
        sent: Json = orjson.loads(orjson.dumps(body))
        self.requests.append((path, sent))
        self.rollouts.add(rollout_id)
        self.seconds.append(timeout_seconds)
        return sent

    async def _chunks(self, path: str, answer: Json) -> AsyncIterator[Json]:
        """An answer token by token; all its text comes with the last one."""
        shared = {name: answer[name] for name in answer if name not in ("choices", "usage")}
        prompt = shared.pop("prompt_token_ids", None)
        chunks = [part for choice in answer["choices"] for part in _parts(choice)]
        for number, part in enumerate(chunks):
            chunk = json.loads(json.dumps({**shared, "choices": [part]}))
            if number == 0 and prompt is not None:
                chunk["prompt_token_ids"] = prompt
            self.spoil(path, chunk)
            yield chunk
        yield {**shared, "choices": [], "usage": answer["usage"]}

    def _sampled(self, sampling: Json, index: int) -> Json:
        """One choice, without its message."""
        text = self.texts[index % len(self.texts)]
        ids = [*self._format.encode(text), self._end]
        finish, stop = "stop", None
        limit = sampling.get("max_tokens")
        if limit is not None and limit < len(ids):
            ids, finish = ids[:limit], "length"
            text = self._format.decode(ids)
        for string in sampling.get("stop") or []:
            if string in text:
                # The tokens that hold the end of the stop string are sampled as wholes.
                end = text.index(string) + len(string)
                while len(self._format.decode(ids[:-1])) >= end:
                    ids = ids[:-1]
                text, finish, stop = text[: text.index(string)], "stop", string
        return {
            "index": index,
            "text": text,
            "token_ids": ids,
            "finish_reason": finish,
            "stop_reason": stop,
        }

    def _all_sampled(self, sampling: Json) -> list[Json]:
        return [self._sampled(sampling, index) for index in range(sampling.get("n") or 1)]

    def _render(self, body: Json) -> Json:
        prompt = self._format.prompt_ids(body["messages"], body.get("tools"), {})
        sampling = {name: body[name] for name in ("n", "seed", "stop", "top_p") if name in body}
        limit = body.get("max_tokens", 1000)
        if limit != _OWN_LIMIT:
            sampling["max_tokens"] = limit
        if body.get("logprobs"):
            sampling["logprobs"] = body.get("top_logprobs", 0)
        if body.get("tool_choice") == "required":
            sampling["structured_outputs"] = {"json": "{}"}
        return {"request_id": "r-1", "token_ids": prompt, "sampling_params": sampling}

    def _generate(self, body: Json) -> Json:
        sampling = body["sampling_params"]
        choices = []
        for choice in self._all_sampled(sampling):
            ids, spans = choice["token_ids"], []
            if ids:
                spans = [{"version": "7", "start": 0, "end": len(ids)}]
            wanted = sampling.get("logprobs")
            logprobs = None if wanted is None else self._scored(ids, max(1, wanted))
            choices.append({**choice, "logprobs": logprobs, "weight_versions": spans})
        assert body["output_mode"] == "text" and body["return_token_ids"]
        return {
            "request_id": "generate-tokens-1",
            "choices": choices,
            "prompt_token_ids": body["token_ids"],
            "usage": _usage(body["token_ids"], choices),
        }

    def _derender(self, body: Json) -> Json:
        choices = []
        for choice in body["generate_response"]["choices"]:
            if not choice["token_ids"]:
                raise EngineRefused("choice has empty or null token_ids", status=400)
            message = self._message(body["chat_request"], self._format.decode(choice["token_ids"]))
            choices.append({**choice, "message": message})
        return {"choices": choices}

    def _chat(self, body: Json) -> Json:
        prompt = self._format.prompt_ids(body["messages"], body.get("tools"), {})
        choices = []
        for choice in self._all_sampled(body):
            message = self._message(body, choice.pop("text"))
            if message.get("tool_calls") and body.get("parallel_tool_calls") is False:
                message["tool_calls"] = message["tool_calls"][:1]
            free = body.get("tool_choice", "auto") == "auto"
            if message.get("tool_calls") and (free or choice["finish_reason"] == "stop"):
                choice["finish_reason"] = "tool_calls"
            if body.get("logprobs"):
                choice["logprobs"] = self._scored(choice["token_ids"], body.get("top_logprobs", 0))
            choices.append({**choice, "message": message})
        answer: Json = {"id": "chatcmpl-1", "choices": choices, "prompt_token_ids": prompt}
        return {**answer, "usage": _usage(prompt, choices)}

    def _completions(self, body: Json) -> Json:
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = self._format.encode(prompts)
        if isinstance(prompts[0], int):
            prompts = [prompts]
        choices = []
        for prompt in prompts:
            for choice in self._all_sampled(body):
                choice |= {"index": len(choices), "prompt_token_ids": prompt}
                if body.get("logprobs") is not None:
                    named = not body.get("return_tokens_as_token_ids")
                    scored = self._scored(choice["token_ids"], body["logprobs"], named=named)
                    choice["logprobs"] = _as_completion(scored["content"])
                choices.append(choice)
        return {"id": "cmpl-1", "choices": choices, "usage": _usage(prompts[0], choices)}

    def _scored(self, ids: list[int], count: int, *, named: bool = True) -> Json:
        def entry(token: int, place: int) -> Json:
            text = self._format.decode([token]) if named else f"token_id:{token}"
            return {"token": text, "logprob": -(place + 1) / 4, "bytes": [*text.encode()]}

        return {
            "content": [
                {
                    **entry(token, 0),
                    "top_logprobs": [entry(token + place, place) for place in range(count)],
                }
                for token in ids
            ]
        }

    def _message(self, body: Json, text: str) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if self.reasons:
            thought, closed, rest = text.removeprefix("<think>").partition("</think>")
            message |= {"reasoning": thought or None, "content": rest if closed else None}
        content = message["content"] or ""
        if not body.get("tools") or _OPEN not in content:
            return message
        calls = []
        for part in content.split(_OPEN)[1:]:
            call = json.loads(part.partition(_CLOSE)[0])
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": "call-1", "type": "function", "function": function})
        return {**message, "content": content.partition(_OPEN)[0] or None, "tool_calls": calls}


def _decoded(answer: Json, form: type | None) -> Json:
    """Returns `answer` as it comes over the wire, whatever numbers and texts are in it."""
    return Decoder("").decode(json.dumps(answer).encode(), form)


def _parts(choice: Json) -> list[Json]:
    """A choice in parts of one token; the last has the text, and how it ended."""
    logprobs = choice.get("logprobs")
    parts = []
    for place, token in enumerate(choice["token_ids"]):
        part = {"index": choice["index"], "text": "", "token_ids": [token]}
        part |= {"finish_reason": None, "stop_reason": None, "logprobs": None}
        if logprobs is not None:
            part["logprobs"] = {name: [values[place]] for name, values in logprobs.items()}
        if place == 0 and "prompt_token_ids" in choice:
            part["prompt_token_ids"] = choice["prompt_token_ids"]
        parts.append(part)
    ends = ("text", "finish_reason", "stop_reason", "weight_versions")
    parts[-1] |= {name: choice[name] for name in ends if name in choice}
    return parts


def _as_completion(content: list[Json]) -> Json:
    return {
        "tokens": [entry["token"] for entry in content],
        "token_logprobs": [entry["logprob"] for entry in content],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content
        ],
    }


def _usage(prompt: list[int], choices: list[Json]) -> Json:
    sampled = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": sampled,
        "total_tokens": len(prompt) + sampled,
    }
