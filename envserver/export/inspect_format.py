"""`--to inspect`: rollouts as logs that Inspect View opens.

In: rollouts as they are read back. Out: a `.eval` file for each environment and model, written by
inspect_ai's own recorder. What holds: a sample is one rollout (or one that was lost, with its
error); its store has what Inspect has no field for, so that `envserver convert` reads the same
rollout back. Memory holds one rollout and, as in Inspect, a summary of each sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import ConfigError
from envserver_records.extras import install_command
from envserver_records.files import write_failure

from .atropos_format import kept_line
from .formats import Options, Row, Written
from .inspect_samples import Sample, lost_sample, sample_of
from .stored import StoredGroup, StoredRollout

Json = dict[str, Any]
STORE: Final = "envserver"
"""Key of a sample's store that holds the rollout as a line of `process`, without messages."""

_TOKENS: Final = ("tokens", "masks", "inference_logprobs")
_KEPT: Final = (*_TOKENS, "scores", "generation_params", "env_id", "envserver")


class Inspect:
    """The format "inspect"."""

    name, suffix = "inspect", ".eval"

    def __init__(self, options: Options) -> None:
        require_inspect()
        self._options = options

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """Returns a row for each kept rollout and, if all are kept, for each that was lost."""
        for rollout in kept:
            facts = _facts(group, rollout, tokens=self._options.tokens)
            yield {"sample": sample_of(rollout, {STORE: facts})}
        if len(kept) == len(group.rollouts):
            for kind, number in group.lost.items():
                for _ in range(number):
                    yield {"sample": lost_sample(group, kept[0], kind)}

    def writer(self) -> InspectLogs:
        """Returns the writer."""
        return InspectLogs(self._options.title)


class InspectLogs:
    """Writes a log for each environment and model, and another after `shard_rows` samples."""

    def __init__(self, title: str = "") -> None:
        self._title = title

    def open(self, folder: Path, shard_rows: int | None) -> None:
        """Prepares to write. See `Writer`."""
        from inspect_ai.log._recorders.eval import EvalRecorder

        self._folder, self._shard_rows = folder, shard_rows
        self._recorder = EvalRecorder(str(folder))
        self._logs: dict[tuple[str, str], _Log] = {}
        self._written: list[Written] = []
        self._runner = asyncio.Runner()

    def put(self, row: Row) -> None:
        """Writes one sample. Raises StoreError: it cannot be written."""
        from inspect_ai.log import condense_sample

        assert isinstance(row, dict)
        sample: Sample = row["sample"]
        key = (sample.task, sample.model)
        try:
            if key not in self._logs:
                log = _Log(sample, len(self._written) + len(self._logs), self._title)
                place = str(log.path_in(self._folder))
                self._runner.run(self._recorder.log_init(log.key, place))
                self._logs[key] = log
            log = self._logs[key]
            made = condense_sample(log.add(sample))
            self._runner.run(self._recorder.log_sample(log.key, made, write_through=True))
            if log.samples == self._shard_rows:
                self._finish(self._logs.pop(key))
        except OSError as error:
            raise write_failure(self._folder, error) from error

    def close(self) -> list[Written]:
        """Closes all logs. Raises StoreError: one cannot be written."""
        try:
            for log in self._logs.values():
                self._finish(log)
        except OSError as error:
            raise write_failure(self._folder, error) from error
        self._runner.close()
        return self._written

    def _finish(self, log: _Log) -> None:
        from inspect_ai.log import EvalPlan

        spec = log.spec()
        self._runner.run(self._recorder.log_start(spec, EvalPlan()))
        finished = self._recorder.log_finish(
            spec, "success", log.stats(), log.results(), None, header_only=True
        )
        self._runner.run(finished)
        self._written.append(Written(log.path_in(self._folder).name, log.samples))


class _Log:
    """The header of one log; its ids and counts grow."""

    def __init__(self, first: Sample, number: int, title: str) -> None:
        self._task, self._model, self._title = first.task, first.model, title
        self._created = self._ended = first.ended
        self._began = first.began
        self.samples = self._completed = 0
        self._epochs: Counter[str] = Counter()
        self._sums: dict[str, tuple[float, int]] = {}
        self._usage: Any = None
        digest = f"{first.task}\0{first.model}\0{first.sample.uuid}\0{number}".encode()
        self._id = hashlib.blake2b(digest, digest_size=11).hexdigest()
        self.key = self.spec()
        """Identifies the log; it does not know its samples."""

    def path_in(self, folder: Path) -> Path:
        """Returns the path, named as Inspect names logs: time, task, id."""
        task = re.sub(r"[^A-Za-z0-9.]+", "-", self._task).strip("-") or "task"
        moment = datetime.fromtimestamp(self._created, UTC).isoformat(timespec="seconds")
        return folder / f"{moment.replace(':', '-')}_{task}_{self._id}.eval"

    def add(self, sample: Sample) -> Any:
        """Counts a sample and returns it with its epoch; a task that comes again goes on."""
        made = sample.sample
        self._epochs[str(made.id)] += 1
        made.epoch = self._epochs[str(made.id)]
        self.samples += 1
        self._completed += made.error is None
        self._began = min(self._began, sample.began)
        self._ended = max(self._ended, sample.ended)
        for name, score in (made.scores or {}).items():
            total, number = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + float(score.value), number + 1)
        for usage in made.model_usage.values():
            self._usage = usage if self._usage is None else self._usage + usage
        return made

    def spec(self) -> Any:
        from inspect_ai.log import EvalConfig, EvalDataset, EvalSpec

        return EvalSpec(
            eval_id=self._id,
            run_id=self._id,
            task_id=self._id,
            created=_iso(self._created),
            task=self._task,
            task_display_name=self._title or None,
            dataset=EvalDataset(
                name=self._task, samples=len(self._epochs), sample_ids=list(self._epochs)
            ),
            model=self._model,
            config=EvalConfig(epochs=max(self._epochs.values(), default=1)),
            metadata={"exported_by": "envserver"},
        )

    def stats(self) -> Any:
        from inspect_ai.log import EvalStats

        usage = {} if self._usage is None else {self._model: self._usage}
        return EvalStats(
            started_at=_iso(self._began), completed_at=_iso(self._ended), model_usage=usage
        )

    def results(self) -> Any:
        from inspect_ai.log import EvalMetric, EvalResults, EvalScore

        return EvalResults(
            total_samples=self.samples,
            completed_samples=self._completed,
            scores=[
                EvalScore(
                    name=name,
                    scorer=name,
                    scored_samples=number,
                    metrics={"mean": EvalMetric(name="mean", value=total / number)},
                )
                for name, (total, number) in self._sums.items()
            ],
        )


def require_inspect() -> None:
    """Raises ConfigError: inspect_ai is not installed."""
    try:
        import inspect_ai.log  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Logs of Inspect need inspect_ai, which is not installed: {error}.",
            hint=install_command("inspect"),
        ) from error


def _facts(group: StoredGroup, rollout: StoredRollout, *, tokens: bool) -> Json:
    """Returns the line of a group with this rollout alone, without conversations of rows.

    Args:
        tokens: keep ids, masks and logprobs; else the rows are empty.
    """
    line = kept_line(group, {rollout.rollout_id})
    line = {key: line[key] for key in _KEPT if line.get(key) is not None}
    (told,) = line["envserver"]["rollouts"]
    dropped = ("messages", "calls", "service_calls")
    told = {key: value for key, value in told.items() if key not in dropped}
    if not tokens:
        line |= {key: [[] for _ in told["rows"]] for key in _TOKENS}
    asked = group.asked or len(group.rollouts)
    line["envserver"] = {**line["envserver"], "rollouts": [told], "asked": asked, "failures": []}
    return line


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
