"""`envserver verify`: right rows pass, every kind of damage is named."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from envserver_local.simulated.engine import SimEngine
from envserver_records.errors import EngineError, EngineUnavailable
from envserver_records.records import Group
from support import echo
from support.api import put_native, running_api
from support.cases import write_jsonl
from support.commands import envserver, free_port, read_jsonl
from support.in_process import Run
from support.sampled import PROMPT, SAMPLED, Engine, group
from support.vllm_server import CONTEXT, VllmServer

from envserver.export import group_line
from envserver.running.delivered import FileSource
from envserver.running.run_settings import VerifySettings
from envserver.running.verifying import Report, verify

Check = Callable[..., Any]
GROUPS = [group("a"), group("b")]


def lines_of(*groups: Group) -> list[dict[str, Any]]:
    made = [group_line(one, include_messages=True, score_range="unit") for one in groups]
    return [orjson.loads(line) for line in made]


@pytest.fixture
def check(run: Run) -> Check:
    """Runs the command on lines, which must end with `status`; returns its JSON."""

    def command(lines: list[dict[str, Any]], words: str = "", status: int = 0) -> Any:
        write_jsonl(Path("groups.jsonl"), lines)
        return json.loads(run(f"verify groups.jsonl --model sim --json {words}", status).out)

    return command


async def verified(path: Path, engine: SimEngine, **changes: Any) -> Report:
    settings = VerifySettings(source=str(path), **changes)
    return await verify(FileSource(path), engine, settings)


def test_the_table_fits_eighty_columns_and_is_plain(run: Run) -> None:
    lines = lines_of(*GROUPS)
    lines[0]["inference_logprobs"][1][PROMPT] -= 0.25
    write_jsonl(Path("x"), lines)
    told = run("verify x --model sim", status=1).out
    assert "DIFFERENT" in told
    assert "logprobs_differ: line 1, a-1, row 1, position 9: token" in told
    assert "+0.25" in told
    assert max(map(len, told.partition("logprobs_differ: ")[0].splitlines()[2:])) <= 80


Row = list[Any]
Damage = Callable[[dict[str, Any]], Any]
OF_ROWS = ("tokens", "masks", "scores", "inference_logprobs")
AT = PROMPT + 2


def other(token: int) -> int:
    return token + 1 if token < 300 else token - 1


def put(place: int, value: Any) -> Callable[[Row], Row]:
    """A row with another value (of the old one, where it is a function) at a place."""
    return lambda row: [
        *row[:place], value(row[place]) if callable(value) else value, *row[place + 1 :]
    ]  # fmt: skip


def row(**changes: Callable[[Row], Row]) -> Damage:
    """Changes the first row."""

    def change(line: dict[str, Any]) -> None:
        for name, made in changes.items():
            line[name][0] = made(line[name][0])

    return change


def exchanged(row: Row) -> Row:
    return [*row[:PROMPT], row[PROMPT + 1], row[PROMPT], *row[PROMPT + 2 :]]


def train_from_the_prompt_on(line: dict[str, Any]) -> None:
    line["masks"][0] = [-100] * (PROMPT - 1) + line["tokens"][0][PROMPT - 1 : -1] + [-100]


@pytest.mark.parametrize(
    ("damage", "kind", "place", "position"),
    [
        (row(tokens=put(AT, other)), "mask", 0, AT),
        (row(tokens=put(AT, other), masks=put(AT, other)), "logprobs_differ", 0, None),
        (row(tokens=exchanged, masks=exchanged), "logprobs_differ", 0, None),
        (row(masks=lambda row: [-100, *row[:-1]]), "mask", 0, PROMPT + 1),
        (train_from_the_prompt_on, "logprob", 0, PROMPT - 1),
        (row(inference_logprobs=put(AT, lambda p: p - 1e-3)), "logprobs_differ", 0, AT),
        (row(inference_logprobs=put(AT, float("nan"))), "logprob", 0, AT),
        (row(inference_logprobs=put(AT, 0.25)), "logprob", 0, AT),
        (lambda line: [line[name].pop(2) for name in OF_ROWS], "rows", None, None),
        (lambda line: [line[name].append(line[name][0]) for name in OF_ROWS], "rows", 3, None),
        (row(inference_logprobs=lambda row: row[:-1]), "lengths", 0, None),
        (lambda line: line["envserver"]["rollouts"][0]["versions"][0].pop(), "versions", 0, None),
        (row(tokens=put(2, -3)), "token_id", 0, 2),
        (row(tokens=put(2, 10**6)), "refused", 0, None),
    ],
)
def test_damage_is_found_and_named(
    check: Check, damage: Damage, kind: str, place: int | None, position: int | None
) -> None:
    lines = lines_of(*GROUPS)
    damage(lines[1])
    report = check(lines, status=1)
    assert report["verdict"] == "wrong"
    found = next(one for one in report["findings"] if one["kind"] == kind)
    assert (found["line"], found["group_id"], found["row"]) == (2, "b", place)
    if position is not None:
        assert found["position"] == position
    assert {one["line"] for one in report["findings"]} == {2}
    assert report["compared"]["rows"] >= 3  # those of the other line


def test_lines_that_cannot_be_read_are_named_and_the_rest_goes_on(run: Run) -> None:
    good = write_jsonl(Path("x"), lines_of(*GROUPS)).read_bytes().splitlines()
    bad = [b"{", b'{"tokens": [["x"]]}', b"[" * 100_000, b'"\xff"', b"", good[1][:-50]]
    Path("x").write_bytes(b"\n".join([good[0], *bad, good[1]]))
    report = json.loads(run("verify x --model sim --json", status=1).out)
    found = {one["line"]: one["kind"] for one in report["findings"]}
    assert found == dict.fromkeys([2, 3, 4, 5, 7], "unreadable")
    assert len(report["findings"]) == 5 and report["compared"]["rows"] == 6


def test_the_tolerance_decides_what_passes(check: Check) -> None:
    lines = lines_of(*GROUPS)
    lines[0]["inference_logprobs"][0][PROMPT] -= 3e-5
    report = check(lines)
    assert report["verdict"] == "within_tolerance"
    compared = report["compared"]
    assert compared["tokens_exactly_equal"] == compared["tokens"] - 1
    assert compared["kl_k1"] == pytest.approx(-3e-5 / compared["tokens"], rel=1e-2)
    place = {"group_id": "a", "rollout_id": "a-0", "row": 0, "line": 1, "position": PROMPT}
    worst = report["worst"][0]
    assert worst.items() >= place.items()
    assert worst.keys() - place.keys() == {"token", "recorded", "again", "difference"}
    check(lines, "--tolerance 0", status=1)


def test_rows_of_other_versions_are_counted_not_compared(check: Check) -> None:
    old = group("old", version=6)
    for trajectory in old.trajectories:
        for row in trajectory.sequences:
            row.logprobs[PROMPT:] -= 0.5
    assert check(lines_of(*GROUPS, old))["not_compared"] == {"other_version": 3}
    assert check(lines_of(*GROUPS, old), "--policy_version 6", status=1)["compared"]["rows"] == 3


def test_that_nothing_can_be_compared_is_no_success(check: Check) -> None:
    for lines in ([], lines_of(group("a", mask=np.zeros(PROMPT + SAMPLED, np.uint8)))):
        for line in lines:
            line["inference_logprobs"] = [[1.0] * (PROMPT + SAMPLED)] * 3
        report = check(lines, status=1)
        assert report["verdict"] == "nothing_compared"
    assert report["not_compared"] == {"nothing_trained": 3}


@pytest.mark.parametrize("flag", ["structured_output_masked", "unchecked_fields"])
async def test_rows_that_are_not_compared_are_counted_by_reason(tmp_path: Path, flag: str) -> None:
    lines = lines_of(*GROUPS)
    lines[0]["envserver"]["rollouts"][0]["row_flags"] = [[flag]]
    lines[0]["tokens"][1] = lines[0]["masks"][1] = lines[0]["inference_logprobs"][1] = []
    lines[0]["envserver"]["rollouts"][1]["versions"][0] = []
    lines[1]["inference_logprobs"] = None
    report = await verified(write_jsonl(tmp_path / "x", lines), Engine())
    assert report.not_compared == {flag: 1, "no_tokens": 1, "no_logprobs": 3}
    assert (report.totals.rows, report.verdict) == (1, "exact")


@pytest.mark.parametrize("says", [True, False])
async def test_rows_longer_than_the_context_are_left_out(tmp_path: Path, says: bool) -> None:
    path = write_jsonl(tmp_path / "x", lines_of(*GROUPS))
    report = await verified(path, Engine(context=PROMPT + SAMPLED, says=says))
    assert (report.not_compared, report.kinds) == ({"too_long": 6}, {})


@pytest.mark.parametrize("processed", [False, True])
async def test_logprobs_after_the_temperature_are_no_match(tmp_path: Path, processed: bool) -> None:
    path = write_jsonl(tmp_path / "x", lines_of(*GROUPS, group("hot", temperature=0.7)))
    report = await verified(path, Engine(processed=processed))
    assert report.not_compared == ({"processed_logprobs": 3} if processed else {})
    assert report.verdict == "exact"


async def test_an_engine_that_fails_is_told_apart_from_wrong_rows(tmp_path: Path) -> None:
    lines = lines_of(*GROUPS)
    lines[1]["tokens"][0][0] = 13
    path = write_jsonl(tmp_path / "x", lines)
    report = await verified(path, Engine(fails=EngineError("Out of memory.")))
    (found,) = report.findings
    assert (found.kind, found.line, found.row) == ("engine_error", 2, 0)
    assert report.totals.rows == 5
    with pytest.raises(EngineUnavailable):
        await verified(path, Engine(fails=EngineUnavailable("Gone.")), concurrency=4)


def test_a_sample_is_the_same_for_the_same_seed(check: Check) -> None:
    lines = lines_of(*(group(name) for name in "abcdefgh"))
    for line in lines:
        for row in line["inference_logprobs"]:
            row[PROMPT] -= 0.5

    def chosen(words: str) -> list[tuple[int, int]]:
        report = check(lines, f"--sample {words}", status=1)
        assert report["compared"]["rows"] + report["not_compared"].get("not_sampled", 0) == 24
        return sorted((one["line"], one["row"]) for one in report["findings"])

    assert len(chosen("5")) == 5
    assert chosen("5") != chosen("5 --seed 1")
    half = chosen("50%")
    assert half == chosen("0.5")
    assert 4 < len(half) < 20


def test_a_wrong_command_line_is_status_two(run: Run) -> None:
    write_jsonl(Path("x"), lines_of(GROUPS[0]))
    nowhere = f"http://127.0.0.1:{free_port()}"
    for words in (
        "", "none.jsonl --model sim", f"{nowhere} --model sim", "x --model sim --sample x",
        "x --openai.server_type openai",
    ):  # fmt: skip
        run(f"verify {words}", status=2)


@pytest.mark.thorough
async def test_a_servers_groups_are_verified_where_they_lie(tmp_path: Path) -> None:
    wrong = group("math/wrong")
    wrong.trajectories[1].sequences[1].logprobs[PROMPT + 1] -= 0.125
    async with running_api(tmp_path / "store.db") as api:
        for one in (*GROUPS, wrong):
            await put_native(api.store, one)
        (post,) = lines_of(group("posted", version=-1))
        del post["envserver"], post["env_id"]
        await api.post("/scored_data", post)
        await api.post("/v1/policy-version", {"version": 7})
        await api.http.post("/v1/runs", json={"name": "run"})
        await api.http.post("/v1/runs/run/lease", json={"max_groups": 1})
        before = await api.store.counts()
        ran = await asyncio.to_thread(
            envserver, "verify", api.url, "--model", "sim", "--json", folder=tmp_path
        )
        assert await api.store.counts() == before
    assert ran.returncode == 1, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["groups"], report["rows"], report["compared"]["rows"]) == (4, 12, 9)
    assert report["not_compared"] == {"other_version": 3}  # nobody says who sampled a post
    (found,) = report["findings"]
    assert (found["kind"], found["group_id"]) == ("logprobs_differ", "math/wrong")
    assert (found["rollout_id"], found["row"], found["position"]) == (
        "math/wrong-1", 2, PROMPT + 1,
    )  # fmt: skip


@pytest.mark.vllm
def test_two_hundred_turns_on_vllm_are_one_exact_row(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    engine = (
        "--openai.base_url", vllm_server.base_url, "--openai.model_name", vllm_server.model,
    )  # fmt: skip
    ran = envserver(
        "process", "--env", f"{echo.__file__}:Talker", *engine, "--env.max_turns", 200,
        "--env.max_token_length", CONTEXT, "--env.group_size", 2, "--env.total_steps", 1,
        "--env.worker_timeout", 900, "--sampling.max_tokens", 8, "--out", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (group,) = read_jsonl(tmp_path / "out.jsonl")
    assert [one["turns"] for one in group["envserver"]["rollouts"]] == [200, 200]
    ran = envserver("verify", "out.jsonl", *engine, "--json", folder=tmp_path)
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["findings"]) == (0, [])
    assert (report["compared"]["rows"], report["compared"]["tokens"] > 2000) == (2, True)


@pytest.mark.vllm
def test_what_vllm_sampled_is_right_if_unchanged(vllm_server: VllmServer, tmp_path: Path) -> None:
    engine = (
        "--openai.base_url", vllm_server.base_url, "--openai.model_name", vllm_server.model,
    )  # fmt: skip
    ran = envserver(
        "process", "--env", "math", *engine, "--env.group_size", 2, "--env.total_steps", 8,
        "--sampling.max_tokens", 24, "--env.data_path_to_save_groups", "out.jsonl",
        "--env.mode", "single", "--rollouts.max_concurrent", 1, folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    ran = envserver("verify", "out.jsonl", *engine, "--json", folder=tmp_path)
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["groups"], report["findings"]) == (0, 8, [])
    assert report["compared"]["tokens"] > 100
    for worst in report["worst"]:
        assert worst["position"] >= vllm_server.same_sums_tokens
        assert abs(worst["difference"]) < 1e-5
    lines = read_jsonl(tmp_path / "out.jsonl")
    made_with = lines[5]["envserver"]["provenance"]
    assert made_with["engine"]["server"].startswith("vllm 0.")
    assert made_with["engine"]["source"] == vllm_server.model_folder.name
    assert str(vllm_server.model_folder) not in json.dumps(made_with)
    masks, logprobs = lines[5]["masks"][1], lines[5]["inference_logprobs"][1]
    at = next(place for place, label in enumerate(masks) if label != -100)
    logprobs[at] -= 1e-3
    write_jsonl(tmp_path / "out.jsonl", lines)
    ran = envserver("verify", "out.jsonl", *engine, "--digests", "false", "--json", folder=tmp_path)
    assert ran.returncode == 1
    (found,) = json.loads(ran.stdout)["findings"]
    assert (found["line"], found["row"], found["position"]) == (6, 1, at)
