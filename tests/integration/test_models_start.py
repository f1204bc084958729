"""`envserver models start` and `list`: names, which engine is started, its life and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import pytest
import yaml
from support.commands import envserver, running, until
from support.scripted_vllm import scripted_vllm
from support.waiting import PATIENCE

from envserver import Settings
from envserver.cli.settings import load_settings
from envserver.running.run_settings import ServeSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def pids(folder: Path) -> list[int]:
    """All that the scripted vLLM started so far."""
    with contextlib.suppress(FileNotFoundError):
        return [int(pid) for pid in (folder / "pids").read_text().split()]
    return []


def alive(pid: int) -> bool:
    """Whether it runs; one that ended and that nobody asked for does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_engine_is_started_again_when_it_dies_and_goes_with_us(tmp_path: Path, model: Path) -> None:
    words = ("models", "start", model, "--vllm_python", scripted_vllm(tmp_path), "--port", 0)
    with running(*words, "--vllm_args=--max-num-seqs", "--vllm_args=4", folder=tmp_path) as ours:
        url = ours.wait_for(r"at (http://\S+)/v1").group(1)
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        asked = json.loads((tmp_path / "words").read_text())
        assert asked[asked.index("--served-model-name") + 1] == "model"
        assert asked[-2:] == ["--max-num-seqs", "4"]
        first = pids(tmp_path)
        os.kill(first[0], signal.SIGKILL)
        ours.wait_for(r"ended by itself \(status 137\); it is started again in 1 s")
        until(lambda: len(pids(tmp_path)) == 4, ours.output)
        until(lambda: _answers(url), ours.output)
        assert not any(map(alive, first))
        ours.kill()
        until(lambda: not any(map(alive, pids(tmp_path))), lambda: "an engine lives on")


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    return False


def test_told_to_end_it_ends_all_in_order(tmp_path: Path, model: Path) -> None:
    words = ("models", "start", model, "--vllm-python", scripted_vllm(tmp_path), "--port", 0)
    with running(*words, folder=tmp_path) as ours:
        ours.wait_for(r"(?m)^http://\S+/v1$")
        ours.send(signal.SIGTERM)
        assert ours.end() == 143
    assert pids(tmp_path)
    assert not any(map(alive, pids(tmp_path)))


def test_where_vllm_does_not_come_up_the_local_engine_is_used_and_why_is_said(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "broken").write_text("RuntimeError: no accelerator was found")
    python = scripted_vllm(tmp_path)
    words = ("models", "start", model, "--vllm_python", python, "--port", 0)
    auto = envserver(*words, "--local_args=--no-such-word", folder=tmp_path)
    assert auto.returncode == 1
    said = [line for line in auto.stderr.splitlines() if "The local engine is used" in line]
    assert len(said) == 1
    assert "RuntimeError: no accelerator was found" in said[0]
    assert "The local engine ended before it answered" in auto.stderr.splitlines()[-1]
    only = envserver(*words, "--backend", "vllm", folder=tmp_path)
    assert only.returncode == 1
    assert "The local engine" not in only.stderr
    missing = envserver("models", "start", model, "--backend", "vllm", folder=tmp_path)
    assert missing.returncode == 2
    assert "vLLM is not installed" in missing.stderr


def test_names(tmp_path: Path, model: Path) -> None:
    place = tmp_path / "configs" / "models.yaml"
    place.parent.mkdir()
    entry = {"name": "small", "path": "nowhere", "temperature": 0.3, "max_tokens": 17}
    place.write_text(yaml.safe_dump({"models": [entry, {"name": "big", "hf_id": "a/b"}]}))
    listed = envserver("models", "list", "--json", folder=tmp_path)
    assert [one["name"] for one in json.loads(listed.stdout)] == ["small", "big"]
    for words, said in (
        (["models", "start", "smal"], "There is no model 'smal'. Did you mean 'small'?"),
        (["process", "--env", "math", "--model", "smal"], "Did you mean 'small'?"),
        (["models", "start", "small"], "not at nowhere: no such folder"),
        (["models", "start"], "Give a model"),
    ):
        done = envserver(*words, folder=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
    place.write_text(yaml.safe_dump({"models": [{**entry, "temprature": 1}]}))
    assert "Did you mean 'temperature'?" in envserver("models", "list", folder=tmp_path).stderr


def test_sampling_of_a_model_is_weaker_than_what_is_said(tmp_path: Path, model: Path) -> None:
    place = tmp_path / "models.yaml"
    entry = {"name": "small", "path": str(model), "temperature": 0.3, "max_tokens": 17}
    place.write_text(yaml.safe_dump({"models": [entry]}))

    def sampling(*words: str, kind: type[Settings] = Settings) -> tuple[float, int]:
        line = ["--model", "small", "--engine.models_file", str(place), *words]
        chosen = load_settings(line, settings_class=kind, environ={}, folder=tmp_path).sampling
        return chosen.temperature, chosen.max_tokens

    assert sampling() == (0.3, 17)
    assert sampling("--sampling.temperature", "1") == (1.0, 17)
    # Trainers learn from the model's own distribution, unless a person says otherwise.
    assert sampling(kind=ServeSettings) == (1.0, 17)
    assert sampling("--sampling.temperature", "0.5", kind=ServeSettings) == (0.5, 17)


def test_serve_refuses_what_no_trainer_can_compute(tmp_path: Path) -> None:
    line = ("serve", "--env", "math", "--model", "sim")
    for words, said in (
        (("--sampling.top_p", "0.9"), "--sampling.top_p 0.9: no trainer can learn rightly"),
        (("--sampling.temperature", "0"), "--sampling.temperature 0: a trainer learns nothing"),
    ):
        done = envserver(*line, *words, folder=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr


def test_shipped_catalogue_can_be_read() -> None:
    done = envserver("models", "list", folder=Path(__file__).parents[2])
    assert done.returncode == 0
    assert "tiny-test" in done.stdout
