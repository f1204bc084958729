"""Reads what `--track` wrote, by each tracker's own packages, and prints it as JSON.

    .venv-trackers/bin/python trackers_read_back.py FOLDER PROJECT RUN

Out: by tracker, `config`, `scalars` (step and reward), `rows` of the table.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def of_wandb(folder: Path) -> dict[str, Any]:
    """W&B has no reader of its offline files in Python: its messages are read from its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (run,) = (folder / "wandb").glob("offline-run-*")
    (log,) = run.glob("*.wandb")
    scalars, config, tables = [], {}, []
    for text in records(log.read_bytes()):
        record = Record()
        record.ParseFromString(text)
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update
        config |= {one.key: json.loads(one.value_json) for one in updates if one.key}
        if kind != "history":
            continue
        items = record.history.item
        values = {one.key or ".".join(one.nested_key): one.value_json for one in items}
        if "reward" in values:
            scalars.append([record.history.step.num, json.loads(values["reward"])])
        if "completions.path" in values:
            tables.append(json.loads(values["completions.path"]))
    rows = []
    for path in tables:
        table = json.loads((run / "files" / path).read_text())
        rows += [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    shown = subprocess.run(
        [Path(sys.executable).parent / "wandb", "sync", "--dry-run", "--yes", str(run)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.name.rpartition("-")[2] in shown.stdout + shown.stderr, shown
    return {"config": config, "scalars": scalars, "rows": rows}


def records(log: bytes) -> Iterator[bytes]:
    """Yields the records of a log in LevelDB's form, whose first seven bytes are W&B's."""
    at, parts, size = 7, [], 32768
    while at + 7 <= len(log):
        if size - at % size < 7:
            at += size - at % size
            continue
        _, length, kind = struct.unpack("<IHB", log[at : at + 7])
        if kind == 0:
            at += size - at % size
            continue
        parts.append(log[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def of_trackio(project: str) -> dict[str, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(project)
    logs = SQLiteStorage.get_logs(project, run.name)
    tables = [one["completions"]["_value"] for one in logs if "completions" in one]
    return {
        "config": run.config,
        "scalars": [[one["step"], one["reward"]] for one in logs if "reward" in one],
        "rows": [row for table in tables for row in table],
    }


def of_mlflow(folder: Path, project: str) -> dict[str, Any]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(project)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward")
    table = client.load_table(experiment.experiment_id, "completions.json", [run.info.run_id])
    config = {"environment": run.data.params["environment"]}
    config["openai"] = {"api_key": run.data.params["openai.api_key"]}
    return {
        "config": config,
        "scalars": sorted([one.step, one.value] for one in history),
        "rows": json.loads(table.to_json(orient="records")),
    }


def of_tensorboard(folder: Path, run: str) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / run), size_guidance={"tensors": 0})
    events.Reload()
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("completions/text_summary")
    ]
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    rows = [line for text in texts for line in text.splitlines()[2:]]
    return {
        "config": config,
        "scalars": [[one.step, one.value] for one in events.Scalars("reward")],
        "rows": rows,
    }


if __name__ == "__main__":
    place, project, run = Path(sys.argv[1]).absolute(), *sys.argv[2:4]
    found = {
        "wandb": of_wandb(place),
        "trackio": of_trackio(project),
        "mlflow": of_mlflow(place, project),
        "tensorboard": of_tensorboard(place, run),
    }
    print(json.dumps(found))
