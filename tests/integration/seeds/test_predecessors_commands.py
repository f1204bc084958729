"""What people of four predecessors type: their line, our line, and what must come of it.

Offline, with the simulated engine. docs/coming-from.md says what is different on purpose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from envserver_environments.smolagents_integration import set_earlier_defaults
from support.commands import environment_variables, envserver

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[3]
SIM = "--model sim --sim.latency_seconds 0"


def run(line: str, folder: Path) -> str:
    done = envserver(*line.split(), folder=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


def test_from_questions_to_rows_for_each_tool(tmp_path: Path) -> None:
    """VideoMultiAgents: an agent, `convert_to_out_traj_format.py`, `build_sft_datasets.py`."""
    run(f"run --env math {SIM} --question 3+4 -o runs/math_1.traj.json", tmp_path)
    run("convert runs/math_*.traj.json --domain math --out_dir data/unified/math", tmp_path)
    assert [path.name for path in (tmp_path / "data/unified/math").iterdir()]
    assert not (tmp_path / "data/unified/math/math").exists()
    run("sft build --unified_glob data/unified/*/*.json --out_dir data/sft", tmp_path)
    shown = run("sft preview --root data/sft --limit 1", tmp_path)
    tools = [path.name for path in (tmp_path / "data/sft").iterdir() if path.is_dir()]
    assert shown.count("instruction:") == len(tools) > 0


def test_scenarios_of_a_folder_and_by_name(tmp_path: Path) -> None:
    """esm-agentbench: `run_real_agents.py --all-scenarios --models a,b --n 2 --max-steps 6`."""
    for name in ("drift", "loops"):
        (tmp_path / "scenarios" / name / "real_agent_prompts").mkdir(parents=True)
        (tmp_path / "scenarios" / name / "real_agent_prompts" / "gold.md").write_text("Say hello.")
    run("scenarios --all-scenarios --models sim --n 2 --max-steps 6", tmp_path)
    assert len(list(tmp_path.glob("traces/*/sim/gold/run_*.json"))) == 4
    run("scenarios --scenario drift --models sim --n 1 --out one", tmp_path)
    trace = json.loads((tmp_path / "one/sim/gold/run_001.json").read_text())
    assert trace["scenario"] == "drift"
    refused = envserver("scenarios", "--models", "sim", folder=tmp_path)
    assert refused.returncode == 2
    assert "--scenario is needed, or --all-scenarios." in refused.stderr


def test_their_file_of_models_is_read_unedited(tmp_path: Path) -> None:
    """esm-agentbench's `models.yaml`: `backend: transformers` is the local engine."""
    (tmp_path / "models.yaml").write_text(
        "models:\n  - {name: phi, hf_id: a/phi, backend: transformers, dtype: float16,\n"
        "     max_tokens: 512, temperature: 0.7, load_in_4bit: true}\n"
    )
    listed = run("models list --models_file models.yaml", tmp_path)
    assert "phi" in listed
    assert "local" in listed


def test_the_name_and_the_key_of_the_smolagents_integration(tmp_path: Path) -> None:
    """Atropos' integration: `--env smolagents`, `--api-key K`."""
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    run(f"process --env smolagents {SIM} --api-key K --env.total_steps 1 --out g.jsonl", tmp_path)
    assert (tmp_path / "g.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "Math_agent.Main --question 3+4",
        "MHQA_agent.Main --question Who?",
        "SWE_agent.Main --question Repair. --steps 1 --yolo",
    ],
)
def test_agents_answer_by_their_module_names(line: str, tmp_path: Path) -> None:
    """VideoMultiAgents: `python -m agent_systems.X.Main --question Q -o F`, nothing else."""
    (tmp_path / "note.txt").write_text("A small repository.")
    module, *words = line.split()
    done = subprocess.run(
        [
            *(sys.executable, "-m", f"environments.agent_systems.{module}", *words),
            *(*SIM.split(), "-o", "runs/one.traj.json"),
        ],
        cwd=tmp_path,
        env=environment_variables() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "runs/one.traj.json").read_text())
    assert document["actions"]


def test_the_earlier_defaults_of_the_smolagents_integration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GAIA where it was downloaded, web tools where the key is set; else a line says what runs."""
    words = ["process", "--env.total_steps", "2"]
    none: dict[str, str] = {}
    set_earlier_defaults(words, none, tmp_path)
    assert none == {"ENVSERVER_ENV__FILES": "true"}
    assert "GAIA is not in data/gaia" in capsys.readouterr().err
    (tmp_path / "data" / "gaia").mkdir(parents=True)
    made = {"TAVILY_API_KEY": "k"}
    set_earlier_defaults(words, made, tmp_path)
    assert made.pop("TAVILY_API_KEY")
    assert made == {
        "ENVSERVER_ENV__DATA_SET": "gaia",
        "ENVSERVER_ENV__SPLIT": "validation",
        "ENVSERVER_ENV__FILES": "true",
        "ENVSERVER_ENV__WEB": "live",
        "ENVSERVER_ENV__WEB_DEPTH": "advanced",
    }
    chosen = {"ENVSERVER_ENV__WEB": "none", "ENVSERVER_ENV__FILES": "no", "TAVILY_API_KEY": "k"}
    own = dict(chosen)
    set_earlier_defaults([*words, "--env.data_set=sample"], own, tmp_path)
    assert own == chosen
