"""`python -m envserver_clients.vertex` against a stand-in of the service, and buckets in memory."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest
from envserver_clients import dpo, sft
from envserver_clients.finetuning.card import base_name
from envserver_clients.finetuning.conversation import (
    Call,
    Part,
    are_valid,
    calls_in,
    digest_of,
    parts_of,
    rows_of,
)
from envserver_clients.finetuning.settings import tell
from envserver_clients.vertex import command
from envserver_clients.vertex.command import main
from envserver_records.tasks import Json
from rich.console import Console
from support.cases import cases_of, write_jsonl
from support.http_stand_in import standing_in

from envserver import ConfigError

CASES = cases_of(__file__)

BODY = {
    *("baseModel", "supervisedTuningSpec", "tunedModelDisplayName", "labels", "description"),
    *("outputUri", "customBaseModel"),  # v1beta1 only
}
SPEC = {"trainingDatasetUri", "validationDatasetUri", "hyperParameters", "tuningMode"}
HYPER = {"epochCount", "adapterSize", "learningRateMultiplier"}
STATES = ("PENDING", "RUNNING", "SUCCEEDED")


class VertexStandIn(ExitStack):
    """Vertex AI's tuning jobs, as its REST reference describes them; `address` is where it listens.

    Args:
        on_success: gets a job that succeeds, and may put files where it says.
    """

    def __init__(self, on_success: Callable[[Json], None] = lambda job: None) -> None:
        super().__init__()
        self.token = "secret-token"
        self.states: tuple[str, ...] = STATES
        self.jobs: dict[str, Json] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []
        """Answers to the next requests: a status; 200: as always; 0 does what is asked, then hangs
        up."""
        self.on_success = on_success

    def __enter__(self) -> VertexStandIn:
        self.address = self.enter_context(standing_in(self._heard))
        return super().__enter__()

    def _heard(self, path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        method = "POST" if body else "GET"
        self.requests.append((method, path))
        failure = self.failures.pop(0) if self.failures else 200
        status, answer = failure, {"error": {"message": "not now"}}
        if failure in (0, 200):
            status, answer = self.answer(method, path, json.loads(body or "null"))
        if headers["Authorization"] != f"Bearer {self.token}":
            status, answer = 401, {"error": {"message": "no such token"}}
        return status if failure else 0, json.dumps(answer).encode()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        version, _, name = path.partition("?")[0].lstrip("/").partition("/")
        if method == "POST" and name.endswith("/tuningJobs"):
            return self._create(version, name, body)
        if name.endswith("/tuningJobs"):
            return 200, {"tuningJobs": list(self.jobs.values())} if self.jobs else {}
        if name not in self.jobs:
            return 404, {"error": {"message": f"{name} is not found."}}
        return 200, self._later(self.jobs[name])

    def _create(self, version: str, parent: str, body: Json) -> tuple[int, Any]:
        spec = body.get("supervisedTuningSpec", {})
        unknown = {*body} - BODY | {*spec} - SPEC | {*spec.get("hyperParameters", {})} - HYPER
        beta = {"outputUri", "customBaseModel", "tuningMode"} & {*body, *spec}
        if unknown or (beta and version != "v1beta1") or "trainingDatasetUri" not in spec:
            wrong = sorted(unknown | beta)
            return 400, {"error": {"message": f"Invalid JSON payload: unknown names {wrong}"}}
        name = f"{parent}/{len(self.jobs) + 1}"
        self.jobs[name] = {**body, "name": name, "state": "JOB_STATE_QUEUED"}
        return 200, self.jobs[name]

    def _later(self, job: Json) -> Json:
        """Each look finds it one state further."""
        at = job["state"].removeprefix("JOB_STATE_")
        after = (
            self.states[min(self.states.index(at) + 1, len(self.states) - 1)]
            if (at in self.states)
            else self.states[0]
        )
        job["state"] = f"JOB_STATE_{after}"
        if after == "FAILED":
            job["error"] = {"code": 3, "message": "The dataset is too small."}
        if after == "SUCCEEDED":
            place = job["name"].partition("/tuningJobs")[0]
            job["tunedModel"] = {"model": f"{place}/models/7@1", "endpoint": f"{place}/endpoints/9"}
            self.on_success(job)
        return job


GEMINI, OPEN = "gemini-2.5-flash", "meta/llama3_1@llama-3.1-8b-instruct"
MEMORY = fsspec.filesystem("memory")
Tune = Callable[..., tuple[str, str]]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[VertexStandIn]:
    def adapter(job: Json) -> None:
        if place := job.get("outputUri"):
            MEMORY.pipe(f"{place}/adapter/adapter_config.json", b"{}")
            MEMORY.pipe(f"{place}/adapter/adapter_model.safetensors", b"weights")

    with VertexStandIn(adapter) as service:
        monkeypatch.setenv("VERTEX_ACCESS_TOKEN", service.token)
        yield service
    MEMORY.store.clear()


@pytest.fixture
def tune(service: VertexStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tune:
    """Runs the command on rows.jsonl; returns what it says on both streams, which is no secret."""

    def ran(*more: str, status: int = 0, address: str = service.address) -> tuple[str, str]:
        data = tmp_path / "rows.jsonl"
        if not data.exists():
            write_rows(data, *map(chat, range(20)))
        given = {"data": data, "output": tmp_path / "out", "bucket": "memory://b/p"}
        given |= {"project": "mine", "endpoint": address, "poll-seconds": 0.01}
        flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        found = main([*flags, *more])
        said = capsys.readouterr()
        assert found == status, said.err
        assert "secret-token" not in said.out + said.err
        return said.out, " ".join(said.err.split())

    return ran


def chat(number: int, *more: Json) -> Json:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{number}+1?"},
        {"role": "assistant", "content": str(number + 1)},
    ]
    return {"messages": [*said, *more], "reward": 1.0}


def launches(service: VertexStandIn) -> int:
    return [method for method, _ in service.requests].count("POST")


def test_from_rows_to_an_adapter(service: VertexStandIn, tune: Tune, tmp_path: Path) -> None:
    tune("--base-model", OPEN, "--validation-share", "0.2", "--learning-rate-multiplier", "2")
    (job,) = service.jobs.values()
    run = job["labels"]["envserver_run"]
    assert job["supervisedTuningSpec"] == {
        "trainingDatasetUri": f"memory://b/p/{run}/train.jsonl",
        "validationDatasetUri": f"memory://b/p/{run}/validation.jsonl",
        "hyperParameters": {
            "epochCount": 3,
            "adapterSize": "ADAPTER_SIZE_SIXTEEN",
            "learningRateMultiplier": 2.0,
        },
        "tuningMode": "TUNING_MODE_PEFT_ADAPTER",
    }
    assert job["baseModel"] == OPEN and job["outputUri"] == f"memory://b/p/{run}/tuned"
    sent = MEMORY.cat(f"/b/p/{run}/train.jsonl") + MEMORY.cat(f"/b/p/{run}/validation.jsonl")
    said = sorted(json.loads(line)["messages"][1]["content"] for line in sent.splitlines())
    assert said == sorted(f"{number}+1?" for number in range(20))
    adapter = tmp_path / "out" / "adapter" / "adapter" / "adapter_model.safetensors"
    assert adapter.read_bytes() == b"weights"
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["tunedModel"]["endpoint"] == "projects/mine/locations/us-central1/endpoints/9"
    assert all(path.startswith("/v1beta1/projects/mine/") for _, path in service.requests)


def test_geminis_lines(service: VertexStandIn, tune: Tune, tmp_path: Path) -> None:
    write_rows(
        tmp_path / "rows.jsonl",
        chat(1, {"role": "user", "content": "2+1?"}, {"role": "assistant", "content": "3"}),
        {"prompt": "a", "completion": "b"},
        {"tool": "reason", "instruction": "c", "output": "d", "meta": {}},
        {"prompt": [{"role": "user", "content": "e"}, {"role": "user", "content": "f"}],
         "completion": [{"role": "assistant", "content": "g"}]},
        chat(2, {"role": "user", "content": "and?"}),
        chat(3, {"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}),
        {"prompt": "h", "completion": " "},
        {"prompt": "i" * 1000, "completion": "j"},
    )  # fmt: skip
    tune("--base-model", GEMINI, "--max-tokens", "200")

    def turns(*texts: str) -> list[Json]:
        return [
            {"role": role, "parts": [{"text": text}]}
            for role, text in zip(("user", "model") * 2, texts, strict=False)
        ]

    brief = {"role": "system", "parts": [{"text": "Be brief."}]}
    assert list(map(json.loads, (tmp_path / "out" / "train.jsonl").read_text().splitlines())) == [
        {"systemInstruction": brief, "contents": turns("1+1?", "2", "2+1?", "3")},
        *({"contents": turns(*pair)} for pair in (("a", "b"), ("c", "d"), ("e\n\nf", "g"))),
    ]
    assert json.loads((tmp_path / "out" / "state.json").read_text())["counts"]["dropped"] == {
        "does not begin with a user and end with the model": 1,
        "tools": 1,
        "an empty message": 1,
        "too long": 1,
    }
    assert service.requests[0][1].startswith("/v1/")
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_dry_run_says_exactly_what_would_be_sent(
    service: VertexStandIn, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = json.loads(tune("--dry-run")[0])
    assert service.requests == []
    monkeypatch.delenv("VERTEX_ACCESS_TOKEN")
    assert json.loads(tune("--dry-run")[0]) == requests
    monkeypatch.setenv("VERTEX_ACCESS_TOKEN", service.token)
    tune("--until", "launch")
    (job,) = service.jobs.values()
    (posted,) = (one for one in requests if one.get("method") == "POST")
    assert posted["body"] == {name: job[name] for name in posted["body"]}
    assert ("POST", posted["url"].removeprefix(service.address)) in service.requests
    uploads = [one for one in requests if "upload" in one]
    assert [MEMORY.size(one["to"]) for one in uploads] == [one["bytes"] for one in uploads]


def test_ctrl_c_leaves_the_job_and_the_same_command_goes_on(
    service: VertexStandIn, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(command.time, "sleep", stop)
        said = tune(status=130)[1]
    (name,) = service.jobs
    assert f"The job continues: {name}" in said
    tune()
    assert launches(service) == 1
    assert "another epochs" in tune("--epochs", "4", status=2)[1]


def test_a_launch_whose_answer_is_lost_is_not_repeated(service: VertexStandIn, tune: Tune) -> None:
    service.failures = [200, 0]  # the list of jobs; then the launch, done but not answered
    tune()
    assert len(service.jobs) == launches(service) == 1
    assert [method for method, _ in service.requests[:3]] == ["GET", "POST", "GET"]


@pytest.mark.parametrize(("changes", "more", "status", "why"), CASES["failures"])
def test_failures_of_a_moment_are_waited_out_and_no_others(
    changes: Json,
    more: list[str],
    status: int,
    why: str,
    service: VertexStandIn,
    tune: Tune,
) -> None:
    vars(service).update(changes)
    assert why in tune(*more, status=status)[1]


GOOD = [chat(number) for number in range(20)]


@pytest.mark.parametrize(
    ("more", "rows", "why"),
    [
        (["--bucket", "here"], GOOD, "bucket must be a URL"),
        (["--base-model", GEMINI, "--tuning-mode", "full"], GOOD, "are only for open models"),
        ([], [{"prompt": "a", "completion": ""}], "Left out: 1 an empty message"),
        ([], [chat(1), {"text": "a"}], "rows.jsonl, line 2"),
        (["no credentials"], GOOD, "VERTEX_ACCESS_TOKEN is not set"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_launched(
    more: list[str],
    rows: list[Json],
    why: str,
    service: VertexStandIn,
    tune: Tune,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_rows(tmp_path / "rows.jsonl", *rows)
    if more == ["no credentials"]:
        monkeypatch.delenv("VERTEX_ACCESS_TOKEN")
        monkeypatch.setitem(sys.modules, "google.auth", None)
        more = []
    assert why in tune(*more, status=2)[1]
    assert service.requests == []
    assert rows is GOOD or not (tmp_path / "out" / "train.jsonl").exists()


def test_google_auth_gives_and_renews_tokens(
    service: VertexStandIn, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of that library, too: what is shown is that a refused token is renewed."""

    class Credentials:
        valid, token = True, "too old"

        def refresh(self, request: object) -> None:
            self.token = service.token

    requests, auth = ModuleType("google.auth.transport.requests"), ModuleType("google.auth")
    requests.Request = object  # type: ignore[attr-defined]
    auth.default = lambda scopes: (Credentials(), "project")  # type: ignore[attr-defined]
    for module in (requests, auth, ModuleType("google"), ModuleType("google.auth.transport")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("VERTEX_ACCESS_TOKEN")
    tune()
    assert len(service.jobs) == 1


# `envserver_clients.sft` and `envserver_clients.dpo` before torch is needed: what is read, and
# what is refused

ROW = {"prompt": "a", "completion": "b"}


def write_rows(path: Path, *rows: object) -> Path:
    return write_jsonl(path, rows)


def test_a_folder_says_by_its_files_what_is_made_of_it(tmp_path: Path) -> None:
    places = (tmp_path / "sft" / "bash" / f"{name}.jsonl" for name in ("train", "val"))
    bash = Part("bash", *((write_rows(place, ROW),) for place in places))
    reason = Part("reason", (write_rows(tmp_path / "sft" / "reason" / "train.jsonl", ROW),), ())
    write_rows(tmp_path / "sft" / "SUMMARY.json", {})
    assert parts_of(tmp_path / "sft") == [bash, reason]
    assert parts_of(tmp_path / "sft", tool="reason") == [reason]
    assert parts_of(tmp_path / "sft", whole=True) == [
        Part(None, bash.train + reason.train, bash.validation)
    ]
    splits = [
        write_rows(tmp_path / "router" / f"{name}.jsonl", ROW) for name in ("train", "validation")
    ]
    write_rows(tmp_path / "router" / "test.jsonl", ROW)
    assert parts_of(tmp_path / "router") == [Part(None, (splits[0],), (splits[1],))]
    shards = [write_rows(tmp_path / "export" / f"part-0000{n}.jsonl", ROW) for n in (0, 1)]
    write_rows(tmp_path / "export" / "MANIFEST.json", {})
    assert parts_of(tmp_path / "export") == [Part(None, tuple(shards), ())]
    with pytest.raises(ConfigError, match=r"no rows of the tool none: it has bash, reason"):
        parts_of(tmp_path / "sft", tool="none")


def test_rows_come_out_of_every_kind_of_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "a"}]
    plain = write_rows(tmp_path / "a.jsonl", ROW, {"messages": chat})
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    table = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "reward": 1.0}]), table)
    found = list(rows_of([plain, packed, table]))
    assert [row for _, row in found] == [
        *([ROW, {"messages": chat}] * 2),
        {"messages": chat, "reward": 1.0},
    ]
    assert found[-1][0].endswith("c.parquet, row 1")
    copy = write_rows(tmp_path / "elsewhere" / "other.jsonl", ROW, {"messages": chat})
    assert digest_of([plain]) == digest_of([copy]) != digest_of([plain, copy])


@pytest.mark.parametrize(("words", "why"), CASES["mistakes"])
@pytest.mark.parametrize("command", [sft, dpo])
def test_what_is_wrong_is_said_with_status_2(
    command, words: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROW)
    (tmp_path / "wrong.yaml").write_text("defaults: {rank: 4}\n")
    (tmp_path / "unknown.yaml").write_text("trainer: {}\n")
    assert command.main(["--model", "m", "--output", "out", *words.split()]) == 2
    assert why in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_card_never_shows_a_path_and_an_error_keeps_the_brackets_of_an_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert base_name(str(tmp_path), None) == tmp_path.name
    assert base_name("org/model", None) == base_name(str(tmp_path), "org/model") == "org/model"
    tell(Console(stderr=True), ConfigError("No trl.", hint="pip install 'envserver[train,data]'"))
    told = capsys.readouterr().err
    assert told.startswith("envserver: No trl. pip install 'envserver[train,data]'")


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PARAMETERS |= {"additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


@pytest.mark.parametrize(("text", "calls", "valid"), CASES["calls"])
def test_calls_are_found_in_chat_templates_and_checked(text: str, calls: int, valid: bool) -> None:
    found = calls_in(text)
    assert len(found) == calls and are_valid(found, [ADD]) == valid
    if valid:
        assert found == [Call("add", {"a": 1})]
