"""How rollouts went: times, failures, what was printed, what their groups lack and why."""

import base64
from pathlib import Path
from typing import Any

import orjson
import pytest
from envserver_records.records import Group, pack
from envserver_records.timings import MOST_PRINTED, MOST_TIMINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from support import commands
from support.api import native_group, put_native, running_api
from support.cases import cases_of
from support.extent import examples

import envserver
from envserver.export.jsonl import group_line
from envserver.export.stored import group_of, group_record
from envserver.export.unified import problems_of, unified_of
from envserver.proxy.attempts import Timeline
from envserver.rollouts.attempt import timings_of
from envserver.rollouts.events import without_hidden
from envserver.rollouts.provenance import MOST_BYTES, bounded_public
from envserver.workers.output import PrintedLines

CASES = cases_of(__file__)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    path = tmp_path_factory.mktemp("talky") / "talky.py"
    path.write_text(CASES["environment"])
    sizes = {"group_size": 3, "total_steps": 1, "ensure_scores_are_not_same": False}
    rules = {"max_attempts": 2, "min_group_size": 2}
    (made,) = envserver.groups(str(path), model="sim", env=sizes, rollouts=rules)
    return made


def test_a_rollout_keeps_what_it_waited_for(group: Group) -> None:
    for rollout in group.trajectories:
        found = [(one.kind, one.name) for one in rollout.timings]
        assert found == [
            ("sandbox", "/bin/true"), *[("tool", "wait")] * 3, *[("tool", "on_server")] * 2,
            ("engine", "sim"), ("engine", "sim"), ("scoring", "score"),
        ]  # fmt: skip
        assert rollout.timings[1].seconds > 0
        starts = [one.started for one in rollout.timings]
        assert starts == sorted(starts)
        played = starts[:-1]  # it is scored when a scorer is free
        assert all(0 <= at <= rollout.usage.seconds + 0.001 for at in played)
        assert abs(rollout.started_at + rollout.usage.seconds - group.created_at) < 60
        for number, one in enumerate([one for one in rollout.timings if one.kind == "engine"]):
            assert (one.call, one.row) == (number, 0)
            assert set(rollout.sequences[0].calls[one.start : one.end]) == {number}


def test_failures_of_earlier_attempts_are_kept_without_what_is_secret(group: Group) -> None:
    failed = [rollout.attempts for rollout in group.trajectories]
    assert [[(one.attempt, one.kind) for one in some] for some in failed] == [
        [(1, "agent_error")], [(1, "scorer_error")],
    ]  # fmt: skip
    assert failed[0][0].message == "OSError: no luck, password=[redacted]"
    raised = "The scorer raised ValueError: expected [hidden] (talky.py:57, in Talky.score)."
    assert failed[1][0].message == raised
    assert all(0 < some[0].seconds < 60 for some in failed)
    (lost,) = group.missing.values()
    assert list(group.missing) == ["2"]
    assert [(one.attempt, one.message) for one in lost] == [
        (1, "OSError: never"), (2, "OSError: never"),
    ]  # fmt: skip
    stored = pack(group)
    assert b"HIDDEN-ANSWER" not in stored
    assert b"hunter2" not in stored


def test_the_last_lines_that_a_rollout_printed_are_kept(group: Group) -> None:
    for rollout in group.trajectories:
        assert {(one.stream, one.text) for one in rollout.printed} == {
            ("stdout", f"to {rollout.rollout_id}: \\x1b]0;***"),
            ("stdout", "in a thread"),
            ("log", "noted n=1"),
        }


def test_files_hold_it_and_are_read_again(group: Group) -> None:
    line = orjson.loads(group_line(group, include_messages=True, score_range="unit"))
    stored = group_of(line, "here")
    assert stored.public == {"question": "Hm?", "blob": {"left_out_bytes": 20_002}}
    for rollout, made in zip(stored.rollouts, group.trajectories, strict=True):
        assert (rollout.timings, rollout.attempts) == (made.timings, made.attempts)
        assert (rollout.printed, rollout.started_at) == (made.printed, made.started_at)
        document = unified_of(rollout)
        assert problems_of(document, domains=["talky"]) == []
        assert len(document["metadata"]["timings"]) == len(made.timings)
        assert document["metadata"]["attempts"][0]["kind"] == made.attempts[0].kind
    record = group_record(stored)
    assert (record.public, record.missing) == (stored.public, group.missing)
    for rollout, made in zip(record.trajectories, group.trajectories, strict=True):
        assert rollout.timings == made.timings
        assert (rollout.sequences[0].calls == made.sequences[0].calls).all()
    for rollout in line["envserver"]["rollouts"]:  # as older versions wrote it
        for name in ("timings", "attempts", "printed", "started_at"):
            del rollout[name]
    assert [one.timings for one in group_of(line, "here").rollouts] == [[], []]


async def test_the_api_shows_it(group: Group, tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        await put_native(api.store, group)
        path = f"/v1/groups/{group.group_id}/rollouts"
        found = await api.get(path)
        row = (await api.get("/v1/groups"))["groups"][0]
        for name in ("seq", "state", "rewards", "reward_mean", "turns"):
            assert found["group"][name] == row[name]
        assert found["group"]["task"]["question"] == "Hm?"
        assert [one["fault"] for one in found["group"]["missing"]["2"]] == ["environment"] * 2
        for number, shown in enumerate(found["rollouts"]):
            assert (await api.get(f"{path}/{number}"))["rollout"] == shown
            assert [one["kind"] for one in shown["timings"]].count("engine") == 2
            assert shown["timings"][6]["to"] > shown["timings"][6]["from"]
            assert shown["attempts"][0]["fault"] == "environment"
            assert {one["stream"] for one in shown["logs"]} == {"stdout", "log"}
            assert shown["use"]["programs"] == 1


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


async def test_pictures_are_links_and_no_other_type_is_sent(tmp_path: Path) -> None:
    def part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    page = part(b"<script>alert(1)</script>")
    far = {"type": "image_url", "image_url": {"url": "https://elsewhere.example/a.png"}}
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 300_000}}
    content = [{"type": "text", "text": "Look"}, page, far, part(PNG, "text/html"), sound]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "I see"}]
    made = native_group("a/b", messages=talk)
    async with running_api(tmp_path / "store.db") as api:
        await put_native(api.store, made)
        shown = (await api.get("/v1/groups/a%2Fb/rollouts/1"))["rollout"]["messages"]
        links = [one["image_url"]["url"] for one in shown[0]["content"][1:4]]
        address = "v1/groups/a%2Fb/rollouts/1/images"
        assert links == [f"{address}/0", far["image_url"]["url"], f"{address}/1"]
        assert shown[0]["content"][4]["left_out_bytes"] > 300_000
        assert (await api.http.get(links[0])).status_code == 404
        assert (await api.http.get(f"{address}/2")).status_code == 404
        picture = await api.http.get(links[2])
        assert (picture.content, picture.headers["content-type"]) == (PNG, "image/png")
        assert picture.headers["content-security-policy"] == "default-src 'none'"
        assert picture.headers["x-content-type-options"] == "nosniff"


async def test_the_rollouts_of_a_large_group_come_without_their_texts(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "word " * 600_000}]
    async with running_api(tmp_path / "store.db") as api:
        await put_native(api.store, native_group("large", 4, messages=talk))
        found = (await api.get("/v1/groups/large/rollouts"))["rollouts"]
        assert [one.get("cut", False) for one in found] == [False, False, True, True]
        assert [one["score"]["reward"] for one in found] == [0.0, 1.0, 0.0, 1.0]
        alone = await api.get("/v1/groups/large/rollouts/3")
        assert alone["rollout"]["messages"] == talk


def test_what_one_rollout_keeps_is_bounded() -> None:
    timeline, lines = Timeline(), PrintedLines()
    for number in range(2 * MOST_TIMINGS):
        timeline.note("tool", "t" * 1000, timeline.started_at + number, float("nan"))
        timeline.printed(number, "stdout", "line " * 300)
        lines.add("stderr", f"{number}" * 500 + "\n" * (number % 2))
    assert len(timings_of(timeline, [], [])) == MOST_TIMINGS
    assert timeline.timings[0].seconds == 0
    assert sum(len(one.text) for one in timeline.lines()) <= MOST_PRINTED
    assert 0 < sum(len(text) for _, _, text in lines.taken()) <= MOST_PRINTED
    kept = bounded_public({"small": 1, "large": "x" * MOST_BYTES, "strange": object()})
    assert kept["small"] == 1
    assert kept["large"] == {"left_out_bytes": MOST_BYTES + 2}
    assert list(kept["strange"]) == ["left_out_bytes"]


SECRETS = st.text(min_size=4, max_size=30) | st.integers(min_value=1000)


@settings(max_examples=examples(80))
@given(st.recursive(SECRETS, lambda inner: st.lists(inner, max_size=3), max_leaves=4), st.text())
def test_no_value_of_the_hidden_part_stays_in_a_message(hidden: Any, around: str) -> None:
    values = list(flat(hidden))
    for write in (str, repr, lambda value: orjson.dumps(str(value)).decode()):
        text = around.join(write(value) for value in values)
        assert all(str(value) not in without_hidden(text, {"h": hidden}) for value in values)


def flat(value: Any) -> Any:
    if isinstance(value, list):
        for inner in value:
            yield from flat(inner)
    else:
        yield value


def processed(folder: Path, source: str, *words: object) -> tuple[list[dict[str, Any]], str]:
    """The groups that `envserver process` writes for this environment, and what it says."""
    (folder / "made.py").write_text(source)
    ran = commands.envserver(
        "process", "--env", "made.py", "--model", "sim", "--sim.latency_seconds", 0,
        "--workers.processes", 1, "--env.data_path_to_save_groups", "out.jsonl", *words,
        folder=folder,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return commands.read_jsonl(folder / "out.jsonl"), ran.stderr


def test_a_group_that_lacks_rollouts_says_which_and_why(tmp_path: Path) -> None:
    lines, told = processed(
        tmp_path, CASES["uneven"], "--env.folder", tmp_path, "--env.group_size", 4,
        "--rollouts.max_attempts", 1, "--rollouts.min_group_size", 3,
        "--rollouts.straggler_grace_seconds", 5,
    )  # fmt: skip
    said = {line["envserver"]["task_id"]: line for line in lines}
    lost = {name: line["envserver"]["lost"] for name, line in said.items()}
    assert lost == {"fine": {}, "slow": {"straggler": 1}, "broken": {"agent_error": 1}}
    for name, line in said.items():
        assert line["envserver"]["asked"] == 4
        assert len(line["scores"]) == (4 if name == "fine" else 3)
    assert "straggler" in told


def test_a_text_that_uses_up_the_scorers_time_scores_zero_with_a_flag(tmp_path: Path) -> None:
    (line,), _ = processed(
        tmp_path, CASES["burning"], "--env.folder", tmp_path, "--env.group_size", 4
    )
    assert sorted(line["scores"]) == [0.0, 0.5, 0.5, 0.5]
    flags = [set(rollout["flags"]) for rollout in line["envserver"]["rollouts"]]
    assert sorted("scorer_killed" in some for some in flags) == [False, False, False, True]
    assert line["envserver"]["lost"] == {}


@pytest.mark.thorough
def test_an_agent_that_keeps_asking_after_its_last_turn_is_ended_and_scored(tmp_path: Path) -> None:
    (line,), told = processed(
        tmp_path, CASES["asking"], "--env.group_size", 2, "--env.total_steps", 1,
        "--env.max_turns", 1, "--env.worker_timeout", 3600,
    )  # fmt: skip
    assert sorted(line["scores"]) == [0.0, 1.0]
    assert [one["limit"] for one in line["envserver"]["rollouts"]] == ["turns", "turns"]
    assert sorted(one["truncated"] for one in line["envserver"]["rollouts"]) == [False, True]
    assert "attempt" not in told, "none failed"
