"""verl and SkyRL themselves train on agents that ask their engines (`make trainers vllm-cpu`).

What stands in for their parts on GPUs: support/verl_on_a_cpu.py and support/skyrl_on_a_cpu.py.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cases import cases_of
from support.commands import Running, running
from support.foreign_trainers import ROOT, SUPPORT, alone, environment
from support.vllm_server import VllmServer, running_vllm
from support.waiting import PATIENCE


@dataclass(frozen=True)
class Loop:
    """An engine, and a server that does not know it yet."""

    engine: VllmServer
    server: str
    folder: Path


@contextlib.contextmanager
def loop(vllm_python: Path, folder: Path, *words: object) -> Iterator[Loop]:
    """A vLLM that takes weights, and a server that was started without an engine."""
    processed = ("--logprobs-mode", "processed_logprobs")
    with running_vllm(vllm_python, folder, learning=True, more=processed) as engine:
        serve = ("serve", "--openai.base_url", "none", "--openai.model_name", engine.model)
        serve += ("--port", 0, "--store", "groups.db", "--rollouts.max_queued_groups", 0)
        serve += ("--workers.processes", 1, *words)
        with running(*serve, folder=folder) as server:
            yield Loop(engine, server.wait_for(r"Trainers: (http://\S+)")[1], folder)


@contextlib.contextmanager
def trains(python: Path, made: Loop, *command: object, **environ: str) -> Iterator[Running]:
    """A trainer of others, which starts Ray with one GPU that nobody looks for."""
    quiet = {
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ADDRESS": "local",  # not the cluster of a test beside this one
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills when others fill the memory
        "GLOO_SOCKET_IFNAME": "lo",
        "ENGINE_URL": made.engine.root_url,
        "SERVER_URL": made.server,  # support/commands.py passes on no ENVSERVER_...
        "WEIGHTS_FOLDER": str(made.folder / "weights"),
    }
    packages = (ROOT / "clients", ROOT / "tools", ROOT / "tests")
    with (
        environment({**alone(*packages), **quiet, **environ}),
        running(*command, folder=made.folder, program=python) as process,
    ):
        yield process


Tell = Callable[[str], None]
STEPS = 2
SETTINGS = cases_of(__file__)
SERVED = ("--env", SUPPORT / "letters.py", "--env.group_size", 4, "--sampling.max_tokens", 24)


def task_rows(python: Path, made: Loop) -> None:
    """Writes the server's tasks to rows.jsonl, with the adapter's program."""
    module = "envserver_clients.adapters.task_rows"
    words = ("-m", module, made.server, "letters", "rows.jsonl", "--split", "train", "--limit", 4)
    with trains(python, made, *words) as process:
        assert process.end() == 0, process.output()


def asked(made: Loop) -> dict[str, Any]:
    """The only engine, as the server knows it."""
    (row,) = httpx.get(f"{made.server}/v1/engines", timeout=PATIENCE).json()["engines"]
    assert (row["url"], row["origin"]) == (made.engine.root_url, "registered")
    return dict(row)


@pytest.mark.slow
def test_verl_takes_two_steps_with_its_engine_asked_by_our_agents(
    trainers_python: Path, vllm_python: Path, tmp_path: Path, tell: Tell
) -> None:
    environ = {
        "VERL_USE_EXTERNAL_MODULES": "support.verl_on_a_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl's own FSDP engine, which names only GPUs
    }
    with loop(vllm_python, tmp_path, *SERVED) as made:
        task_rows(trainers_python, made)
        loops = ROOT / "configs/verl/loops.yaml"
        settings = SETTINGS["verl"] | {
            "envserver.url": made.server,
            "actor_rollout_ref.model.path": made.engine.model_folder,
            "actor_rollout_ref.rollout.agent.agent_loop_config_path": loops,
        }
        command = ("-W", "ignore", "-m", "envserver_clients.adapters.verl_training")
        command += ("--config-dir", str(ROOT / "configs/verl"), "--config-name", "math")
        words = [f"{name}={value}" for name, value in settings.items()]
        with trains(trainers_python, made, *command, *words, **environ) as process:
            assert process.end() == 0, process.output()[-5000:]
        engine = asked(made)
    steps = [
        dict(pair.split(":", 1) for pair in line.split(" - "))
        for line in re.findall(r" (step:\d+ - .*)", process.output())
    ]
    assert [step["step"] for step in steps] == ["1", "2"]
    names = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
    names += ("rollout_corr/rollout_log_ppl", "rollout_corr/training_log_ppl")
    told = [{name: float(step[name]) for name in names} for step in steps]
    for step in told:
        tell(f"verl: {step}")
    assert told[0]["actor/pg_loss"] != told[1]["actor/pg_loss"]
    assert all(step["actor/grad_norm"] > 0 for step in told)
    for step in told:  # the engine has the weights of each step (verl computes in bfloat16)
        assert step["rollout_corr/rollout_log_ppl"] == pytest.approx(
            step["rollout_corr/training_log_ppl"], abs=0.05
        )
    before, after = (step["rollout_corr/rollout_log_ppl"] for step in told)
    assert abs(before - after) > 0.1
    assert engine["weights_version"] == STEPS
    # Each row was sampled by the weights of the step before: verl's count is the server's version.
    for which in ("mean", "max"):
        staleness = [
            step[f"training/off_policy/trajectory_staleness_worst/{which}"] for step in steps
        ]
        assert [float(re.sub(r"[^-.\d]", "", one.partition("(")[2])) for one in staleness] == [0, 0]


@pytest.mark.slow
def test_skyrl_takes_two_steps_with_its_engine_asked_by_our_agents(
    trainers_python: Path, vllm_python: Path, tmp_path: Path, tell: Tell
) -> None:
    with loop(vllm_python, tmp_path, *SERVED) as made:
        task_rows(trainers_python, made)
        url = made.engine.root_url
        settings = SETTINGS["skyrl"] | {
            "trainer.policy.model.path": made.engine.model_folder,
            "generator.inference_engine.external_server_urls": f"['{url}']",
            "generator.inference_engine.external_proxy_url": url,
            "generator.inference_engine.served_model_name": made.engine.model,
            **{f"trainer.{name}_path": tmp_path / name for name in ("ckpt", "export", "log")},
        }
        command = ("-W", "ignore", SUPPORT / "skyrl_on_a_cpu.py")
        words = [f"{name}={value}" for name, value in settings.items()]
        with trains(
            *(trainers_python, made, *command, *words),
            RAY_OVERRIDE_RESOURCES='{"CPU": 16, "GPU": 1}',
            SKYRL_DUMP_INFRA_LOG_TO_STDOUT="1",
        ) as process:
            assert process.end() == 0, process.output()[-5000:]
        engine = asked(made)
    found = {
        name: [float(value) for value in re.findall(rf"'{name}': '([-\d.]+)'", process.output())]
        for name in (
            "policy/final_loss",
            "policy/grad_norm",
            "policy/rollout_train_logprobs_abs_diff_mean",
            "reward/avg_raw_reward",
        )
    }
    tell(f"SkyRL: {found}")
    losses, differences = found["policy/final_loss"], list(found.values())[2]
    assert len(losses) == STEPS and losses[0] != losses[1]
    assert min(found["policy/grad_norm"]) > 0
    assert max(differences) < 0.1  # the engine has the weights of each step (SkyRL's in bfloat16)
    assert engine["weights_version"] == STEPS + 1
