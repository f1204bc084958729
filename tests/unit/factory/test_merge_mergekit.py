"""`envserver merge --method ...`: a stand-in for mergekit-yaml gets what the real one reads.

mergekit itself is not installed for the tests (it pins old versions of its libraries): what is
shown here is the YAML and the command line that it is given, and what becomes of its answer. By
hand, mergekit 0.1.5 merged two tiny models by `ties` as it was told here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.models_on_disk import Stored, write_model

from envserver import main

STAND_IN = """#!{python}
import json, pathlib, shutil, sys
config, folder = map(pathlib.Path, sys.argv[1:])
said = json.loads(pathlib.Path({answer!r}).read_text())
pathlib.Path({seen!r}).write_text(config.read_text())
print("merging")
if said["status"] == 0:
    shutil.copytree({model!r}, folder, dirs_exist_ok=True)
sys.exit(said["status"])
"""


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    weights: dict[str, Stored] = {"w": ("F32", np.ones((2, 3), np.float32))}
    return {name: write_model(tmp_path / name, weights) for name in ("base", "one", "two")}


@pytest.fixture
def seen(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in was given; beside it `answer` says how it ends."""
    seen, answer, program = (tmp_path / name for name in ("seen", "answer", "bin/mergekit-yaml"))
    program.parent.mkdir()
    answer.write_text(json.dumps({"status": 0}))
    facts = {"answer": str(answer), "seen": str(seen), "model": str(models["two"])}
    program.write_text(STAND_IN.format(python=sys.executable, **facts))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return seen


def words(models: dict[str, Path], out: Path, *more: str) -> list[str]:
    return ["merge", "--base", str(models["base"]), "--out", str(out), *more]


def test_ties_is_mergekits(models: dict[str, Path], seen: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    added = ["--add", f"{models['one']}=0.7", "--add", f"{models['two']}=0.3"]
    more = ["--density", "0.5", "--parameters", '{"normalize": true}']
    assert main(words(models, out, *added, "--method", "ties", *more)) == 0
    assert yaml.safe_load(seen.read_text()) == {
        "merge_method": "ties",
        "base_model": str(models["base"]),
        "models": [
            {"model": str(models["one"]), "parameters": {"weight": 0.7, "density": 0.5}},
            {"model": str(models["two"]), "parameters": {"weight": 0.3, "density": 0.5}},
        ],
        "parameters": {"normalize": True},
    }
    assert (out / "model.safetensors").is_file()
    card = (out / "README.md").read_text()
    assert "ties of base, one (0.7), two (0.3)" in card
    assert all(str(tmp_path) not in path.read_text() for path in out.glob("m*[!s]"))
    recipe = json.loads((out / "merge.json").read_text())
    assert recipe["method"] == "ties"
    weights = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert recipe["files"] == {"model.safetensors": weights}


def test_slerp_goes_from_the_base_to_another(
    models: dict[str, Path], seen: Path, tmp_path: Path, capsys: Any
) -> None:
    added = ["--add", f"{models['one']}=0.4"]
    assert main(words(models, tmp_path / "out", *added, "--method", "slerp")) == 0
    assert yaml.safe_load(seen.read_text()) == {
        "merge_method": "slerp",
        "base_model": str(models["base"]),
        "models": [{"model": str(models["base"])}, {"model": str(models["one"])}],
        "parameters": {"t": 0.4},
    }
    added += ["--add", f"{models['two']}=0.4"]
    assert main(words(models, tmp_path / "more", *added, "--method", "slerp")) == 2
    assert "of the base and one --add" in capsys.readouterr().err


def test_its_failure_leaves_nothing(
    models: dict[str, Path], seen: Path, tmp_path: Path, capsys: Any
) -> None:
    seen.with_name("answer").write_text(json.dumps({"status": 3}))
    added = ["--add", str(models["one"])]
    assert main(words(models, tmp_path / "outs" / "out", *added, "--method", "ties")) == 1
    assert "ended with status 3" in capsys.readouterr().err
    assert list((tmp_path / "outs").iterdir()) == []


def test_without_mergekit_it_is_named(
    models: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    if shutil.which("mergekit-yaml") or Path(sys.executable).with_name("mergekit-yaml").exists():
        pytest.skip("mergekit is installed")
    added = ["--add", str(models["one"]), "--method", "dare_ties"]
    assert main(words(models, tmp_path / "out", *added)) == 2
    assert "pip install mergekit" in " ".join(capsys.readouterr().err.split())
