"""verl and SkyRL themselves on what the adapters give them: `python trainers_peer.py FOLDER`.

Runs in `.venv-trainers`. In: packed trajectories in FOLDER (`rollouts`, in the order in which they
are asked for), a tokenizer in FOLDER/tokenizer. Out: one JSON object with what each trainer made
of them. Only the server is a stand-in: the clients of both adapters get these trajectories.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import typing_extensions
from envserver_clients.adapters import skyrl as skyrl_adapter
from envserver_clients.adapters import verl as verl_adapter
from envserver_records.records import Trajectory, unpack
from envserver_records.tasks import Score, TurnReward

torch.set_num_threads(1)
PROMPT, RESPONSE = 8, 16


class Canned:
    """A client that has all rollouts already."""

    made: dict[str, list[Trajectory]]

    def __init__(self, url: str, **_: Any) -> None:
        assert url == "http://server"

    async def __aenter__(self) -> Canned:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def rollouts(
        self, environment: str, task_ids: list[str], *, group_size: int, **_: Any
    ) -> list[list[Trajectory]]:
        assert environment == "math"
        taken = {task: [self.made[task].pop(0) for _ in range(group_size)] for task in task_ids}
        return [taken[task] for task in task_ids]


def serve(made: list[Trajectory]) -> None:
    Canned.made = {}
    for one in made:
        Canned.made.setdefault(one.task_id, []).append(one)


async def by_verl(folder: Path, made: list[Trajectory]) -> dict[str, Any]:
    """A batch as verl's trainer gets it from its agent loop worker."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop import agent_loop
    from verl.protocol import DataProto

    loops = folder / "loops.yaml"
    loops.write_text(
        "- {name: envserver, _target_: envserver_clients.adapters.verl.EnvserverLoop,"
        " url: 'http://server', environment: math}\n"
    )
    for loop in OmegaConf.load(loops):
        agent_loop._agent_loop_registry[loop.name] = loop
    rollout = {
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "calculate_log_probs": True,
        "agent": {"default_agent_loop": "envserver"},
        "trace": {"max_samples_per_step_per_worker": None},
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    worker = object.__new__(agent_loop.AgentLoopWorker)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    vars(worker).update(
        config=config,
        rollout_config=config.actor_rollout_ref.rollout,
        tokenizer=tokenizer,
        processor=None,
        llm_client=None,
        hf_model_type=None,
        dataset_cls=None,
        tools=[],
        reward_loop_worker_handles=None,
        distillation_enabled=False,
        mm_processor_kwargs={},
    )
    rows = DataProto.from_dict(
        non_tensors={
            "extra_info": np.array([{"task_id": one.task_id} for one in made], dtype=object),
            "raw_prompt": np.array([[] for _ in made] + [None], dtype=object)[:-1],
        },
        meta_info={"global_steps": 1},
    )
    batch = await worker.generate_sequences(rows)
    told = {name: batch.batch[name].tolist() for name in batch.batch.keys()}  # noqa: SIM118
    told["versions"] = [int(one) for one in batch.non_tensor_batch["max_global_steps"]]
    told["turn_scores"] = [list(one) for one in batch.non_tensor_batch["turn_scores"]]
    turns = with_turns(made[1])
    serve([turns])
    loop = verl_adapter.EnvserverLoop(
        SimpleNamespace(config=config), url="http://server", environment="math", rows="all"
    )
    (row,) = await loop.run({}, extra_info={"task_id": turns.task_id})
    told["for_a_queue"] = row.as_dict()["rm_scores"].tolist()
    told["names_for_a_queue"] = sorted(row.as_dict())
    return told


def with_turns(made: Trajectory) -> Trajectory:
    """The rollout of a row of five tokens; its two turns earned 0.25 and 0.5 of a reward of 1."""
    made = copy.deepcopy(made)
    (row,) = made.sequences
    row.calls = np.array([-1, 0, -1, -1, 1], np.int32)
    made.score = Score(reward=1.0, turns=[TurnReward(0, 0.25, call=0), TurnReward(1, 0.5, call=1)])
    return made


async def by_skyrl(folder: Path, made: list[Trajectory]) -> dict[str, Any]:
    """SkyRL's own checks, concatenation, merging and metrics."""
    if sys.version_info < (3, 12):  # else pydantic refuses a type of SkyRL's
        typing.TypedDict = typing_extensions.TypedDict
    from skyrl.train.generators import utils
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.utils.trainer_utils import validate_generator_output

    GeneratorInterface.register(skyrl_adapter.EnvserverGenerator)
    tasks = sorted({one.task_id for one in made}, key=[one.task_id for one in made].index)
    prompts = [
        {"prompt": [], "env_class": "math", "env_extras": {"task_id": task}, "uid": f"uid-{task}"}
        for task in tasks
    ]
    asked, uids = utils.prepare_generator_input(
        prompts, len(made) // len(tasks), {}, "x", "train", 3
    )
    told: dict[str, Any] = {"uids": uids}
    for step_wise in (False, True):
        serve(made)
        generator = skyrl_adapter.EnvserverGenerator("http://server", step_wise=step_wise)
        assert isinstance(generator, GeneratorInterface)
        output = await generator.generate(asked)
        validate_generator_output(len(asked["prompts"]), output, step_wise=step_wise)
        whole = utils.concatenate_generator_outputs([output, _others(output)], step_wise=step_wise)
        name = "steps" if step_wise else "rows"
        told[name] = {key: output[key] for key in ("response_ids", "loss_masks", "rewards")}
        told[name]["together"] = len(whole["response_ids"])
        if step_wise:
            told["merged"] = utils.merge_stepwise_output(output)["response_ids"]
        else:
            told[name]["experts"] = _experts_at_the_trainer(folder, output)
            told["metrics"] = utils.get_metrics_from_generator_output(output, uids)
    return told


def _experts_at_the_trainer(folder: Path, output: dict[str, Any]) -> list[Any]:
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    columns = [output[name] for name in names]
    columns[2] = [[0.0] * len(row) for row in output["response_ids"]]
    experts = output["rollout_expert_indices"]
    found: list[Any] = convert_prompts_responses_to_batch_tensors(tokenizer, *columns, experts)[-1]
    return found.tolist()


def _others(output: dict[str, Any]) -> dict[str, Any]:
    ids = [
        SimpleNamespace(to_string=lambda one=one: f"other-{one.to_string()}")
        for one in output["trajectory_ids"]
    ]
    return {**output, "trajectory_ids": ids}


class Recorder:
    """As `TrainersEngines`; lists what it was told, and where its trainer was."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def pause(self) -> None:
        self.told.append("pause")

    async def publish(self, addresses: list[str], version: int | None) -> None:
        self.told.append(["publish", list(addresses), version])


def hooks_of_verl() -> list[Any]:
    """Records the calls of verl's own checkpoint manager, in order."""
    from envserver_clients.adapters import verl_training
    from verl.checkpoint_engine import base
    from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async
    from verl.workers.config import CheckpointEngineConfig

    base.ray = SimpleNamespace(get=list)  # there is no cluster
    recorder = Recorder()
    verl_training.use_server(recorder)  # type: ignore[arg-type, unused-ignore]
    made = trainer_base.CheckpointEngineManager
    assert made is trainer_separate_async.CheckpointEngineManager

    async def slept() -> None:
        recorder.told.append("sleep")

    replica = SimpleNamespace(server_address="10.0.0.7:4711", sleep=slept)
    actors = SimpleNamespace(update_weights=lambda **_: recorder.told.append("update") or [])
    manager = made(CheckpointEngineConfig(backend="naive"), actors, [replica])
    manager.sleep_replicas()
    manager.update_weights(3)
    return recorder.told


async def hooks_of_skyrl() -> list[Any]:
    """Records the calls of SkyRL's own engine client, in order."""
    from envserver_clients.adapters import skyrl_training
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )

    recorder, url = Recorder(), "http://10.0.0.7:4711"
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)

    async def call(path: str, *_: Any, **__: Any) -> dict[str, Any]:
        recorder.told.append(path)
        return {}

    client._call_all_servers = call
    client = skyrl_training.use_server(client, recorder)  # type: ignore[arg-type, unused-ignore]
    await client.pause_generation()
    await client.resume_generation()
    client.increment_weight_version()
    await client.sleep(level=1)
    return recorder.told


async def main(folder: Path) -> None:
    made = unpack((folder / "rollouts").read_bytes(), list[Trajectory])
    verl_adapter.EnvClient = skyrl_adapter.EnvClient = Canned
    serve(made)
    told = {"verl": await by_verl(folder, made), "skyrl": await by_skyrl(folder, made)}
    told["hooks"] = {
        "verl": await asyncio.to_thread(hooks_of_verl),
        "skyrl": await hooks_of_skyrl(),
    }
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
