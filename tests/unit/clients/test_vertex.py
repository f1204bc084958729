"""`python -m envserver_clients.vertex` against a stand-in of the service, and buckets in memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest
from envserver_clients.vertex import command
from envserver_clients.vertex.command import main
from support.vertex_stand_in import VertexStandIn

GEMINI, OPEN = "gemini-2.5-flash", "meta/llama3_1@llama-3.1-8b-instruct"
MEMORY = fsspec.filesystem("memory")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[VertexStandIn]:
    def adapter(job: dict[str, Any]) -> None:
        if place := job.get("outputUri"):
            MEMORY.pipe(f"{place}/adapter/adapter_config.json", b"{}")
            MEMORY.pipe(f"{place}/adapter/adapter_model.safetensors", b"weights")

    with VertexStandIn(adapter) as service:
        monkeypatch.setenv("VERTEX_ACCESS_TOKEN", service.token)
        yield service
    MEMORY.store.clear()


def chat(number: int, *more: dict[str, Any]) -> dict[str, Any]:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{number}+1?"},
        {"role": "assistant", "content": str(number + 1)},
    ]
    return {"messages": [*said, *more], "reward": 1.0}


def rows(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given or map(chat, range(20))))
    return path


def words(folder: Path, *more: str, address: str = "http://127.0.0.1:1") -> list[str]:
    data = folder / "rows.jsonl"
    if not data.exists():
        rows(data)
    said = {"data": data, "output": folder / "out", "bucket": "memory://b/p", "project": "mine"}
    flags = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    return [*flags, "--endpoint", address, "--poll-seconds", "0.01", *more]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_rows_to_an_adapter(service: VertexStandIn, tmp_path: Path, capsys: Any) -> None:
    more = ["--base-model", OPEN, "--validation-share", "0.2", "--learning-rate-multiplier", "2"]
    assert main(words(tmp_path, *more, address=service.address)) == 0
    (job,) = service.jobs.values()
    spec = job["supervisedTuningSpec"]
    run = job["labels"]["envserver_run"]
    assert spec == {
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
    assert service.token not in capsys.readouterr().err


def test_geminis_lines(service: VertexStandIn, tmp_path: Path) -> None:
    rows(
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
    more = ["--base-model", GEMINI, "--max-tokens", "200"]
    assert main(words(tmp_path, *more, address=service.address)) == 0

    def part(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "parts": [{"text": text}]}

    assert lines(tmp_path / "out" / "train.jsonl") == [
        {
            "systemInstruction": part("system", "Be brief."),
            "contents": [
                part("user", "1+1?"), part("model", "2"), part("user", "2+1?"), part("model", "3")
            ],
        },
        {"contents": [part("user", "a"), part("model", "b")]},
        {"contents": [part("user", "c"), part("model", "d")]},
        {"contents": [part("user", "e\n\nf"), part("model", "g")]},
    ]  # fmt: skip
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert state["counts"]["dropped"] == {
        "does not begin with a user and end with the model": 1,
        "tools": 1,
        "an empty message": 1,
        "too long": 1,
    }
    assert service.requests[0][1].startswith("/v1/")
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_dry_run_says_exactly_what_would_be_sent(
    service: VertexStandIn, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = service.token
    assert main(words(tmp_path, "--dry-run", address=service.address)) == 0
    requests = json.loads(said := capsys.readouterr().out)
    assert token not in said and service.requests == []
    monkeypatch.delenv("VERTEX_ACCESS_TOKEN")
    assert main(words(tmp_path, "--dry-run", address=service.address)) == 0
    assert json.loads(capsys.readouterr().out) == requests
    monkeypatch.setenv("VERTEX_ACCESS_TOKEN", token)
    assert main(words(tmp_path, "--until", "launch", address=service.address)) == 0
    (job,) = service.jobs.values()
    (posted,) = (one for one in requests if one.get("method") == "POST")
    assert posted["body"] == {name: job[name] for name in posted["body"]}
    assert ("POST", posted["url"].removeprefix(service.address)) in service.requests
    uploads = [one for one in requests if "upload" in one]
    assert [MEMORY.size(one["to"]) for one in uploads] == [one["bytes"] for one in uploads]


def test_ctrl_c_leaves_the_job_and_the_same_command_goes_on(
    service: VertexStandIn, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", stop)
    assert main(words(tmp_path, address=service.address)) == 130
    (name,) = service.jobs
    assert f"The job continues: {name}" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("VERTEX_ACCESS_TOKEN", service.token)
    assert main(words(tmp_path, address=service.address)) == 0
    assert [method for method, _ in service.requests].count("POST") == 1
    assert main(words(tmp_path, "--epochs", "4", address=service.address)) == 2
    assert "another epochs" in capsys.readouterr().err


def test_a_launch_whose_answer_is_lost_is_not_repeated(
    service: VertexStandIn, tmp_path: Path
) -> None:
    service.failures = [200, 0]  # the list of jobs; then the launch, done but not answered
    assert main(words(tmp_path, address=service.address)) == 0
    assert len(service.jobs) == 1
    assert [method for method, _ in service.requests[:3]] == ["GET", "POST", "GET"]
    assert [method for method, _ in service.requests].count("POST") == 1


def test_failures_of_a_moment_are_waited_out(
    service: VertexStandIn, tmp_path: Path, capsys: Any
) -> None:
    service.failures = [503, 429]
    assert main(words(tmp_path, address=service.address)) == 0
    assert "the service answers 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("states", "failures", "status", "why"),
    [
        (("FAILED",), [], 1, "ended as failed: The dataset is too small."),
        (("SUCCEEDED",), [403], 1, "is the API enabled"),
        (("RUNNING",), [], 1, "no such token"),
    ],
)
def test_what_cannot_be_waited_out(
    states: tuple[str, ...],
    failures: list[int],
    status: int,
    why: str,
    service: VertexStandIn,
    tmp_path: Path,
    capsys: Any,
) -> None:
    service.states, service.failures = states, failures
    if states == ("RUNNING",):
        service.token = "another"
    assert main(words(tmp_path, address=service.address)) == status
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_service_that_does_not_answer(
    service: VertexStandIn, tmp_path: Path, capsys: Any
) -> None:
    assert main(words(tmp_path, "--patience-minutes", "0.0005")) == 1
    assert "did not answer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--adapter-size", "3"], "adapter_size must be one of 1, 2, 4"),
        (["--bucket", "here"], "bucket must be a URL"),
        (["--bucket", "nowhere://b"], "cannot be used from here"),
        (["--base-model", GEMINI, "--tuning-mode", "full"], "are only for open models"),
        (["--data", "missing.jsonl"], "neither a file nor a folder"),
    ],
)
def test_settings_that_cannot_be(
    more: list[str], why: str, service: VertexStandIn, tmp_path: Path, capsys: Any
) -> None:
    assert main(words(tmp_path, *more, address=service.address)) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert service.requests == []


def test_rows_that_cannot_be(tmp_path: Path, capsys: Any) -> None:
    rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": ""})
    assert main(words(tmp_path, "--until", "prepare")) == 2
    assert "Left out: 1 an empty message" in capsys.readouterr().err
    rows(tmp_path / "rows.jsonl", chat(1), {"text": "a"})
    assert main(words(tmp_path, "--until", "prepare")) == 2
    assert "rows.jsonl, line 2" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.jsonl").exists()


def test_without_credentials_nothing_is_launched(
    service: VertexStandIn, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERTEX_ACCESS_TOKEN")
    monkeypatch.setitem(sys.modules, "google.auth", None)
    assert main(words(tmp_path, address=service.address)) == 2
    assert "VERTEX_ACCESS_TOKEN is not set" in capsys.readouterr().err
    assert service.requests == []


def test_google_auth_gives_and_renews_tokens(
    service: VertexStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert main(words(tmp_path, address=service.address)) == 0
    assert len(service.jobs) == 1
