"""`envserver models start` and `list`: names, which engine is started, its life and its end."""

import contextlib
import json
import os
import signal
import stat
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from support.cases import cases_of
from support.commands import running, typed, until
from support.process_tree import alive
from support.waiting import PATIENCE

from envserver import Settings, main
from envserver.cli.command_line import CommandSpec
from envserver.running.run_settings import ServeSettings

_SCRIPT = cases_of(__file__)["script"]


def scripted_vllm(folder: Path) -> Path:
    """The program; `pids` in `folder` has a line for each start: its id and that of its process."""
    program = folder / "python-with-vllm"
    program.write_text(_SCRIPT.format(python=sys.executable, folder=str(folder)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


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


@pytest.mark.thorough
def test_engine_is_started_again_when_it_dies_and_goes_with_us(tmp_path: Path, model: Path) -> None:
    start = f"models start {model} --vllm_python {scripted_vllm(tmp_path)} --port 0"
    line = f"{start} --vllm_args=--max-num-seqs --vllm_args=4"
    with running(*line.split(), folder=tmp_path) as ours:
        url = ours.wait_for(r"at (http://\S+)/v1").group(1)
        assert _answers(url)
        asked = json.loads((tmp_path / "words").read_text())
        assert asked[asked.index("--served-model-name") + 1] == "model"
        assert asked[-2:] == ["--max-num-seqs", "4"]
        first = pids(tmp_path)
        os.kill(first[0], signal.SIGKILL)
        ours.wait_for(r"exited unexpectedly \(status 137\); restarting in 1 s")
        ours.until(lambda: len(pids(tmp_path)) == 4)
        ours.until(lambda: _answers(url))
        assert not any(map(alive, first))
        ours.kill()
        until(lambda: not any(map(alive, pids(tmp_path))), lambda: "an engine lives on")
    with running(*start.replace("vllm_python", "vllm-python").split(), folder=tmp_path) as ours:
        ours.wait_for(r"(?m)^http://\S+/v1$")
        assert len(pids(tmp_path)) == 6
        ours.send(signal.SIGTERM)
        assert ours.end() == 143
    assert not any(map(alive, pids(tmp_path)))


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    return False


@pytest.mark.thorough
def test_without_vllm_the_local_engine_is_used_and_why_is_said(tmp_path: Path, model: Path) -> None:
    (tmp_path / "broken").write_text("RuntimeError: no accelerator was found")
    line = f"models start {model} --vllm_python {scripted_vllm(tmp_path)} --port 0"
    said = typed(f"{line} --local_args=--no-such-word", tmp_path, status=1).stderr.splitlines()
    (why,) = [line for line in said if "The local engine is used" in line]
    assert "RuntimeError: no accelerator was found" in why
    assert "The local engine exited before it answered" in said[-1]
    assert "The local engine" not in typed(f"{line} --backend vllm", tmp_path, status=1).stderr
    missing = typed(f"models start {model} --backend vllm", tmp_path, status=2)
    assert "vLLM is not installed" in missing.stderr


def test_names_and_what_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "configs" / "models.yaml"
    place.parent.mkdir()
    entry = {"name": "small", "path": "nowhere", "temperature": 0.3, "max_tokens": 17}
    place.write_text(yaml.safe_dump({"models": [entry, {"name": "big", "hf_id": "a/b"}]}))
    assert main(["models", "list", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["small", "big"]
    serve = "serve --env math --model sim --sampling"
    for line, said in (
        ("models start smal", "There is no model 'smal'. Did you mean 'small'?"),
        ("process --env math --model smal", "Did you mean 'small'?"),
        ("models start small", "not at nowhere: no such folder"),
        ("models start", "Give a model"),
        # What no trainer can compute is not served.
        (f"{serve}.top_p 0.9", "--sampling.top_p 0.9: no trainer can learn correctly"),
        (f"{serve}.temperature 0", "--sampling.temperature 0: a trainer learns nothing"),
    ):
        assert main(line.split()) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    place.write_text(yaml.safe_dump({"models": [{**entry, "temprature": 1}]}))
    main(["models", "list"])
    assert "Did you mean 'temperature'?" in capsys.readouterr().err
    monkeypatch.chdir(Path(__file__).parents[2])  # what is shipped can be read
    assert main(["models", "list"]) == 0
    assert "tiny-test" in capsys.readouterr().out


def test_sampling_of_a_model_is_weaker_than_what_is_said(tmp_path: Path, model: Path) -> None:
    place = tmp_path / "models.yaml"
    entry = {"name": "small", "path": str(model), "temperature": 0.3, "max_tokens": 17}
    place.write_text(yaml.safe_dump({"models": [entry]}))

    def sampling(*words: str, kind: type[Settings] = Settings) -> tuple[float, int]:
        line = ["--model", "small", "--engine.models_file", str(place), *words]
        chosen = CommandSpec("", "", kind).read(line, environ={}, folder=tmp_path).sampling
        return chosen.temperature, chosen.max_tokens

    assert sampling() == (0.3, 17)
    assert sampling("--sampling.temperature", "1") == (1.0, 17)
    # Trainers learn from the model's own distribution, unless a person says otherwise.
    assert sampling(kind=ServeSettings) == (1.0, 17)
    assert sampling("--sampling.temperature", "0.5", kind=ServeSettings) == (0.5, 17)
