"""Weights that change while a call is paused at the engine: each token has its policy version."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from itertools import accumulate
from typing import Any

from envserver_records.records import Call, VersionSpan
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.proxy_house import asgi_post
from support.scripted_engine import UPSTREAM, Sample, Scripted
from support.serving import attempt_spec
from support.talk import format_of

from envserver.proxy import Capabilities, EngineEndpoint, Proxy
from envserver.tokens import build, check

_format = cache(format_of)


class Freezing(Scripted):
    """Samples `parts[0]` tokens, is then frozen until `thaw`, samples `parts[1]`, and so on; what
    it samples is of the weights that it has then."""

    def __init__(self, parts: list[int], weights: str) -> None:
        super().__init__(_format("chatml"))
        self.parts = parts
        self.weights = weights
        self.frozen, self._thawed = asyncio.Event(), asyncio.Event()

    def thaw(self, weights: str) -> None:
        self.weights = weights
        self.frozen.clear()
        self._thawed.set()

    async def post(self, path: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        answer = await super().post(path, body, **how)
        if path.endswith("/generate"):
            answer["choices"][0]["weight_versions"] = await self._sample()
        return answer

    async def _sample(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for number, (size, end) in enumerate(zip(self.parts, accumulate(self.parts), strict=True)):
            if number:
                self.frozen.set()
                await self._thawed.wait()
                self._thawed.clear()
            if size:
                spans.append({"version": self.weights, "start": end - size, "end": end})
        return spans


async def sampled_over_updates(parts: list[int], name: str = "step-{}") -> Call:
    """The call whose tokens were sampled in `parts`, with an update between any two of them; the
    engine calls its weights `name`, with their version in it."""
    engine = Freezing(parts, name.format(1))
    engine.script.append(Sample([100] * (sum(parts) - 1)))
    capabilities = Capabilities(probe_result=UPSTREAM, format=engine.format)

    async def find() -> Capabilities:
        return capabilities

    proxy = Proxy(engine, endpoint=EngineEndpoint(engine, find=find))
    proxy.publish_version(1)
    attempt = proxy.open(attempt_spec())
    told: list[bytes] = []

    async def send(message: Any) -> None:
        told.append(message.get("body", b""))

    body = {"messages": [{"role": "user", "content": "hi"}]}
    asking = asyncio.create_task(asgi_post(proxy, attempt.key, body, send))
    for version in range(2, len(parts) + 1):
        await engine.frozen.wait()
        assert await proxy.gate.pause("keep", 1.0)
        proxy.publish_version(version)
        engine.thaw(name.format(version))
        proxy.gate.resume()
    await asking
    assert "choices" in json.loads(b"".join(told))
    (call,) = attempt.calls
    return call


@given(parts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
@settings(max_examples=examples(60), deadline=None)
def test_each_token_has_the_version_that_sampled_it(parts: list[int]) -> None:
    call = asyncio.run(sampled_over_updates(parts))
    wanted = [version for version, size in enumerate(parts, start=1) for _ in range(size)]
    spans = [VersionSpan(v, wanted.index(v), wanted.index(v) + wanted.count(v)) for v in {*wanted}]
    assert call.versions == sorted(spans, key=lambda span: span.start)
    assert ("mixed_versions" in call.flags) == (len(spans) > 1)
    rows = build([call])
    check([call], rows)
    assert rows[0].versions[len(call.prompt_ids) :].tolist() == wanted


async def test_weights_without_a_number_are_of_the_lower_version() -> None:
    call = await sampled_over_updates([2, 3], "default")
    assert call.versions == [VersionSpan(1, 0, 5)]
    assert "mixed_versions" in call.flags
