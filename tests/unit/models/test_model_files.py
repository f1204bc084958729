"""Where a served model's tokenizer and chat template are found."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import ConfigError

from envserver.models.catalogue import find_model_files, without_folders
from envserver.models.probe import ProbeResult

NAME = "owner/model"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)


def unreachable(name: str, **how: Any) -> str:
    raise OSError("Name or service not known")


def served(root: str | None, model: str = "tiny", server: str = "vllm 0.32.0") -> ProbeResult:
    return ProbeResult(mode="tokens", model=model, root=root, server=server)


def model_folder(folder: Path, *, template: str = "chat_template.jinja") -> Path:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / template).write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def snapshot(cache: Path, revision: str, *, changed_at: int) -> Path:
    folder = model_folder(cache / "models--owner--model" / "snapshots" / revision)
    os.utime(folder, (changed_at, changed_at))
    return folder


@pytest.mark.parametrize(
    "template", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"]
)
def test_the_folder_from_which_the_engine_loaded_its_model(tmp_path: Path, template: str) -> None:
    folder = model_folder(tmp_path / "model", template=template)
    assert find_model_files(served(str(folder))).folder == folder
    assert find_model_files(served(None, model=str(folder))).folder == folder


def test_the_folder_that_the_user_names_goes_first_and_must_be_whole(tmp_path: Path) -> None:
    folder, own = model_folder(tmp_path / "model"), model_folder(tmp_path / "own")
    assert find_model_files(served(str(folder)), own).folder == own
    (own / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"tokens.tokenizer: .* has no chat template"):
        find_model_files(served(str(folder)), own)
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        find_model_files(served(str(folder)), tmp_path / "nowhere")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_the_cache_holds_the_revision_of_main_or_else_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv(variable, str(cache))
    hub = cache / "hub" if variable == "HF_HOME" else cache
    old, new = snapshot(hub, "aaa", changed_at=1), snapshot(hub, "bbb", changed_at=2)
    assert find_model_files(served(NAME)).folder == new
    main = hub / "models--owner--model" / "refs" / "main"
    main.parent.mkdir()
    main.write_text("aaa")
    assert find_model_files(served(NAME)).folder == old
    (old / "tokenizer.json").unlink()
    assert find_model_files(served(NAME)).folder == new


def test_small_files_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path / "fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = model_folder(tmp_path / "fetched")
    assert find_model_files(served(NAME)).folder == folder
    (patterns,) = asked.values()
    assert "tokenizer.json" in patterns
    assert not any("safetensors" in pattern or pattern == "*" for pattern in patterns)
    # A name that the server was given for itself may by chance be somebody's model.
    assert find_model_files(served("tiny")).folder is None
    assert asked.keys() == {NAME}


def test_a_model_that_is_nowhere_gives_a_reason_and_a_remedy() -> None:
    found = find_model_files(served(NAME))
    assert found.folder is None
    assert found.reason.startswith("owner/model cannot be downloaded: Name or service not known.")
    assert "Set --tokens.tokenizer" in found.reason
    assert "not a folder" in find_model_files(served("/somewhere/else")).reason


def test_the_simulated_engine_brings_its_own() -> None:
    found = find_model_files(served("sim", model="sim", server="envserver-sim 0.1.0"))
    assert found.folder is not None and (found.folder / "tokenizer.json").is_file()


def test_why_prompts_are_not_continued_leaves_this_machine_sans_folders(tmp_path: Path) -> None:
    empty = tmp_path / "secret" / "run-7"
    empty.mkdir(parents=True)
    why = find_model_files(served(str(empty))).reason
    assert str(empty) in why
    assert "secret" not in without_folders(why) and "run-7 has no tokenizer.json" in why
    for text, shown in (
        ("~/models/a is not a folder", "a is not a folder"),
        ("no file '/data/x/config.json'.", "no file 'config.json'."),
        ("owner/model at https://hub.example/owner/model", None),
        ("the engine lacks /tokenize", None),
    ):
        assert without_folders(text) == (shown or text)
