"""A readable GRPO trainer in plain torch: groups from a server, weights to the engine.

    python -m envserver_clients.grpo --server http://127.0.0.1:8000 --engine http://127.0.0.1:9001
    \\
        --model FOLDER --output out/run
    torchrun --nproc-per-node 8 -m envserver_clients.grpo ...  # the same on several GPUs

One step leases a batch of groups and computes each trajectory's advantage over its group. It makes
the policy's tokens more or less likely accordingly, within bounds relative to the delivered
logprobs (GRPO, arXiv 2402.03300; `envserver_clients.training.loss` has the formula). Then it saves
a checkpoint, acknowledges the batch, and transfers the weights to the engine.

Invariants: `kill -9` of trainer, engine or server at any moment neither loses a batch nor
learns from one twice, because of the order of writes: metrics, checkpoint, acknowledgement. Killed
before the checkpoint, the step never happened: its line is removed from the metrics, and its batch
comes again. Killed after it, the acknowledgement is repeated at the start. With several processes
(`training.ranks`) rank 0 runs the loop below; the others compute and save their parts with it.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from envserver_records import ConfigError, EnvserverError
from envserver_records.files import replace_file
from envserver_records.tracking import TrackerName, open_tracker
from rich.console import Console

from envserver_clients.records import Batch
from envserver_clients.training.checkpoints import CheckpointInfo, Checkpoints
from envserver_clients.training.curves import draw
from envserver_clients.training.examples import BatchExamples, examples_of
from envserver_clients.training.guard import Guard
from envserver_clients.training.learner import Learner, Numbers, StepSettings
from envserver_clients.training.metrics import (
    ConsoleLines,
    JsonLines,
    Line,
    Metrics,
    Tracked,
    Writer,
)
from envserver_clients.training.policy import LoraSettings, Policy
from envserver_clients.training.ranks import Ranks
from envserver_clients.training.settings import TrainerSettings, end_at_sigterm, run_command
from envserver_clients.training.sources import Publisher, Source, open_source

log = logging.getLogger(__name__)


def train(settings: TrainerSettings, console: Console) -> None:
    """Trains until a limit of `settings` is reached; continues an existing `settings.output`.
    Raises EnvserverError: server or engine are unavailable or refuse; the message says why."""
    torch.manual_seed(settings.seed)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with Ranks.joined(settings.device) as ranks:
        folder = settings.output / "checkpoints"
        checkpoints = Checkpoints(folder, settings.keep_checkpoints, ranks)
        learner = _learner(settings, ranks)
        saved = checkpoints.latest()
        if saved is not None:
            learner.load_state(checkpoints.load(saved, learner.blank_state))
        if ranks.leads:
            start = saved or CheckpointInfo(step=0, version=0)
            _lead(settings, learner, checkpoints, start, console)
        else:
            _follow(ranks, learner, checkpoints)


def _lead(
    settings: TrainerSettings,
    learner: Learner,
    checkpoints: Checkpoints,
    saved: CheckpointInfo,
    console: Console,
) -> None:
    """The loop of rank 0."""
    with ExitStack() as stack:
        source, client = open_source(settings, stack)
        metrics = stack.enter_context(_metrics(settings, saved.step, console))
        lines = settings.output / "metrics.jsonl"
        stack.callback(draw, [lines], settings.output / "curves.png")
        publisher = stack.enter_context(Publisher(settings, learner.policy, client))
        source.resume(saved)
        now = replace(saved, version=publisher.first_version(saved.version))
        publisher.publish(now.version)
        guard = Guard(settings.guard())
        for batch, timer in _batches_until_limit(settings, now.step, metrics, source):
            learned = _examples(settings, batch, now, learner.policy)
            numbers = learner.step(learned.examples)
            timer.add_phase("learning")
            line = _line(now, learned, numbers, timer)
            metrics.write(line)
            now = CheckpointInfo(
                now.step + 1, now.version + 1, batch.lease_id, tuple(learned.group_ids)
            )
            kept = now.step % settings.checkpoint_every == 0
            if kept:
                checkpoints.save(now, learner.state)
            source.done(batch, now.name if kept else None)
            guard.judge(line)
            timer.add_phase("keeping")
            if now.step % settings.publish_every == 0:
                publisher.publish(now.version, learned.examples)
            timer.add_phase("publishing")
    learner.policy.save(settings.output / "model")


def _follow(ranks: Ranks, learner: Learner, checkpoints: Checkpoints) -> None:
    policy = learner.policy
    ranks.follow(
        {
            "step": learner.step,
            "save_part": lambda saved: checkpoints.save_part(saved, learner.state()),
            "tensors": lambda: deque(policy.tensors(), maxlen=0),
            "prompt_logprobs": policy.prompt_logprobs,
        }
    )


def _line(before: CheckpointInfo, learned: BatchExamples, numbers: Numbers, timer: _Timer) -> Line:
    """The metrics of the step after `before`."""
    about = {"step": before.step + 1, "version": before.version, "group_ids": learned.group_ids}
    return {**about, **learned.numbers, **numbers, **timer.seconds}


def _learner(settings: TrainerSettings, ranks: Ranks) -> Learner:
    lora = LoraSettings(settings.lora_rank, settings.lora_alpha, settings.lora_targets)
    policy = Policy(
        settings.model,
        lora=lora if settings.lora_rank else None,
        dtype=getattr(torch, settings.dtype),
        keep_reference=settings.kl_weight > 0,
        checkpointed=settings.gradient_checkpointing,
        replay_experts=settings.replay_experts,
        ranks=ranks,
    )
    if settings.packed and policy.vision is not None:
        raise ConfigError(
            "--packed is for text models: images have two-dimensional positions.",
            hint="Leave it out.",
        )
    if settings.packed and policy.is_recurrent:
        raise ConfigError(
            "--packed is for models with only attention layers: others remember earlier rows.",
            hint="Leave it out.",
        )
    given = settings.of(StepSettings) | {"schedule_steps": settings.last_update}
    return Learner(policy, StepSettings(**given, loss=settings.loss()), ranks)


def _examples(
    settings: TrainerSettings, batch: Batch, now: CheckpointInfo, policy: Policy
) -> BatchExamples:
    rng = np.random.default_rng([settings.seed, now.step])
    shuffle = rng if settings.shuffle_rewards else None
    sees = None if policy.vision is None else policy.vision.fits
    rules = replace(settings.examples(policy.vocabulary), sees=sees)
    return examples_of(batch.groups, now.version, rules, shuffle=shuffle)


class _Timer:
    """Measures the parts of a step. Time after its line counts in the next step."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def add_phase(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[f"seconds_{name}"] = round(now - self._last, 4)
        self.seconds["seconds"] = round(now - self._begun, 3)
        self._last = now


def _batches_until_limit(
    settings: TrainerSettings, step: int, metrics: Metrics, source: Source
) -> Iterator[tuple[Batch, _Timer]]:
    timer = _Timer()
    begun = time.monotonic()
    batches = source.batches()
    while settings.steps is None or step < settings.steps:
        if settings.minutes is not None and time.monotonic() - begun > settings.minutes * 60:
            return
        recent = metrics.recent
        if recent is not None and recent >= (settings.until_reward or np.inf):
            return
        batch = next(batches, None)
        if batch is None:
            raise EnvserverError(
                f"No batch arrived for {settings.idle_minutes:g} minutes.",
                hint="The server's GET /v1/status shows what it waits for.",
            )
        timer.add_phase("waiting")
        step += 1
        yield batch, timer


def _metrics(settings: TrainerSettings, step: int, console: Console) -> Metrics:
    lines = JsonLines(settings.output / "metrics.jsonl", step)
    writers: list[Writer] = [lines, ConsoleLines(console)]
    trackers: list[TrackerName] = ["tensorboard"] if settings.tensorboard else []
    if settings.tracker != "none":
        trackers.append(settings.tracker)
    named: dict[str, Any] = settings.model_dump(mode="json", exclude={"token"})
    replace_file(settings.output / "settings.json", json.dumps(named, indent=2), sync=False)
    for tracker in trackers:
        opened = open_tracker(
            tracker,
            project=settings.project,
            run=settings.output.name,
            folder=settings.output,
            step=step,
        )
        writers.append(Tracked(opened, named))
    earlier = [line["reward_mean"] for line in lines.kept if "reward_mean" in line]
    return Metrics(writers, window=settings.window, earlier=earlier)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Exit status: 0 if a limit was reached, 1 after an error."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    signal.signal(signal.SIGTERM, end_at_sigterm)
    program = "python -m envserver_clients.grpo"
    return run_command(TrainerSettings, train, arguments, program=program)


if __name__ == "__main__":
    sys.exit(main())
