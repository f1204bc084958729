"""prepare -> upload -> launch -> watch -> fetch; skips the steps that `state.json` has as done.

`run_id` is chosen before anything is sent, and labels the job, so that a launch whose answer was
lost is found again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from envserver_records import (
    ConfigError,
    ConflictError,
    EngineError,
    EnvserverError,
    InputError,
    NotFoundError,
)
from envserver_records.files import replace_file, sha256_of
from envserver_records.tasks import Json
from rich.console import Console

from envserver_clients.finetuning.conversation import digest_of, parts_of
from envserver_clients.training.settings import from_flags

from .api import (
    ADAPTER_SIZES,
    RUN,
    Job,
    Patience,
    Prepared,
    Tokens,
    TuningJobs,
    VertexSettings,
    download,
    prepare,
    upload,
)

_NAME: Final = "state.json"


@dataclass
class TuningState:
    """The progress of a training, with the settings that define it.

    `files`: sha256 of the prepared data, by name. `uploaded`: URL by name. `job`: resource name; ""
    before the launch.
    """

    run_id: str
    settings: Json
    files: dict[str, str] = field(default_factory=dict)
    counts: Json = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)
    job: str = ""


def open_state(folder: Path, settings: Json) -> TuningState:
    path = folder / _NAME
    if not path.is_file():
        return TuningState(uuid.uuid4().hex[:16], settings)
    try:
        state = TuningState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    changed = sorted(
        name
        for name in settings.keys() | state.settings.keys()
        if settings.get(name) != state.settings.get(name)
    )
    if changed:
        raise ConflictError(
            f"{folder} belongs to a training with another {', '.join(changed)}.",
            hint="Use the same settings to continue, or another --output.",
        )
    return state


def save(folder: Path, state: TuningState) -> None:
    write_json(folder / _NAME, asdict(state))


def write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


_ENDED: Final = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
_ABOUT_RUNNING: Final = frozenset(
    ("until", "dry_run", "poll_seconds", "patience_minutes", "endpoint")
)
"""Settings of how the command runs, which do not change the training."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Exit status: 0 done, 1 the job or the service failed, 2 wrong settings or
    rows, 130 after Ctrl-C."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _end)
    try:
        settings = from_flags(
            VertexSettings, arguments, program="python -m envserver_clients.vertex"
        )
        tune(settings, console)
    except (ConfigError, ConflictError, InputError, NotFoundError) as error:
        _tell(console, error)
        return 2
    except EnvserverError as error:
        _tell(console, error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def tune(settings: VertexSettings, console: Console) -> None:
    settings.output.mkdir(parents=True, exist_ok=True)
    train, validation = _rows(settings)
    state = open_state(settings.output, _lasting(settings, train, validation))
    if not state.files:
        _prepare(settings, state, train, validation, console)
    if settings.dry_run:
        _print_requests(settings, state)
        return
    if settings.until == "prepare":
        return
    _upload(settings, state, console)
    if settings.until == "upload":
        return
    with _jobs(settings, console) as jobs:
        if not state.job:
            state.job = str(jobs.create(body_of(settings, state))["name"])
            save(settings.output, state)
        console.print(f"Job {state.job}", highlight=False, soft_wrap=True)
        if settings.until == "launch":
            return
        try:
            job = _watch(jobs, state.job, settings.poll_seconds, console)
        except KeyboardInterrupt:
            _tell_how_to_go_on(state, settings, console)
            raise
    _finish(settings, state, job, console)


def body_of(settings: VertexSettings, state: TuningState) -> Json:
    """The request body of tuningJobs.create."""
    urls = _urls(settings, state)
    hyper: Json = {"epochCount": settings.epochs}
    if settings.tuning_mode == "adapter":
        hyper["adapterSize"] = f"ADAPTER_SIZE_{ADAPTER_SIZES[settings.adapter_size]}"
    if settings.learning_rate_multiplier is not None:
        hyper["learningRateMultiplier"] = settings.learning_rate_multiplier
    spec: Json = {"trainingDatasetUri": urls["train"], "hyperParameters": hyper}
    if "validation" in urls:
        spec["validationDatasetUri"] = urls["validation"]
    body: Json = {
        "baseModel": settings.base_model,
        "supervisedTuningSpec": spec,
        "tunedModelDisplayName": settings.display_name,
        "labels": {RUN: state.run_id, "made_by": settings.label},
    }
    if settings.is_open:
        mode = "PEFT_ADAPTER" if settings.tuning_mode == "adapter" else "FULL"
        spec["tuningMode"] = f"TUNING_MODE_{mode}"
        body["outputUri"] = _tuned(settings, state)
        if settings.custom_base:
            body["customBaseModel"] = settings.custom_base
    return body


def _prepare(
    settings: VertexSettings,
    state: TuningState,
    train: Sequence[Path],
    validation: Sequence[Path],
    console: Console,
) -> None:
    prepared = prepare(
        train,
        validation,
        settings.output,
        settings.lines,
        most_tokens=settings.most_tokens,
        share=settings.validation_share,
        seed=settings.seed,
    )
    state.files = {name: _digest(path) for name, path in _files(prepared).items()}
    state.counts = {**asdict(prepared.counts), "dropped": dict(prepared.counts.dropped)}
    save(settings.output, state)
    counts = prepared.counts
    console.print(f"{counts.train:,} training examples, {counts.validation:,} validation examples")
    for reason, count in counts.dropped.most_common():
        console.print(f"  left out: {count:,} ({reason})", highlight=False)


def _upload(settings: VertexSettings, state: TuningState, console: Console) -> None:
    for name, url in _urls(settings, state).items():
        path = settings.output / f"{name}.jsonl"
        if state.uploaded.get(name) == url:
            continue
        if _digest(path) != state.files[name]:
            raise ConflictError(
                f"{path} was changed after it was prepared.",
                hint="Restore it, or use another --output.",
            )
        upload(path, url)
        state.uploaded[name] = url
        save(settings.output, state)
        console.print(f"{path.name} -> {url}", highlight=False, soft_wrap=True)


def _watch(jobs: TuningJobs, name: str, seconds: float, console: Console) -> Job:
    before = ""
    while True:
        job = jobs.get(name)
        state = str(job.get("state", "")).removeprefix("JOB_STATE_")
        if state != before:
            console.print(f"{time.strftime('%H:%M:%S')} {state.lower()}", highlight=False)
            before = state
        if state in _ENDED:
            return job
        time.sleep(seconds)


def _finish(settings: VertexSettings, state: TuningState, job: Job, console: Console) -> None:
    write_json(settings.output / "result.json", job)
    ended = str(job.get("state", "")).removeprefix("JOB_STATE_")
    if not ended.endswith("SUCCEEDED"):
        said = (job.get("error") or {}).get("message") or "no reason given"
        raise EngineError(
            f"The job ended as {ended.lower()}: {said}.",
            hint="See result.json. For another try use another --output.",
        )
    stats = (job.get("tuningDataStats") or {}).get("supervisedTuningDataStats") or {}
    if dropped := int(stats.get("totalTruncatedExampleCount") or 0):
        console.print(f"The service left out or cut {dropped:,} examples.", highlight=False)
    for what in ("model", "endpoint"):
        if name := (job.get("tunedModel") or {}).get(what):
            console.print(f"{what}: {name}", highlight=False, soft_wrap=True)
    if not settings.is_open:
        console.print("The service keeps adapters of Gemini models: use the endpoint.")
        return
    folder = settings.output / "adapter"
    files = download(str(job.get("outputUri") or _tuned(settings, state)), folder)
    console.print(f"{len(files)} files in {folder}", highlight=False, soft_wrap=True)


def _print_requests(settings: VertexSettings, state: TuningState) -> None:
    base = f"{settings.address.rstrip('/')}/{settings.version}"
    parent = _parent(settings)
    requests: list[Json] = [
        {
            "upload": f"{name}.jsonl",
            "to": url,
            "bytes": (settings.output / f"{name}.jsonl").stat().st_size,
        }
        for name, url in _urls(settings, state).items()
    ]
    headers = {"Authorization": "Bearer (a token)", "Content-Type": "application/json"}
    requests += [
        {"method": "GET", "url": f"{base}/{parent}/tuningJobs?pageSize=100", "headers": headers},
        {
            "method": "POST",
            "url": f"{base}/{parent}/tuningJobs",
            "headers": headers,
            "body": body_of(settings, state),
        },
        {"method": "GET", "url": f"{base}/{parent}/tuningJobs/(its id)", "headers": headers},
    ]
    if settings.is_open:
        requests.append({"download": _tuned(settings, state), "to": "adapter"})
    sys.stdout.write(json.dumps(requests, indent=2, ensure_ascii=False) + "\n")


def _lasting(settings: VertexSettings, train: Sequence[Path], validation: Sequence[Path]) -> Json:
    said = settings.model_dump(mode="json", exclude=set(_ABOUT_RUNNING) | {"output"})
    return {**said, "rows": digest_of([*train, *validation])}


def _rows(settings: VertexSettings) -> tuple[Sequence[Path], Sequence[Path]]:
    part = parts_of(settings.data, tool=settings.tool or None, whole=not settings.tool)[0]
    return part.train, (settings.validation,) if settings.validation else part.validation


def _files(prepared: Prepared) -> dict[str, Path]:
    files = {"train": prepared.train}
    return {**files, "validation": prepared.validation} if prepared.validation else files


def _urls(settings: VertexSettings, state: TuningState) -> dict[str, str]:
    place = f"{settings.bucket.rstrip('/')}/{state.run_id}"
    return {name: f"{place}/{name}.jsonl" for name in state.files}


def _tuned(settings: VertexSettings, state: TuningState) -> str:
    return settings.keep_uri or f"{settings.bucket.rstrip('/')}/{state.run_id}/tuned"


def _parent(settings: VertexSettings) -> str:
    return f"projects/{settings.project}/locations/{settings.location}"


def _jobs(settings: VertexSettings, console: Console) -> TuningJobs:
    return TuningJobs(
        settings.address,
        settings.version,
        _parent(settings),
        Tokens(os.environ),
        patience=Patience(settings.patience_minutes * 60, min(1.0, settings.poll_seconds)),
        say=lambda line: console.print(f"Waiting: {line}.", highlight=False, markup=False),
    )


def _tell_how_to_go_on(state: TuningState, settings: VertexSettings, console: Console) -> None:
    console.print(
        f"The job continues: {state.job}\nThe same command watches it again "
        f"(its state is in {settings.output}). To cancel it: POST {settings.address}/"
        f"{settings.version}/{state.job}:cancel",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror}.") from error


def _tell(console: Console, error: EnvserverError) -> None:
    text = f"Error: {error.message}\n{error.hint}".rstrip()
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _end(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
