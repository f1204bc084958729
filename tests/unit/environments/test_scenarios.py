"""`envserver scenarios`: runs as traces, made once; scenarios in every form they come in."""

import json
from pathlib import Path

import pytest
from envserver_environments.scenarios.agent import files_of, tree_in
from envserver_environments.scenarios.env import SAMPLE
from envserver_environments.scenarios.loading import read_scenario
from envserver_factory.commands.environments import ScenarioSettings
from envserver_factory.scenarios import runners

from envserver import ConfigError, InputError, main
from envserver.export import problems_of_trace

SCENARIO = """
prompts: {gold: "Write 7 into answer.txt."}
files: {notes.txt: "nothing\\n"}
checks:
  - run: [python3, test.py]
    files: {test.py: "assert open('answer.txt').read() == '7'"}
  - {answer: true, matches: "(?i)^done"}
  - {file: notes.txt, absent: true}
solution:
  - 'TOOL_CALL: {"tool": "write_file", "args": {"path": "answer.txt", "content": "7"}}'
  - 'TOOL_CALL: {"tool": "read_file", "args": {"path": "../../etc/passwd"}}'
  - 'FINAL: Done.'
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("seven.yaml").write_text(SCENARIO)
    return tmp_path


def scenarios(*words: str) -> int:
    quick = ["--sim.openers", "false", "--sim.solve_probability", "1", "--sim.latency_seconds", "0"]
    small = ["--workers.processes", "1", "--out", "traces"]
    return main(
        ["scenarios", "--scenario", "seven.yaml", "--models", "sim", *quick, *small, *words]
    )


@pytest.mark.thorough
def test_runs_are_traces_and_only_torn_ones_are_made_again(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scenarios("--n", "2", "--seed", "40") == 0
    assert "checks passed: 0.667" in capfd.readouterr().err
    paths = [Path(f"traces/sim/gold/run_00{number}.json") for number in (1, 2)]
    first, second = (json.loads(path.read_bytes()) for path in paths)
    assert problems_of_trace(first) == []
    types = [step["type"] for step in first["steps"]]
    assert types == ["tool_call", "tool_result", "tool_call", "tool_result", "final"]
    assert "Error" in first["steps"][3]["text"]  # nothing outside the workspace is read
    assert (first["seed"], second["seed"]) == (41, 42)
    assert first["run_id"].startswith("seven_sim_gold_001_")
    assert [check["passed"] for check in first["checks"]] == [True, True, False]
    assert json.loads(Path("traces/index.json").read_bytes())["runs"][0]["completed"] is True

    paths[0].write_bytes(paths[0].read_bytes()[:200])
    kept = paths[1].read_bytes()
    assert scenarios("--n", "2", "--seed", "40") == 0
    assert "1 existed, 1 new" in capfd.readouterr().err
    assert paths[1].read_bytes() == kept
    again = json.loads(paths[0].read_bytes())
    assert again["steps"] == first["steps"]

    assert scenarios("--n", "2", "--seed", "5") == 2  # of other seeds: nothing is mixed
    assert scenarios("--n", "2", "--label", "drift") == 2
    assert "no prompt for the label 'drift'" in capfd.readouterr().err


@pytest.mark.thorough
def test_a_module_cannot_end_the_check_of_the_sample(place: Path) -> None:
    for code in ("import os; os._exit(0)", "def mean(values): return values and 1.5"):
        sample = (SAMPLE / "mean_of_values.yaml").read_text().partition("solution:")[0]
        call = {"tool": "write_file", "args": {"path": "stats.py", "content": code}}
        turns = [f"TOOL_CALL: {json.dumps(call)}", "FINAL: It was rounded down."]
        Path("seven.yaml").write_text(f"{sample}solution: {json.dumps(turns)}\n")
        assert scenarios("--n", "1", "--out", f"traces-{len(code)}") == 0
        (path,) = Path(f"traces-{len(code)}").glob("sim/gold/run_001.json")
        trace = json.loads(path.read_bytes())
        assert [check["passed"] for check in trace["checks"]] == [False, True]


def test_folders_of_the_bench_and_workspaces_are_read(tmp_path: Path) -> None:
    bench = tmp_path / "leak"
    (bench / "real_agent_prompts").mkdir(parents=True)
    (bench / "real_agent_prompts/gold.md").write_text("Find it.")
    (bench / "targets/app").mkdir(parents=True)
    (bench / "targets/app/main.py").write_text("x = 1\n")
    (bench / "targets/logo.png").write_bytes(b"\x89PNG\xff")
    scenario, tree = read_scenario(bench)
    assert (scenario.name, scenario.asked("gold")) == ("leak", "Find it.")
    assert sorted(tree) == ["app/main.py", "logo.png"]
    assert tree_in(json.loads(json.dumps(files_of(tree)))) == tree
    with pytest.raises(InputError, match="drift"):
        scenario.asked("drift")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prompt: x\nchecks: [{run: ls}]", "checks.0.run"),
        ("prompt: x\nchecks: [{answer: true}]", "checks.0"),
        ("prompt: x\nfiles: {../out: y}", "not below the workspace"),
        ("promt: x", "promt"),
        ("- x", "bad.yaml"),
    ],
)
def test_a_mistake_in_a_scenario_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as told:
        read_scenario(path)
    assert named in str(told.value)
    assert "bad.yaml" in str(told.value)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "scenario.yaml").write_text("prompt: x")
    (tmp_path / "workspace/out").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="is a link"):
        read_scenario(tmp_path)


def test_models_are_names_addresses_and_sim() -> None:
    settings = ScenarioSettings(scenario=Path("s"), models="x")
    said = ["sim", "http://127.0.0.1:9001/v1", "mine=http://127.0.0.1:9002/v1", "owner/name"]
    found = {one.name: one.settings for one in runners(said, settings)}
    assert list(found) == ["sim", "127.0.0.1:9001", "mine", "owner/name"]
    assert found["mine"].openai.base_url == "http://127.0.0.1:9002/v1"
    assert (found["mine"].model, found["owner/name"].model) == (None, "owner/name")
    with pytest.raises(ConfigError, match="Two models"):
        runners(["sim", "sim=http://127.0.0.1:1/v1"], settings)
