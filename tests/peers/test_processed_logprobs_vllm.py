"""A real vLLM that gives its logprobs after the temperature: what its rows carry, and the trainer.

The trainer's own logprobs of the same weights, computed with torch in another process at the rows'
temperature, are the delivered ones; at another temperature they are not.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import free_port, running
from support.vllm_server import VllmServer

import envserver
from envserver import Group, pack

pytestmark = pytest.mark.vllm
TEMPERATURE = 0.7
ENVIRONMENT = """
from envserver import Environment, Score, Task


class Babble(Environment):
    def tasks(self, split):
        for number in range(2):
            yield Task(f"b{number}", {"question": f"Say something about {number}."})

    async def rollout(self, task, run):
        said = [{"role": "user", "content": task.public["question"]}]
        for _ in range(2):
            reply = await run.chat(said, max_tokens=24)
            said += [reply.message, {"role": "user", "content": "Go on."}]
        return reply.content

    def score(self, task, result):
        return Score(reward=0.5)
"""
TRAINER = """
import dataclasses, json, sys
from pathlib import Path
import numpy as np
import torch
from envserver_clients.records import ClientGroup
from envserver_clients.training.examples import ExampleSettings, examples_of
from envserver_clients.training.learner import Learner, StepSettings
from envserver_clients.training.policy import Policy

torch.set_num_threads(1)
model, *files = sys.argv[1:]
groups = [
    ClientGroup(path, "babble", "group", -1, memoryview(Path(path).read_bytes())) for path in files
]
made = examples_of(groups, 0, ExampleSettings(keep_zero=True, learn_truncated=True))
plain = [
    dataclasses.replace(one, temperatures=np.ones(len(one.tokens), np.float32))
    for one in made.examples
]
steps = [Learner(Policy(model), StepSettings()).step(rows) for rows in (made.examples, plain)]
print(json.dumps({"batch": made.numbers, "warm": steps[0], "plain": steps[1]}))
"""


def test_rows_say_how_they_were_sampled_and_the_trainer_computes_the_same(
    learning_vllm: VllmServer,
    learn_python: Path,
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    learning_vllm.begin_anew(tmp_path)
    environment = tmp_path / "babble.py"
    environment.write_text(ENVIRONMENT)
    groups: list[Group] = list(
        envserver.groups(
            str(environment),
            openai={"base_url": learning_vllm.base_url, "model_name": learning_vllm.model},
            sampling={"temperature": TEMPERATURE, "top_p": 1.0},
            env={"group_size": 2, "total_steps": 2},
        )
    )
    rows = [row for group in groups for one in group.trajectories for row in one.sequences]
    assert len(rows) >= 4
    for row in rows:
        assert {(span.temperature, span.logprobs, span.altered) for span in row.sampling} == {
            (TEMPERATURE, "processed", ())
        }
        told = [at for span in row.sampling for at in range(span.start, span.end)]
        assert set(row.mask.nonzero()[0].tolist()) <= set(told)
    files = [tmp_path / f"group-{number}" for number in range(len(groups))]
    for path, group in zip(files, groups, strict=True):
        path.write_bytes(pack(group))
    done = subprocess.run(
        [learn_python, "-c", TRAINER, learning_vllm.model_folder, *files],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["batch"]["rows_refused"] == 0
    assert found["batch"]["rows_learned"] == len(rows)
    warm, plain = found["warm"], found["plain"]
    tell(
        f"vLLM with processed logprobs at temperature {TEMPERATURE}: "
        f"{found['batch']['tokens_trained']} tokens, the trainer's logprobs at most "
        f"{warm['mismatch_max']:.1e} nats away (divided by 1: {plain['mismatch_mean']:.2f} on "
        "average)"
    )
    assert warm["mismatch_max"] < 1e-3
    assert warm["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert plain["mismatch_mean"] > 0.1


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_serve_warns_of_raw_logprobs_at_another_temperature(
    vllm_server: VllmServer, tmp_path: Path, temperature: float
) -> None:
    (tmp_path / "babble.py").write_text(ENVIRONMENT)
    words = ("serve", "--env", "babble.py", "--openai.base_url", vllm_server.base_url)
    words = (*words, "--openai.model_name", vllm_server.model, "--port", str(free_port()))
    with running(*words, "--sampling.temperature", temperature, folder=tmp_path) as server:
        server.wait_for("Model endpoint for other environments")
        said = server.output()
    assert ("raw_logprobs" in said and "processed_logprobs" in said) == (temperature != 1)
