"""What people of four predecessors type: their line, our line, and what must come of it.

Offline, with the simulated engine. docs/coming-from.md says what is different on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import envserver

pytestmark = pytest.mark.thorough
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
    assert "Rows: finalize (2)." in shown  # one of training, one of validation
    assert shown.count("instruction:") == 1


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
