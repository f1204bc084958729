"""The Atropos API over real HTTP: the conversations of wire.txt, and what takes more to say."""

import gzip
import json
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from envserver_clients.records import ClientGroup
from envserver_records.errors import StoreError, StoreFull
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.api import (
    KEYS,
    REGISTRATION,
    Api,
    mark_of,
    native_group,
    put_native,
    running_api,
    wire_group,
)
from support.cases import cases_of
from support.clocks import Clock
from support.conversations import Conversation, conversations
from support.extent import examples
from support.waiting import until

from envserver.http.requests import Refused, Unreadable, parse_body
from envserver.store import GroupPut
from envserver.store import packed as compression
from envserver.trainers import atropos_posts
from envserver.trainers.atropos_batches import Waiting, form_batches, groups_summing_to
from envserver.trainers.atropos_posts import PostedGroup, ScoredData, check_groups, read_group

CASES = cases_of(__file__)

JSON = {"content-type": "application/json"}
GZIP = JSON | {"content-encoding": "gzip"}
RECEIVED = {"status": "received"}
CONVERSATIONS = conversations(Path(__file__).with_name("wire.txt"))


@pytest.mark.parametrize("title", CONVERSATIONS)
async def test_the_wire_answers_as_its_conversations_say(api: Api, title: str) -> None:
    await Conversation(api).hold(CONVERSATIONS[title])


# What takes more to say


async def test_a_trainer_must_say_everything(api: Api) -> None:
    answer = await api.http.post("/register", json={})
    missing = [error["loc"] for error in answer.json()["detail"]]
    assert missing == [["body", field] for field in REGISTRATION]
    raw = json.dumps(REGISTRATION).encode()
    for headers in ({"content-type": "text/plain"}, {"content-type": "x/y"}, {}):
        for content in (raw, b"\xef\xbb\xbf" + raw):  # whatever it is called, and with a mark
            answer = await api.http.post("/register", content=content, headers=headers)
            assert answer.status_code == 200
    assert answer.json()["uuid"] > 2**53


async def test_silent_environments_block_nobody(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("envserver.runners.runner.time", clock)
    await api.start()
    await api.add_environment(min_batch_allocation=0.5)
    for mark in range(2):
        await api.post("/scored_data", wire_group(2, mark, env_id=4))
    assert await api.batch_marks() is None
    clock.ahead = 31
    assert await api.batch_marks() == [0, 1]


async def test_a_reset_takes_nothing_from_native_runs(api: Api) -> None:
    await api.start()
    env_id = await api.add_environment(group_size=4)
    await api.store.create_run("all", batch_size=8, delivery="broadcast")
    await api.store.create_run("maths", batch_size=8, environments=["math"])
    await api.put("a")
    await api.put("b", env="code")
    await api.post("/scored_data", wire_group(2, 1))
    await api.post("/scored_data", wire_group(1, 2, env_id=env_id))
    await api.http.get("/reset_data")
    counts = await api.store.counts()
    assert (counts["queued"], counts["buffered"], counts["dropped"]) == (1, 0, 3)
    assert await api.leased("maths", max_groups=9) == ["a"]
    assert len(await api.leased("all", max_groups=9)) == 3


async def queued(api: Api, groups: int) -> bool:
    return (await api.store.counts())["queued"] == groups


async def test_a_trainer_that_acknowledges_gets_a_lost_batch_again(api: Api) -> None:
    async def fetch(**headers: str) -> tuple[list[int], str]:
        answer = await api.http.get("/batch", headers=headers)
        marks = [mark_of(group) for group in answer.json()["batch"]]
        return marks, answer.headers.get("x-envserver-lease", "")

    lease = {"x-envserver-ack": "lease"}
    await api.register()
    for mark in range(8):
        await api.post("/scored_data", wire_group(2, mark))
    first, lost = await fetch(**lease)
    second, kept = await fetch(**lease)
    assert (first, second) == ([0, 1], [2, 3])
    for _ in range(2):
        assert await api.post("/ack", {"lease_id": kept}) == {"status": "success"}
    await api.store.extend(lost, 0.01)
    await until(lambda: queued(api, 6))
    again, other = await fetch(**lease)
    assert again == first
    assert other != lost
    assert (await api.get("/status"))["current_step"] == 7
    assert await api.status("POST", "/ack", json={"lease_id": lost}) == 409
    assert await api.status("POST", "/ack", json={"lease_id": "nothing"}) == 404
    assert await fetch() == ([4, 5], "")  # for others, fetching is acknowledging


@pytest.mark.parametrize("ask", [{}, {"x-envserver-ack": "lease"}])
async def test_a_request_for_a_batch_that_is_repeated_with_its_key_gets_the_same_batch(
    ask: dict[str, str], tmp_path: Path
) -> None:
    async def fetch(key: str) -> list[int]:
        answer = await api.http.get("/batch", headers=ask | {"idempotency-key": key})
        return [mark_of(group) for group in answer.json()["batch"]]

    async with running_api(tmp_path / "s.db") as api:
        await api.register()
        for mark in range(6):
            await api.post("/scored_data", wire_group(2, mark))
        assert [await fetch(key) for key in ("one", "two", "one")] == [[0, 1], [2, 3], [0, 1]]
    async with running_api(tmp_path / "s.db") as api:
        assert [await fetch("two"), await fetch("three")] == [[2, 3], [4, 5]]
        assert (await api.get("/status"))["current_step"] == 6
        assert (await api.store.counts())["acked"] == (0 if ask else 6)
        if ask:
            for lease in await api.store.open_leases("atropos"):
                await api.store.extend(lease.lease_id, 0.01)
            await until(lambda: queued(api, 6))
            assert await fetch("one") == [0, 1]  # its lease ended: another one


async def test_what_the_store_refuses_stays_here(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.start()
    for error, status in ((StoreError, 503), (StoreFull, 507)):

        async def fail(*_: object, error: type[StoreError] = error, **__: object) -> None:
            raise error("No.")

        with monkeypatch.context() as broken:
            broken.setattr(api.store, "put_encoded", fail)
            answer = await api.http.post("/scored_data", json=wire_group())
            assert (answer.status_code, answer.json()) == (status, {"detail": "No."})
        assert (await api.get("/status"))["queue_size"] == 0
    for mark in range(6):
        await api.post("/scored_data", wire_group(mark=mark))
    # A batch that could not be recorded is the next one.
    for number, broken_part in enumerate(("lease", "set_value", "ack")):
        with monkeypatch.context() as broken:
            broken.setattr(api.store, broken_part, fail)
            for _ in range(2):
                assert await api.status("GET", "/batch") == 507
        assert await api.batch_marks() == [2 * number, 2 * number + 1]
    assert await api.batch_marks() is None
    assert (await api.get("/status"))["current_step"] == 6


async def test_groups_of_our_own_environments_are_delivered_too(api: Api) -> None:
    await api.register()
    await api.post("/scored_data", wire_group(2, 1))
    await put_native(api.store, native_group("native-1", truncated=True))
    assert (await api.get("/status"))["queue_size"] == 2
    _, native = (await api.get("/batch"))["batch"]
    assert list(native) == KEYS
    assert native | CASES["native"] | {"env_id": None} == native
    assert [messages[-1]["content"] for messages in native["messages"]] == ["2", "2"]
    # One that cannot be read holds up no batch.
    await api.register(batch_size=2)
    odd = {"env": "math", "format": "group", "size": 2, "tokens": 1, "max_length": 1}
    await api.store.put([GroupPut(group_id="broken", body=b"\xc1", **odd)])
    await put_native(api.store, native_group("empty", sequences=[]))
    await api.post("/scored_data", wire_group(2, 5))
    assert await api.batch_marks() == [5]
    assert (await api.store.counts())["dropped"] == 2


async def test_how_our_own_groups_are_written_can_be_chosen(tmp_path: Path) -> None:
    more = {"score_range": "pm1", "include_messages": False}
    async with running_api(tmp_path / "s.db", **more) as api:
        await api.register(batch_size=2)
        await api.put("native-1")
        (native,) = (await api.get("/batch"))["batch"]
        assert (native["scores"], native["messages"], native["overrides"]) == ([-1, 1], None, None)


# Bodies


async def test_a_group_comes_out_as_it_went_in_with_all_keys(api: Api) -> None:
    await api.register(batch_size=2)
    said = {"role": "odd", "content": [1, {"a": None}], "reward": 0.5, "more": "é"}
    full = wire_group(messages=[[said]] * 2, env_id=None, **CASES["full"])
    # Empty lists say none, as environments send them; advantages may be per sequence or per token.
    empty = {"advantages": [], "ref_logprobs": [], "messages": [], "overrides": [], "images": []}
    per_sequence, per_token = {"advantages": [[1.0], [-1.0]]}, {"advantages": [[1.0] * 4] * 2}
    lax = {"tokens": [[1.0, "7", True]] * 2, "masks": [[1, "7", -100.0]] * 2, "scores": ["0.5", 1]}
    for posted, found in (
        (full | {"unknown": 1}, full),
        (wire_group(), dict.fromkeys(KEYS[3:])),
        *((wire_group(**one), one) for one in (empty, per_sequence, per_token)),
        (lax, {"tokens": [[1, 7, 1]] * 2, "masks": [[1, 7, -100]] * 2, "scores": [0.5, 1.0]}),
    ):
        assert await api.post("/scored_data", posted) == RECEIVED
        (delivered,) = (await api.get("/batch"))["batch"]
        assert list(delivered) == KEYS
        assert delivered | found == delivered
        assert await api.get("/latest_example") == delivered


async def test_bodies_that_are_too_much_are_refused_shortly(api: Api) -> None:
    for raw in (b'"\xff"', b"[" * 3000 + b"]" * 3000, b'{"tokens":' * 3000):
        answer = await api.http.post("/scored_data", content=raw, headers=JSON)
        assert answer.status_code == 400, raw[:20]
        assert answer.json() == {"detail": "There was an error parsing the body"}
    huge = json.dumps(wire_group(1, tokens=[[0, 10**400, 6]])).encode()
    row = b"[" + b",".join([b'"a"'] * 1_000_000) + b"]"
    faulty = b'{"tokens":[%b,%b],"masks":[[1]],"scores":[1]}' % (row, row)
    for content, at in ((huge, 1), (faulty, 0)):  # a million faults are one
        answer = await api.http.post("/scored_data", content=content, headers=JSON)
        assert answer.status_code == 422
        assert [one["loc"] for one in answer.json()["detail"]] == [["body", "tokens", 0, at]]
    bomb = gzip.compress(b'{"tokens":[[' + b"1," * 20_000_000 + b"1]]}", 1)  # of tiny values
    answer = await api.http.post("/scored_data", content=bomb, headers=GZIP)
    assert (answer.status_code, answer.json()["detail"][:25]) == (413, "The body has more than 20")


async def test_gzip_both_ways(api: Api) -> None:
    await api.register(batch_size=8)
    group = wire_group(8, tokens=[list(range(300))] * 8, masks=[list(range(300))] * 8)
    packed = gzip.compress(json.dumps(group).encode())
    answer = await api.http.post("/scored_data", content=packed, headers=GZIP)
    assert answer.json() == RECEIVED
    large = await api.http.get("/batch", headers={"accept-encoding": "gzip"})
    assert large.headers["content-encoding"] == "gzip"
    assert large.json()["batch"][0]["tokens"] == group["tokens"]
    whole = gzip.compress(b"{}" * 99)
    for broken in (b"no gzip", whole[:-4], whole + b"more"):
        answer = await api.http.post("/scored_data", content=broken, headers=GZIP)
        assert (answer.status_code, answer.text) == (400, "Invalid gzip payload")


async def test_bodies_have_a_limit_before_and_after_inflating(tmp_path: Path) -> None:
    async with running_api(tmp_path / "s.db", server={"max_body_bytes": 10_000}) as api:
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        for content, headers in ((b" " * 10_001, {}), (bomb[:9_000], GZIP)):
            answer = await api.http.post("/scored_data", content=content, headers=headers)
            assert answer.status_code == 413, content[:20]
        await api.register()
        assert await api.post("/scored_data", wire_group()) == RECEIVED


async def test_a_key_stores_a_post_once(api: Api) -> None:
    await api.register(batch_size=2)
    for key, posts, waiting in (("rollout-1", 3, 1), ("", 2, 3)):
        headers = {"idempotency-key": key} if key else {}
        for _ in range(posts):
            assert await api.post("/scored_data", wire_group(), headers=headers) == RECEIVED
        assert (await api.get("/status"))["queue_size"] == waiting
    lists = {"idempotency-key": "rollout-2"}
    for _ in range(2):
        answer = await api.post("/scored_data_list", [wire_group(), wire_group()], headers=lists)
        assert answer["groups_processed"] == 2
    assert (await api.get("/status"))["queue_size"] == 5


# The fast reading of Atropos posts as text never accepts what the full parser refuses

FIELDS = list(ScoredData.model_fields)
ODD: list[Any] = [1.0, 0, -0.0, 1e-05, -999.5, -1000.5, -9999.0, 1e300, 2**31, 2**70, 10**400]
numbers = st.one_of(
    st.integers(-100, 200_000),
    st.floats(-20, 1, width=32),
    st.sampled_from([*ODD, True, "7", None]),
)
places = st.tuples(
    st.sampled_from([0, 1, 5, 5, 5, 2**31 - 1, 2**31, 10**10, -7]),
    st.sampled_from([0, 1, 5, 5, -100, -100, 9, 2**31 - 1, 2**31, 55, -101]),
)
"""A token and its mask; a good part of them fits together."""
usual = st.lists(st.lists(st.integers(0, 150_000), min_size=1, max_size=40), min_size=1, max_size=4)


def group(rows: list[list[int]], **fields: Any) -> dict[str, Any]:
    """A post that is right."""
    return {
        "tokens": rows,
        "masks": [[-100, *row[1:]] for row in rows],
        "scores": [0.5] * len(rows),
        "inference_logprobs": [[1.0] + [-0.0125] * (len(row) - 1) for row in rows],
    } | fields


def raw_group(rows: list[list[int]], **fields: Any) -> bytes:
    return json.dumps(group(rows, **fields)).encode()


def carefully(raw: bytes) -> PostedGroup:
    found = parse_body(raw, atropos_posts._GROUP)
    check_groups([found], listed=False)
    return atropos_posts._posted(found)


def assert_like_carefully(raw: bytes) -> None:
    """The same group, or the same errors."""
    try:
        expected = carefully(raw)
    except (Refused, Unreadable) as error:
        with pytest.raises(type(error)) as refused:
            read_group(raw)
        assert getattr(refused.value, "errors", None) == getattr(error, "errors", None)
        return
    for found in (read_group(raw), read_group(raw, gzip.compress(raw))):
        assert (found.lengths, found.env_id) == (expected.lengths, expected.env_id)
        mine, theirs = json.loads(found.body), json.loads(expected.body)
        # repr: 1 and 1.0 are not the same to a reader of JSON.
        assert repr({key: mine[key] for key in FIELDS}) == repr(theirs)
        assert sorted(mine) == sorted(FIELDS)
        if found.encoded is not None:
            assert compression.decode(*found.encoded) == found.body


@pytest.mark.thorough
@given(
    usual,
    st.dictionaries(st.text(), numbers, max_size=2),
    st.dictionaries(
        st.sampled_from(FIELDS),
        st.one_of(
            numbers,
            st.lists(numbers, max_size=3),
            st.lists(st.lists(numbers, max_size=4), max_size=3),
            st.just([[{"role": "user", "content": "\ud800"}]]),
        ),
        max_size=2,
    ),
)
@example([[5]], {"\0": 1}, {})
@settings(max_examples=examples(150))
def test_other_fields_and_values_have_the_effect_that_they_always_had(
    rows: list[list[int]], more: dict[str, Any], odd: dict[str, Any]
) -> None:
    assert_like_carefully(json.dumps(more | group(rows) | odd).encode())


@given(usual, st.data())
@settings(max_examples=examples(150))
def test_damaged_bodies_have_their_usual_effect(rows: list[list[int]], data: st.DataObject) -> None:
    raw = bytearray(raw_group(rows))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        pieces = [b"", b"0", b"-", b".", b",", b"[", b"]", b"e9", b" "]
        raw[place : place + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(pieces))
    assert_like_carefully(bytes(raw))


@given(st.lists(places, min_size=1, max_size=4))
@settings(max_examples=examples(200))
def test_clients_can_read_what_is_accepted(row: list[tuple[int, int]]) -> None:
    tokens, masks = [token for token, _ in row], [mask for _, mask in row]
    raw = raw_group([tokens], masks=[masks], inference_logprobs=[[-0.5] * len(row)])
    assert_like_carefully(raw)
    is_named = all(mask in (token, -100) for token, mask in row)
    is_right = all(0 <= token < 2**31 for token in tokens) and (is_named or set(masks) <= {0, 1})
    try:
        found = read_group(raw)
    except Refused:
        assert not is_right
        return
    assert is_right
    (read,) = ClientGroup("g", "e", "atropos", -1, memoryview(found.body)).rows
    assert read.tokens.tolist() == tokens
    trained = [mask != -100 if is_named else mask == 1 for mask in masks]
    assert read.mask.tolist() == trained


@pytest.mark.parametrize("masks", [[-100, 6, 7], [0, 1, 1]])
@pytest.mark.parametrize(("logprobs", "is_right"), CASES["logprobs"])
def test_a_trained_token_has_a_logprob_that_sampling_gives(
    masks: list[int], logprobs: list[float], is_right: bool
) -> None:
    raw = raw_group([[5, 6, 7]], masks=[masks], inference_logprobs=[logprobs])
    assert_like_carefully(raw)
    if is_right:
        read_group(raw)
        return
    with pytest.raises(Refused) as refused:
        read_group(raw)
    assert "extreme_logprob" in str(refused.value.errors)


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, True),
        ({"env_id": 0, "messages": [[{"role": "user", "content": "é"}]], "overrides": None}, True),
        ({"scores": [1]}, False),  # trainers get 1.0
        ({"inference_logprobs": [[1] + [0] * 99]}, False),
    ],
)
def test_what_trainers_get_unchanged_is_stored_so(fields: dict[str, Any], is_kept: bool) -> None:
    raw = raw_group([list(range(100))], **fields)
    gzipped = gzip.compress(raw)
    found = read_group(raw, gzipped)
    assert (found.encoded is not None and found.encoded[1].startswith(gzipped)) == is_kept
    assert json.loads(found.body) == json.loads(carefully(raw).body)
    if fields or found.encoded is None:
        return
    encoding, stored = found.encoded  # its damage is noticed
    harmed = [stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :] for at in range(len(stored))]
    for bad in (*harmed, stored[:-1], stored + stored[-1:], gzipped):
        try:
            assert compression.decode(encoding, bad) == found.body  # a byte of gzip's header
        except compression.DamagedBody:
            continue


def test_keys_that_are_written_with_an_escape_or_twice_are_noticed_wherever_they_are() -> None:
    right = json.dumps(group([[7, 8]]))
    escaped = right.replace('"tokens"', r'"tok\u0065ns"')
    filled = [r'{"x": "tokens", "y": [[9, 9]], "z": "\n' + "-" * n + '", ' for n in range(200, 300)]
    nested = '{"generation_params": {"tokens": 1}, "other": [[-9]], '
    for before in (nested, '{"x": "tokens", "y": [1], ', *filled):
        assert_like_carefully(escaped.replace("{", before, 1).encode())
    for before in filled:
        assert_like_carefully(right.replace("{", before, 1).encode())


# Atropos batches, compared with a literal reading of the rules

ENV_IDS = st.one_of(st.none(), st.integers(0, 3))
QUEUES = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), ENV_IDS), max_size=40)
MINIMUMS = st.dictionaries(st.integers(0, 3), st.floats(0, 1), max_size=4)


def waiting(sizes: list[tuple[int, int | None]]) -> list[Waiting]:
    return [Waiting(f"g{i}", size, env, env, float(i)) for i, (size, env) in enumerate(sizes)]


def ids(groups: list[Waiting]) -> list[str]:
    return [group.group_id for group in groups]


@given(QUEUES, st.integers(-1, 24), MINIMUMS)
def test_nothing_is_lost_doubled_or_over_the_batch_size_and_minimum_shares_are_met(
    sizes: list[tuple[int, int | None]], batch_size: int, minimums: dict[Any, float]
) -> None:
    queue = waiting(sizes)
    formed = form_batches(queue, batch_size, minimums)
    wanted = {env: int(batch_size * share) for env, share in minimums.items()}
    for batch in formed.batches:
        assert sum(group.size for group in batch) == batch_size
        if minimums and sum(wanted.values()) <= batch_size and batch_size >= 4:
            assert all(group.env_id is not None for group in batch)
            for env, sequences in wanted.items():
                own = sum(group.size for group in batch if group.env_id == env)
                # A pack may be too large for the room that is left.
                assert own >= sequences or own + 8 > sequences
    out = [group_id for batch in formed.batches for group_id in ids(batch)]
    assert sorted(out + ids(formed.left)) == sorted(ids(queue))
    assert ids(formed.left) == [i for i in ids(queue) if i not in set(out)]
    assert formed.reason


@given(QUEUES, st.integers(1, 24))
def test_plain_batches_are_those_of_the_rule_applied_again_and_again(
    sizes: list[tuple[int, int | None]], batch_size: int
) -> None:
    queue = waiting(sizes)
    expected = []
    while (batch := one_plain_batch(queue, batch_size)) is not None:
        expected.append(ids(batch))
        queue = [group for group in queue if group.group_id not in ids(batch)]
    assert [ids(b) for b in form_batches(waiting(sizes), batch_size).batches] == expected


def one_plain_batch(queue: list[Waiting], batch_size: int) -> list[Waiting] | None:
    """Piles of M sequences become candidates; candidates are taken in order until full."""
    largest = max((group.size for group in queue), default=0)
    piles: dict[int, list[Waiting]] = defaultdict(list)
    candidates: list[Waiting] = []
    for group in queue:
        piles[group.size].append(group)
        if len(piles[group.size]) * group.size == largest:
            candidates += piles.pop(group.size)
    for end in range(len(candidates) + 1):
        if sum(group.size for group in candidates[:end]) == batch_size:
            return candidates[:end]
    return None


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 20))
def test_buffered_parts_that_make_a_whole_are_found(sizes: list[int], target: int) -> None:
    found = groups_summing_to(sizes, target)
    possible = any(
        sum(part) == target for n in range(len(sizes) + 1) for part in combinations(sizes, n)
    )
    assert bool(found) == possible
    assert found == sorted(set(found))
    assert not found or sum(sizes[i] for i in found) == target


def test_parts_that_never_make_a_whole_take_no_time() -> None:
    assert groups_summing_to([2] * 50_001, 50_001) == []
    assert groups_summing_to([2] * 50_001, 100_001) == []
    assert groups_summing_to([3, *[2] * 1023], 1024) == [*range(1, 513)]
