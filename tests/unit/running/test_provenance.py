"""Each group says what it was made with, and a changed, removed or moved one is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import orjson
from envserver_records.records import Group, pack, unpack
from envserver_records.seals import chained, digest_after, is_intact, link_of, sealed
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import native_group
from support.commands import read_jsonl
from support.extent import examples
from support.in_process import Run

from envserver import SamplingConfig
from envserver.models.model_files import model_source
from envserver.registry import find
from envserver.rollouts.provenance import made_with
from envserver.running.delivered import Delivery, LineChain, read_body
from envserver.tokens_config import TokensConfig

OBJECTS = st.dictionaries(st.text(max_size=5), st.integers(0, 9), min_size=1)
LINES = st.lists(OBJECTS, min_size=3, max_size=6)
FORMAL = '''
from envserver import Environment, Score, Task

class Formal(Environment):
    """Says hello."""

    class Config(Environment.Config):
        api_key: str = ""

    def tasks(self, split):
        for number in range(4):
            yield Task(f"t{number}", {}, {})

    async def rollout(self, task, run):
        return (await run.chat([{"role": "user", "content": "hi"}])).content

    def score(self, task, result):
        return Score(reward=0.5)
'''


def file_of(objects: list[dict[str, int]], *, old: int = 0) -> list[bytes]:
    """Lines of a file, the first `old` of them without a link, as an older version wrote them."""
    lines: list[bytes] = []
    for number, one in enumerate(objects):
        line = orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE)
        if number >= old:
            line = chained(line, digest_after(lines[-1]) if lines else "")
        lines.append(line)
    return lines


def found(lines: list[bytes]) -> list[tuple[str, int | None]]:
    chain, delivery = LineChain(), Delivery()
    for number, line in enumerate(lines, 1):
        chain.check(line, number, delivery)
    return [(one.kind, one.line) for one in delivery.findings]


@settings(max_examples=examples(100))
@given(LINES, st.integers(0, 2), st.data())
def test_what_was_done_to_a_file_is_found_with_its_line(
    objects: list[dict[str, int]], old: int, data: st.DataObject
) -> None:
    lines = file_of(objects, old=old)
    assert found(lines) == []
    assert [orjson.loads(line).keys() - {"chain"} for line in lines] == [o.keys() for o in objects]
    last = len(lines)
    at = data.draw(st.integers(old, last - 1))
    place = data.draw(st.integers(0, len(lines[at]) - 2))
    changed = bytearray(lines[at])
    changed[place] ^= 1
    kinds = found([*lines[:at], bytes(changed), *lines[at + 1 :]])
    # Without its only link, a file is one from before links.
    if old != at or at != last - 1 or link_of(bytes(changed)) is not None:
        assert kinds, "a changed byte is found"
        assert kinds[0][1] in (at + 1, at + 2)
    if at + 1 < last:
        assert found([*lines[:at], *lines[at + 1 :]]) == [("order", at + 1)], "a line is removed"
        unlinked = orjson.dumps(objects[at], option=orjson.OPT_APPEND_NEWLINE)
        assert found([*lines[:at], unlinked, *lines[at + 1 :]]), "a link is removed"
        forged = chained(unlinked, "")
        assert found([*lines[:at], forged, *lines[at + 1 :]]) or forged == lines[at]
    spaced = (json.dumps(orjson.loads(lines[at]), indent=None) + "\n").encode()
    assert ("changed", at + 1) in found([*lines[:at], spaced, *lines[at + 1 :]])


def test_a_stored_group_that_was_changed_is_found() -> None:
    group = sealed(native_group("a"))
    body = pack(group)
    assert is_intact(body) and pack(unpack(body, Group)) == body
    assert read_body("a", "group", 7, body).findings == []
    group.trajectories[0].score.reward = 1.0
    (finding,) = read_body("a", "group", 7, pack(group)).findings
    assert (finding.kind, finding.group_id) == ("changed", "a")
    delivery = read_body("a", "group", 7, pack(msgspec.structs.replace(group, digest="")))
    assert (delivery.findings, delivery.unsealed) == ([], True)


def test_the_digest_of_settings_is_of_those_that_matter() -> None:
    def digest(**env: Any) -> str:
        kind = find("math")
        environment = kind(kind.Config.model_validate(env))
        return str(made_with(environment, SamplingConfig(), TokensConfig())["settings"])

    where = {"data_path_to_save_groups": "/x/y.jsonl", "total_steps": 9}
    assert digest() == digest(**where) != digest(group_size=9)


def test_a_model_is_named_without_its_path() -> None:
    qwen, cached = "Qwen/Qwen3-4B", "/home/me/.cache/models--Qwen--Qwen3-4B/snapshots/0123abc"
    known = {"source": qwen, "revision": "0123abc"}
    assert model_source(None, None) == {}
    assert model_source(qwen, None) == {"source": qwen}
    assert model_source("/home/me/secret/tiny/", None) == {"source": "tiny"}
    assert model_source(cached, None) == known
    assert model_source(qwen, Path(cached)) == known


def test_process_writes_it_and_verify_names_the_changed_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "formal.py").write_text(FORMAL)
    words = (
        f"process --env {tmp_path}/formal.py --model sim --sim.latency_seconds 0 "
        f"--env.api_key hush-hush --env.group_size 2 --out {tmp_path}/out.jsonl "
        "--workers.processes 1 --env.total_steps"
    )
    run(f"{words} 2")
    run(f"{words} 4 --resume")
    path = Path("out.jsonl")
    facts = [line["envserver"] for line in read_jsonl(path)]
    assert len(facts) == 4
    told = facts[0]["provenance"]
    assert told["environment"]["name"] == "formal" and told["environment"]["files"] == 1
    assert told["code"]["version"] and len(told["code"]["digest"]) == 64
    assert told["engine"]["server"] and told["engine"]["model"] == "sim"
    assert told["sampling"]["temperature"] == 1.0 and told["policy_versions"] == [-1]
    assert all(one["provenance"] == told for one in facts), "the same code and settings"
    text = path.read_text()
    assert "hush-hush" not in text and str(tmp_path) not in text

    verify = "verify out.jsonl --model sim"
    run(verify)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[1].replace(b'"reward":0.5', b'"reward":1.0')
    path.write_bytes(b"".join([lines[0], changed, *lines[2:]]))
    said = run(verify, status=1)
    assert f"changed: line 2, {facts[1]['group_id']}" in " ".join(said.out.split())
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    said = run(verify, status=1)
    assert f"order: line 2, {facts[2]['group_id']}" in " ".join(said.out.split())
    run(f"{verify} --digests false")  # an excerpt
