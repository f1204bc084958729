"""Trackers of experiments: W&B, Trackio, MLflow, TensorBoard, JSON lines, behind four calls.

They work without network unless the user logged in or set an address. Invariants: steps that go
back never reach a tracker; a number that is not finite is left out.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

from .errors import ConfigError
from .extras import missing_module_hint

TrackerName = Literal["wandb", "trackio", "mlflow", "tensorboard", "jsonl"]
NAMES: Final[tuple[TrackerName, ...]] = get_args(TrackerName)
TABLE: Final = "completions"
"""The name of the table of rollouts; TRL's."""

_MOST_ROWS: Final = 500
"""Rows after which MLflow gets another file."""

Row = Mapping[str, str | float | int | None]
"""A rollout; the columns are the same in each row."""


class Tracker(Protocol):
    def config(self, settings: Mapping[str, Any]) -> None:
        """Writes the settings of the run, without secrets; once, before anything else."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers; steps ascend."""

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Adds rows, at least one, to the table of rollouts."""

    def close(self) -> None: ...


def open_tracker(
    name: TrackerName, *, project: str, run: str, folder: Path, step: int = 0
) -> Tracker:
    """Opens a run. Raises ConfigError: the package is not installed.

    `folder`: for files of trackers without a place of their own. `step`: the last step that counts
    of an earlier run with this name.
    """
    if name == "jsonl":
        return JsonLinesTracker(folder / f"{run}.jsonl")
    if name == "tensorboard":
        return TensorBoardTracker(folder / "tensorboard" / run, step)
    if name == "mlflow":
        return MlflowTracker(project, run, folder)
    if name == "wandb":
        return WandbTracker(project, run, folder)
    return TrackioTracker(project, run)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of `values`."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


class JsonLinesTracker:
    """Appends lines to a file: {"config": ...}, {"step": ..., "reward": ...}, {"rollouts": ...}."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def config(self, settings: Mapping[str, Any]) -> None:
        self._write({"config": dict(settings)})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, "time": round(time.time(), 3), **numbers(values)})

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self._write({"step": step, "rollouts": [dict(row) for row in rows]})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(f"{json.dumps(line, ensure_ascii=False)}\n")
        self._file.flush()


class TrackioTracker:
    """A run of Trackio: in its SQLite files (TRACKIO_DIR) unless TRACKIO_SPACE_ID is set."""

    def __init__(self, project: str, run: str) -> None:
        self._package = _imported("trackio")
        self._run = self._package.init(
            project=project, name=run, resume="allow", auto_log_gpu=False, auto_log_cpu=False
        )

    def config(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(numbers(values), step=step)

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self._run.log({TABLE: self._table(rows)}, step=step)

    def _table(self, rows: Sequence[Row]) -> Any:
        return self._package.Table(data=[dict(row) for row in rows])

    def close(self) -> None:
        self._run.finish()


class WandbTracker(TrackioTracker):
    """A run of Weights & Biases: offline unless the user has logged in or set WANDB_MODE."""

    def __init__(self, project: str, run: str, folder: Path) -> None:
        self._package = _imported("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or (None if _has_logged_in() else "offline")
        # Neither what the terminal shows nor the command line, which may hold keys, is sent.
        quiet = self._package.Settings(console="off", silent=True, x_disable_meta=True)
        self._run = self._package.init(
            project=project, name=run, dir=str(folder), mode=mode, resume="allow", settings=quiet
        )

    def config(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def _table(self, rows: Sequence[Row]) -> Any:
        # A table for each step, as TRL's: one that grows would be kept in memory as a whole.
        data = [[*row.values()] for row in rows]
        return self._package.Table(columns=[*rows[0]], data=data)


def _has_logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # noqa: PTH111 - no home
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")


class MlflowTracker:
    """A run of MLflow: in `folder`/mlflow.db (SQLite) unless MLFLOW_TRACKING_URI is set.

    It uses the client, not the module's current run, so that it works in any thread.
    """

    def __init__(self, project: str, run: str, folder: Path) -> None:
        mlflow = _imported("mlflow")
        folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(uri or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(project)
        if found is not None:
            experiment = found.experiment_id
        else:
            place = None if uri else (folder.absolute() / "mlflow-artifacts").as_uri()
            experiment = self._client.create_experiment(project, artifact_location=place)
        self._entities = importlib.import_module("mlflow.entities")
        self._id = self._client.create_run(experiment, run_name=run).info.run_id
        self._rows = 0

    def config(self, settings: Mapping[str, Any]) -> None:
        of = self._entities.Param
        params = [of(key, str(value)[:6000]) for key, value in _flat(settings)]
        for start in range(0, len(params), 100):  # at most so many at a time
            self._client.log_batch(self._id, params=params[start : start + 100])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        at = int(time.time() * 1000)
        of = self._entities.Metric
        metrics = [of(name, value, at, step) for name, value in numbers(values).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        part = self._rows // _MOST_ROWS  # a file is written anew for each addition
        self._rows += len(rows)
        file = f"{TABLE}-{part}.json" if part else f"{TABLE}.json"
        self._client.log_table(self._id, data=columns, artifact_file=file)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{name}.")
        else:
            found.append((f"{before}{name}", value))
    return found


class TensorBoardTracker:
    """Event files of TensorBoard, written without torch; the table is Markdown."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._protos = {
            name: _imported(f"tensorboard.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor", "tensor_shape", "types")
        }
        writers = _imported("tensorboard.summary.writer.event_file_writer")
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = writers.EventFileWriter(str(folder))
        if step:  # hides later steps of an earlier run
            log = self._protos["event"].SessionLog
            self._add(step + 1, session_log=log(status=log.START))

    def config(self, settings: Mapping[str, Any]) -> None:
        rows = [{"setting": name, "value": str(value)} for name, value in _flat(settings)]
        self._text(0, "config", rows)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        of = self._protos["summary"].Summary
        listed = [of.Value(tag=tag, simple_value=number) for tag, number in numbers(values).items()]
        self._add(step, summary=of(value=listed))
        self._writer.flush()

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self._text(step, TABLE, rows)

    def close(self) -> None:
        self._writer.close()

    def _text(self, step: int, tag: str, rows: Sequence[Row]) -> None:
        of, protos = self._protos["summary"], self._protos
        tensor = protos["tensor"].TensorProto(
            dtype=protos["types"].DT_STRING,
            string_val=[_markdown(rows).encode()],
            tensor_shape=protos["tensor_shape"].TensorShapeProto(
                dim=[protos["tensor_shape"].TensorShapeProto.Dim(size=1)]
            ),
        )
        plugin = of.SummaryMetadata.PluginData(plugin_name="text")
        metadata = of.SummaryMetadata(plugin_data=plugin)
        value = of.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._add(step, summary=of.Summary(value=[value]))
        self._writer.flush()

    def _add(self, step: int, **what: Any) -> None:
        event = self._protos["event"].Event(wall_time=time.time(), step=step, **what)
        self._writer.add_event(event)


def _markdown(rows: Sequence[Row]) -> str:
    header = [*rows[0]] if rows else []
    lines = [
        header,
        ["---"] * len(header),
        *([_cell(value) for value in row.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    """Text of a model is not markup."""
    text = "" if value is None else str(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    text = "".join(f"\\{character}" if character in "|`*_[]#" else character for character in text)
    return text.replace("\r", "").replace("\n", "<br>")


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"The tracker {package} cannot be used: {error}.", hint=missing_module_hint(package)
        ) from error
