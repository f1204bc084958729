"""Bodies of the Atropos wire over real HTTP: what is accepted, what is refused and how, gzip, and
what is stored of a post that came twice or met a full disk."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_records.errors import StoreError, StoreFull
from support.api import (
    ENVIRONMENT,
    KEYS,
    REGISTRATION,
    Api,
    running_api,
    wire_group,
)

JSON = {"content-type": "application/json"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        yield running


async def test_a_group_comes_out_as_it_went_in_with_all_keys(api: Api) -> None:
    await api.register(batch_size=2)
    full = wire_group(
        advantages=[[0.1, 0.2, 0.3]] * 2,
        ref_logprobs=[[-1.0, -2.0, -3.0]] * 2,
        inference_logprobs=[[1.0, -0.5, -0.25]] * 2,
        messages=[[{"role": "odd", "content": [1, {"a": None}], "reward": 0.5, "more": "é"}]] * 2,
        generation_params={"temperature": 0.7},
        overrides=[{"set_advantage_to_zero": True}, {}],
        group_overrides={"group_size": 2},
        images={"any": ["thing"]},
        env_id=None,
        distill_token_ids=[[[1, 2]] * 3] * 2,
        distill_logprobs=[[[-0.1, -0.2]] * 3] * 2,
    )
    assert await api.post("/scored_data", full | {"unknown": 1}) == {"status": "received"}
    assert await api.get("/latest_example") == full
    (delivered,) = (await api.get("/batch"))["batch"]
    assert delivered == full
    assert list(delivered) == KEYS
    await api.post("/scored_data", wire_group())
    (bare,) = (await api.get("/batch"))["batch"]
    assert list(bare) == KEYS
    assert all(bare[key] is None for key in KEYS[3:])
    assert await api.get("/latest_example") == bare


async def test_lax_numbers_are_taken(api: Api) -> None:
    await api.register(batch_size=1)
    body = {"tokens": [[1.0, "7", True]], "masks": [[1, "7", -100.0]], "scores": ["0.5"]}
    await api.post("/scored_data", body)
    (group,) = (await api.get("/batch"))["batch"]
    assert (group["tokens"], group["masks"]) == ([[1, 7, 1]], [[1, 7, -100]])
    assert group["scores"] == [0.5]


UNUSABLE: list[tuple[dict[str, Any], list[str | int]]] = [
    ({"tokens": [[1.5, 5, 6]] * 2}, ["tokens", 0, 0]),
    ({"tokens": [[None, 5, 6]] * 2}, ["tokens", 0, 0]),
    ({"tokens": None}, ["tokens"]),
    ({"tokens": [], "masks": [], "scores": []}, ["tokens"]),
    ({"tokens": [[], []], "masks": [[], []]}, ["tokens", 0]),
    ({"scores": [0.5, math.nan]}, ["scores", 1]),
    ({"scores": [math.inf, 0.5]}, ["scores", 0]),
    ({"scores": [-math.inf, 0.5]}, ["scores", 0]),
    ({"scores": [0.5, -1e39]}, ["scores", 1]),
    ({"scores": [0.5]}, ["scores"]),
    ({"tokens": [[0, 5, 2**31]] * 2}, ["tokens", 0, 2]),
    ({"tokens": [[0, 10**400, 6]] * 2}, ["tokens", 0, 1]),
    ({"tokens": [[0, 5, 6], [0, 5, -7]]}, ["tokens", 1, 2]),
    ({"masks": [[0, 5, 6]]}, ["masks"]),
    ({"masks": [[0, 5, 6], [0, 5]]}, ["masks", 1]),
    ({"masks": [[0, 5, 6], [-100, 9, 6]]}, ["masks", 1, 1]),
    ({"masks": [[-100, -100, 6], [-100, 5, -101]]}, ["masks", 1, 2]),
    ({"masks": [[1, 1, 6], [-100, 5, 6]]}, ["masks", 0, 0]),
    ({"masks": [[0, 56, 6], [-100, 5, 6]]}, ["masks", 0, 1]),
    ({"inference_logprobs": [[1.0, -1.0, -1e39]] * 2}, ["inference_logprobs", 0, 2]),
    ({"inference_logprobs": [[1.0, -1.0, math.nan]] * 2}, ["inference_logprobs", 0, 2]),
    ({"inference_logprobs": [[1.0, -1.0, -9999.0]] * 2}, ["inference_logprobs", 0, 2]),
    ({"inference_logprobs": [[1.0, -1.0]] * 2}, ["inference_logprobs", 0]),
    ({"inference_logprobs": [[1.0, -1.0, -1.0]]}, ["inference_logprobs"]),
    ({"advantages": [[1.0, 2.0, 3.0]]}, ["advantages"]),
    ({"ref_logprobs": [[1.0, 2.0, 3.0]]}, ["ref_logprobs"]),
    ({"advantages": [[1.0], [1e39]]}, ["advantages", 1, 0]),
    ({"distill_token_ids": [[[1]]]}, ["distill_token_ids"]),
    ({"distill_token_ids": [[[1]], [[2**31]]]}, ["distill_token_ids", 1, 0, 0]),
    ({"distill_token_ids": [[[1]], [[-1]]]}, ["distill_token_ids", 1, 0, 0]),
    (
        {"distill_token_ids": [[[1]], [[1]]], "distill_logprobs": [[[1.0]], [[1e39]]]},
        ["distill_logprobs", 1, 0, 0],
    ),
    (
        {"distill_token_ids": [[[1]], [[1]]], "distill_logprobs": [[[1.0]], [[1.0, 2.0]]]},
        ["distill_logprobs", 1],
    ),
    ({"messages": ["text", "text"]}, ["messages", 0]),
    ({"messages": [None, []]}, ["messages", 0]),
    ({"messages": [[{"role": "user"}], []]}, ["messages", 0, 0]),
    ({"messages": [[], [{"content": ""}]]}, ["messages", 1, 0]),
    ({"messages": [[]]}, ["messages"]),
    ({"messages": [[], [{"role": "a", "content": [math.inf]}]]}, ["messages", 1, 0, "content"]),
    ({"generation_params": {"t": math.nan}}, ["generation_params", "t"]),
    ({"images": [{"a": math.nan}]}, ["images", 0, "a"]),
    ({"overrides": [{}] * 3}, ["overrides"]),
    ({"overrides": {}}, ["overrides"]),
    ({"env_id": "zero"}, ["env_id"]),
]


async def test_unusable_groups_are_refused_at_their_place(api: Api) -> None:
    await api.register(batch_size=2)
    for fields, place in UNUSABLE:
        bad = wire_group(**fields)
        for path, body, prefix in (
            ("/scored_data", bad, ["body"]),
            ("/scored_data_list", [wire_group(mark=1), bad], ["body", 1]),
        ):
            answer = await api.http.post(path, content=json.dumps(body), headers=JSON)
            assert answer.status_code == 422, fields
            error = answer.json()["detail"][0]
            assert error["loc"][: len(prefix) + len(place)] == [*prefix, *place]
            assert {"type", "loc", "msg", "input"} <= set(error)
    # All or nothing, and what comes after is not harmed.
    assert (await api.get("/status"))["queue_size"] == 0
    await api.post("/scored_data", wire_group(mark=9))
    assert await api.batch_marks() == [9]
    refused = (await api.get("/v1/status"))["atropos"]["refused_posts"]
    assert sum(refused.values()) == 2 * len(UNUSABLE)


async def test_empty_lists_say_none_as_environments_send_them(api: Api) -> None:
    await api.register(batch_size=2)
    empty = {"advantages": [], "ref_logprobs": [], "messages": [], "overrides": [], "images": []}
    await api.post("/scored_data", wire_group(**empty))
    (group,) = (await api.get("/batch"))["batch"]
    assert {key: group[key] for key in empty} == empty


NO_GROUPS: list[tuple[bytes, str]] = [
    (b"", "missing"),
    (b"{", "json_invalid"),
    (b"nonsense", "json_invalid"),
    (b"null", "model_attributes_type"),
    (b"[]", "model_attributes_type"),
    (b"{}", "missing"),
    (b"NaN", "model_attributes_type"),
    (b'"\\ud800"', "json_invalid"),
]


async def test_advantages_may_be_per_sequence_or_per_token(api: Api) -> None:
    await api.register(batch_size=2)
    for advantages in ([[1.0], [-1.0]], [[1.0, 2.0, 3.0, 4.0]] * 2):
        await api.post("/scored_data", wire_group(advantages=advantages))
        (group,) = (await api.get("/batch"))["batch"]
        assert group["advantages"] == advantages


async def test_bodies_that_are_no_group(api: Api) -> None:
    for raw, kind in NO_GROUPS:
        answer = await api.http.post("/scored_data", content=raw, headers=JSON)
        assert answer.status_code == 422, raw
        assert answer.json()["detail"][0]["type"] == kind
    for raw in (b'"\xff"', b"[" * 3000 + b"]" * 3000, b'{"tokens":' * 3000):
        answer = await api.http.post("/scored_data", content=raw, headers=JSON)
        assert answer.status_code == 400, raw[:20]
        assert answer.json() == {"detail": "There was an error parsing the body"}


FASTAPI_SAYS: list[tuple[str, bytes, dict[str, Any]]] = [
    (
        "/disconnect-env",
        b'{"env_id": 0,}',
        {
            "type": "json_invalid",
            "loc": ["body", 13],
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": "Expecting property name enclosed in double quotes"},
        },
    ),
    (
        "/disconnect-env",
        b"[0]",
        {
            "type": "model_attributes_type",
            "loc": ["body"],
            "msg": "Input should be a valid dictionary or object to extract fields from",
            "input": [0],
        },
    ),
    (
        "/scored_data_list",
        b"{}",
        {
            "type": "list_type",
            "loc": ["body"],
            "msg": "Input should be a valid list",
            "input": {},
        },
    ),
    (
        "/scored_data",
        b'{"masks": [[1]], "scores": [1], "tokens": [["a"]]}',
        {
            "type": "int_parsing",
            "loc": ["body", "tokens", 0, 0],
            "msg": "Input should be a valid integer, unable to parse string as an integer",
            "input": "a",
        },
    ),
]


async def test_errors_are_worded_as_fastapi_words_them(api: Api) -> None:
    for path, raw, error in FASTAPI_SAYS:
        answer = await api.http.post(path, content=raw, headers=JSON)
        assert (answer.status_code, answer.json()) == (422, {"detail": [error]})


async def test_a_million_faults_are_one_short_answer(api: Api) -> None:
    row = b"[" + b",".join([b'"a"'] * 1_000_000) + b"]"
    body = b'{"tokens":[%b,%b],"masks":[[1]],"scores":[1]}' % (row, row)
    answer = await api.http.post("/scored_data", content=body, headers=JSON)
    assert answer.status_code == 422
    assert [error["loc"] for error in answer.json()["detail"]] == [["body", "tokens", 0, 0]]


async def test_a_bomb_of_tiny_values_is_refused_before_it_is_read(api: Api) -> None:
    bomb = gzip.compress(b'{"tokens":[[' + b"1," * 20_000_000 + b"1]]}", 1)
    headers = JSON | {"content-encoding": "gzip"}
    answer = await api.http.post("/scored_data", content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["detail"][:25]) == (413, "The body has more than 20")
    missing = b'{"tokens":[[' + b"1," * 1_000_000 + b"1]]}"
    answer = await api.http.post("/scored_data", content=missing, headers=JSON)
    assert answer.status_code == 422
    assert len(answer.content) < 1000


async def test_json_is_taken_whatever_it_is_called(api: Api) -> None:
    raw = json.dumps(REGISTRATION).encode()
    for headers in ({"content-type": "text/plain"}, {"content-type": "x/y"}, {}):
        for body in (raw, b"\xef\xbb\xbf" + raw):
            answer = await api.http.post("/register", content=body, headers=headers)
            assert answer.status_code == 200


async def test_wrong_methods_and_paths(api: Api) -> None:
    for method, path in (("POST", "/batch"), ("GET", "/register"), ("POST", "/status-env")):
        answer = await api.http.request(method, path)
        assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})
    assert (await api.http.head("/info")).status_code == 405
    answer = await api.http.get("/nowhere")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


async def test_gzip_both_ways(api: Api) -> None:
    await api.register(batch_size=8)
    group = wire_group(8, tokens=[list(range(300))] * 8, masks=[list(range(300))] * 8)
    packed = gzip.compress(json.dumps(group).encode())
    answer = await api.http.post(
        "/scored_data", content=packed, headers=JSON | {"content-encoding": "gzip"}
    )
    assert answer.json() == {"status": "received"}
    plain = await api.http.get("/latest_example", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert "Accept-Encoding" in plain.headers["vary"]
    small = await api.http.get("/info", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in small.headers
    large = await api.http.get("/batch", headers={"accept-encoding": "gzip"})
    assert large.headers["content-encoding"] == "gzip"
    assert large.json()["batch"][0]["tokens"] == group["tokens"]


async def test_bad_gzip_is_400(api: Api) -> None:
    whole = gzip.compress(b"{}" * 99)
    for broken in (b"no gzip", whole[:-4], whole[:12], whole + b"more", b"\x1f\x8b"):
        answer = await api.http.post(
            "/scored_data", content=broken, headers=JSON | {"content-encoding": "gzip"}
        )
        assert (answer.status_code, answer.text) == (400, "Invalid gzip payload")
        assert answer.headers["content-type"].startswith("text/plain")


async def test_bodies_have_a_limit_before_and_after_inflating(tmp_path: Path) -> None:
    async with running_api(tmp_path / "s.db", server={"max_body_bytes": 10_000}) as api:
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        nested = gzip.compress(gzip.compress(b" " * 5_000_000))
        for content, headers in (
            (b" " * 10_001, {}),
            (bomb[:9_000], {"content-encoding": "gzip"}),
            (gzip.compress(b" " * 10_001), {"content-encoding": "gzip"}),
        ):
            answer = await api.http.post("/scored_data", content=content, headers=headers)
            assert answer.status_code == 413, content[:20]
        answer = await api.http.post(
            "/scored_data", content=nested, headers={"content-encoding": "gzip"}
        )
        assert answer.status_code in (400, 422)
        await api.register()
        assert await api.post("/scored_data", wire_group()) == {"status": "received"}


async def test_nothing_crashes_the_server(api: Api) -> None:
    paths = ["/register", "/register-env", "/disconnect-env", "/scored_data", "/scored_data_list"]
    odd: list[bytes] = [b"0", b"{}", b"[[]]", b"[null]", b'{"env_id":9e99}', b'{"env_id":"x"}']
    odd += [json.dumps(dict.fromkeys([*REGISTRATION, *ENVIRONMENT, *KEYS], -1)).encode()]
    odd += [json.dumps(REGISTRATION | {"batch_size": 2**80}).encode(), b"\x00", b"\xed\xa0\x80"]
    odd += [b'"\\ud800"', b'{"scores":1e999}', b'{"env_id":123456789012345678901234567890}']
    await api.start()
    for path in [*paths, "/ack", "/v1/runs", "/v1/policy-version"]:
        for raw in odd:
            answer = await api.http.post(path, content=raw, headers=JSON)
            assert answer.status_code < 500, (path, raw, answer.text)
    for raw in odd:
        answer = await api.http.request("GET", "/status-env", content=raw)
        assert answer.status_code < 500, raw
    assert isinstance(await api.http.get("/healthz"), httpx.Response)


async def test_a_key_stores_a_post_once(api: Api) -> None:
    await api.register(batch_size=2)
    key = {"idempotency-key": "rollout-1"}
    for _ in range(3):
        assert await api.post("/scored_data", wire_group(), headers=key) == {"status": "received"}
    for _ in range(2):
        await api.post("/scored_data", wire_group())
    assert (await api.get("/status"))["queue_size"] == 3
    lists = {"idempotency-key": "rollout-2"}
    for _ in range(2):
        answer = await api.post("/scored_data_list", [wire_group(), wire_group()], headers=lists)
        assert answer["groups_processed"] == 2
    assert (await api.get("/status"))["queue_size"] == 5


@pytest.mark.parametrize(("error", "status"), [(StoreFull, 507), (StoreError, 503)])
async def test_a_store_that_fails_accepts_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch, error: type[StoreError], status: int
) -> None:
    await api.register(batch_size=2)

    async def put(groups: object) -> list[bool]:
        raise error("No.")

    with monkeypatch.context() as broken:
        broken.setattr(api.store, "put_encoded", put)
        answer = await api.http.post("/scored_data", json=wire_group())
        assert answer.status_code == status
        assert answer.json() == {"detail": "No."}
    assert (await api.get("/status"))["queue_size"] == 0
    await api.post("/scored_data", wire_group(mark=4))
    assert await api.batch_marks() == [4]
