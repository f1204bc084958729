"""Creates, reads and lists the service's tuning jobs over REST, with tokens and retries.

Invariants: no message contains a token; `create` looks for a job with its label before it tries
again; temporary failures are retried with growing pauses.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, TextIO

import httpx
from envserver_records import (
    ConfigError,
    EngineRefused,
    EngineUnavailable,
    EnvserverError,
    InputError,
    NotFoundError,
)
from envserver_records.extras import CLIENTS, install_command
from envserver_records.files import replacing_path
from envserver_records.servers import ServersClient
from envserver_records.tasks import Json
from envserver_records.waiting import Backoff
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from envserver_clients.finetuning.conversation import Conversation, read_row, rows_of

TOKEN: Final = "VERTEX_ACCESS_TOKEN"
"""Environment variable with a token, as from `gcloud auth print-access-token`."""
RUN: Final = "envserver_run"
"""The job's label with the id of this training."""
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
_LONGEST_PAUSE: Final = 300.0
_LATER: Final = (408, 429, 500, 502, 503, 504)
_HINTS: Final = {
    400: "The service rejected the request: see --dry-run.",
    401: f"The token is invalid or expired: set {TOKEN} again, or use google-auth's credentials.",
    403: "No permission: is the API enabled, and do the credentials have the role Vertex AI User?",
    404: "Is the base model's name correct, and is it available in this location?",
}

Job = dict[str, Any]
Say = Callable[[str], None]


class Tokens:
    """Access tokens from the variable, or from google-auth, which renews them."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._given = environ.get(TOKEN, "").strip()
        self._credentials: Any = None

    def current(self, *, anew: bool = False) -> str:
        """Raises ConfigError: there are no credentials."""
        if self._given:
            return self._given
        try:
            transport = importlib.import_module("google.auth.transport.requests")
            auth = importlib.import_module("google.auth")
        except ImportError as error:
            raise ConfigError(
                f"There are no credentials: {TOKEN} is not set, and google-auth is not installed.",
                hint=f"{install_command('vertex', CLIENTS)}, or "
                f"export {TOKEN}=$(gcloud auth print-access-token)",
            ) from error
        try:
            if self._credentials is None:
                self._credentials, _ = auth.default(scopes=[_SCOPE])
            if anew or not self._credentials.valid:
                self._credentials.refresh(transport.Request())
        except Exception as error:  # google.auth.exceptions.*, importable only there
            raise ConfigError(
                f"google-auth has no usable credentials: {error}.",
                hint="gcloud auth application-default login",
            ) from error
        return str(self._credentials.token)


@dataclass(frozen=True)
class Patience:
    """How long to retry a service that does not answer, and the first pause in seconds."""

    seconds: float = 3600.0
    first_pause: float = 1.0


class TuningJobs:
    """Manages the tuning jobs of a project in a location.

    `say` receives a line for each failure that is retried.
    """

    def __init__(
        self,
        address: str,
        version: str,
        parent: str,
        tokens: Tokens,
        *,
        patience: Patience | None = None,
        say: Say = lambda line: None,
    ) -> None:
        self._base = f"{address.rstrip('/')}/{version}"
        self._parent = parent
        self._tokens = tokens
        self._patience = patience or Patience()
        self._say = say
        self._client = ServersClient(self._base, timeout=_TIMEOUT)

    def __enter__(self) -> TuningJobs:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def create(self, body: Json) -> Job:
        """Launches a job, or returns the one with the same run label."""
        run, path = body["labels"][RUN], f"{self._parent}/tuningJobs"
        return self._patiently(
            "launch the job", lambda: self.find(run) or self._once("POST", path, json=dict(body))
        )

    def get(self, name: str) -> Job:
        return self._patiently(f"answer about {name}", lambda: self._once("GET", name))

    def find(self, run: str) -> Job | None:
        params, path = {"pageSize": "100"}, f"{self._parent}/tuningJobs"
        while True:
            found = self._patiently(
                f"answer about {path}", lambda: self._once("GET", path, params=params)
            )
            for job in found.get("tuningJobs", []):
                if job.get("labels", {}).get(RUN) == run:
                    return dict(job)
            params["pageToken"] = str(found.get("nextPageToken", ""))
            if not params["pageToken"]:
                return None

    def _patiently(self, what: str, attempt: Callable[[], Job | None]) -> Job:
        """The first answer that is not None; pauses grow until the patience ends."""
        until = time.monotonic() + self._patience.seconds
        backoff = Backoff(self._patience.first_pause, _LONGEST_PAUSE, jitter=(0.5, 1.0))
        for tried in itertools.count(1):
            left = until - time.monotonic()
            if (answer := attempt()) is not None:
                return answer
            pause = backoff.seconds(tried, random.random())
            if pause > left:
                break
            time.sleep(pause)
        raise EngineUnavailable(
            f"The service did not {what} for {self._patience.seconds / 60:g} minutes.",
            hint="A launched job continues; the same command watches it again.",
        )

    def _once(self, method: str, path: str, **more: Any) -> Job | None:
        """The answer; None if a later try may help."""
        url = f"{self._base}/{path}"
        for anew in (False, True):
            headers = {"Authorization": f"Bearer {self._tokens.current(anew=anew)}"}
            try:
                answer = self._client.request(method, url, headers=headers, **more)
            except httpx.TransportError as error:
                self._say(f"{type(error).__name__} at {self._base}")
                return None
            if answer.status_code != httpx.codes.UNAUTHORIZED:
                break
        if answer.status_code in _LATER:
            self._say(f"the service answers {answer.status_code}")
            return None
        if answer.is_success:
            return _object(answer)
        raise EngineRefused(
            f"The service answers {answer.status_code} to {method} {path}: {_error_text(answer)}",
            hint=_HINTS.get(answer.status_code, ""),
            status=answer.status_code,
        )


def _object(answer: httpx.Response) -> Job:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EngineRefused(f"The service's answer is not a JSON object: {answer.text[:200]!r}.")
    return found


def _error_text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300] or answer.reason_phrase


def upload(path: Path, url: str) -> None:
    """Uploads a file and checks the size of what arrived."""
    system, place = _place(url)
    try:
        system.makedirs(system._parent(place), exist_ok=True)
        system.put_file(str(path), place)
        size = system.info(place)["size"]
    except Exception as error:  # each kind of storage has its own errors
        raise _failed("uploaded to", url, error) from error
    if size != path.stat().st_size:
        raise EnvserverError(f"{url} has {size} bytes, {path.name} {path.stat().st_size}.")


def download(url: str, folder: Path) -> list[str]:
    """Downloads all files below a URL; returns their names. `folder` appears when it is
    complete."""
    system, place = _place(url)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as name:
        unfinished = Path(name) / "files"
        unfinished.mkdir()
        try:
            found = sorted(system.find(place))
            for file in found:
                target = unfinished / _below(place, file)
                target.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(file, str(target))
        except Exception as error:  # as above
            raise _failed("fetched from", url, error) from error
        if not found:
            raise NotFoundError(f"There is nothing at {url}.")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    return [_below(place, file) for file in found]


def _below(place: str, file: str) -> str:
    name = file.removeprefix(place).lstrip("/")
    if ".." in Path(name).parts:
        raise EnvserverError(f"{file} is not below {place}.")
    return name or Path(file).name


def _place(url: str) -> tuple[Any, str]:
    try:
        system, place = importlib.import_module("fsspec.core").url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be used from here: {error}.",
            hint=install_command("vertex", CLIENTS),
        ) from error
    return system, str(place)


def _failed(what: str, url: str, error: Exception) -> EnvserverError:
    return EnvserverError(
        f"Nothing could be {what} {url}: {type(error).__name__}: {error}.",
        hint="Does the bucket exist, and may these credentials use it? Then run the command again.",
    )


ADAPTER_SIZES: Final = {
    1: "ONE",
    2: "TWO",
    4: "FOUR",
    8: "EIGHT",
    16: "SIXTEEN",
    32: "THIRTY_TWO",
}
_LABEL: Final = re.compile(r"[a-z0-9_-]{1,63}")


class VertexSettings(BaseModel):
    """Tunes a model with Vertex AI: prepares and uploads data, launches a job, watches it, fetches
    the adapter.

    The same command continues where an earlier one ended; Ctrl-C leaves the job running.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    data: Path
    """A file of rows or a folder, as for `envserver_clients.sft`; a folder's val.jsonl is used."""
    output: Path
    """Folder of this training: prepared data, state.json, result.json, the adapter."""
    bucket: str
    """Where to upload the data: gs://bucket/prefix, or any other URL that fsspec supports."""
    project: str
    """Google Cloud project."""
    location: str = "us-central1"
    """Region of the job; the bucket should be in it, too."""
    base_model: str = "meta/llama3_1@llama-3.1-8b-instruct"
    """A Gemini model (gemini-2.5-flash), or an open one (publisher/model@version)."""
    custom_base: str = ""
    """gs:// folder with initial weights for an open model. Default: its own weights."""
    max_tokens: PositiveInt | None = None
    """Approximate maximum tokens of an example. Default: 131072 (Gemini), 8192 (open models)."""
    tool: str = ""
    """Use only this tool's rows in a folder of `envserver sft build`."""
    form: Literal["auto", "contents", "messages"] = "auto"
    """Form of the lines: contents (Gemini), messages (open models); auto: by the base model."""
    validation: Path | None = None
    """File of validation rows. Default: the folder's own, or `validation_share`."""
    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the rows for validation if there are no validation rows."""
    seed: int = 0
    """Seed of that choice."""

    adapter_size: int = 16
    """Rank of the adapter: 1, 2, 4, 8, 16 or 32."""
    epochs: PositiveInt = 3
    """Passes over the data."""
    learning_rate_multiplier: PositiveFloat | None = None
    """Factor of the service's learning rate. Default: 1."""
    tuning_mode: Literal["adapter", "full"] = "adapter"
    """What to train of an open model: a LoRA adapter, or all weights."""
    display_name: str = "envserver"
    """Display name of the tuned model."""
    label: str = "envserver"
    """Value of the job's label `made_by`."""

    until: Literal["prepare", "upload", "launch", "done"] = "done"
    """Stop after this step; the same command without it continues."""
    dry_run: bool = False
    """Prepare the data and print the requests; sends nothing and needs no credentials."""
    poll_seconds: PositiveFloat = 30.0
    """Seconds between checks of the job."""
    patience_minutes: PositiveFloat = 60.0
    """Stop watching after this time without an answer; the job continues."""
    endpoint: str = ""
    """Address of the API. Default: https://LOCATION-aiplatform.googleapis.com."""
    keep_uri: str = ""
    """Where to put an open model's adapter. Default: `tuned` beside the data."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.adapter_size not in ADAPTER_SIZES:
            raise ValueError(f"adapter_size must be one of {', '.join(map(str, ADAPTER_SIZES))}")
        if not _LABEL.fullmatch(self.label):
            raise ValueError("label may have only lower-case letters, digits, _ and -, at most 63")
        if len(self.display_name) > 128:
            raise ValueError("display_name may have at most 128 characters")
        if not self.is_open and (self.custom_base or self.tuning_mode == "full"):
            raise ValueError("custom_base and tuning_mode full are only for open models")
        if "://" not in self.bucket:
            raise ValueError("bucket must be a URL, such as gs://bucket/prefix")
        return self

    @property
    def is_open(self) -> bool:
        """The base model's weights are public: publisher/model@version."""
        return "/" in self.base_model

    @property
    def address(self) -> str:
        return self.endpoint or f"https://{self.location}-aiplatform.googleapis.com"

    @property
    def version(self) -> str:
        """v1beta1 for features of open models."""
        return "v1beta1" if self.is_open else "v1"

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or (8_192 if self.is_open else 131_072)

    @property
    def lines(self) -> Literal["contents", "messages"]:
        if self.form == "auto":
            return "messages" if self.is_open else "contents"
        return self.form


# The form of Gemini's lines follows the page "Prepare supervised fine-tuning data for Gemini
# models": `contents` of `role` (user, model) and `parts` of `text`, and a `systemInstruction`. Open
# models take `messages` (role, content). Limits: "About supervised fine-tuning for Gemini models".

Form = Literal["contents", "messages"]

MOST_BYTES: Final = 1_000_000_000
MOST_EXAMPLES: Final = 1_000_000
MOST_VALIDATION: Final = 5_000
BYTES_A_TOKEN: Final = 4
"""A rough estimate: only the service has its tokenizer."""
_SYSTEM: Final = ("system", "developer")


@dataclass
class RowCounts:
    train: int = 0
    validation: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Prepared:
    train: Path
    validation: Path | None
    counts: RowCounts


def prepare(
    train: Sequence[Path],
    validation: Sequence[Path],
    folder: Path,
    form: Form,
    *,
    most_tokens: int,
    share: float = 0.0,
    seed: int = 0,
) -> Prepared:
    """Writes the files; each appears when it is complete.

    `most_tokens`: maximum length of an example, input and output; rows that are likely longer are
    left out. `share`: fraction of `train` that becomes validation if `validation` is empty. The
    choice depends only on each row's content and the seed.
    """
    counts = RowCounts()
    files = {name: folder / f"{name}.jsonl" for name in ("train", "validation")}
    with ExitStack() as stack:
        partial = {
            name: stack.enter_context(replacing_path(path, sync=False))
            for name, path in files.items()
        }
        trained = stack.enter_context(partial["train"].open("w"))
        other = stack.enter_context(partial["validation"].open("w"))
        for line in _lines(train, form, most_tokens, counts):
            aside = not validation and _is_aside(line, share, seed)
            _write(line, other if aside else trained)
            counts.train += not aside
            counts.validation += aside
        for line in _lines(validation, form, most_tokens, counts):
            _write(line, other)
            counts.validation += 1
        trained.flush()
        other.flush()
        _check(counts, partial)
    return Prepared(files["train"], files["validation"] if counts.validation else None, counts)


def line_of(row: Json, place: str, form: Form, most_tokens: int) -> Json | str:
    """A row in the service's form, or the reason to leave it out."""
    conversation = read_row(row, place)
    assert isinstance(conversation, Conversation)
    if conversation.tools or any(
        message["role"] == "tool" or message.get("tool_calls") for message in conversation.messages
    ):
        return "tools"
    turns: list[tuple[str, str]] = []
    for message in conversation.messages:
        text = message.get("content")
        if not isinstance(text, str):
            return "no text"
        _add(turns, "system" if message["role"] in _SYSTEM else message["role"], text)
    if sum(len(text.encode()) for _, text in turns) > most_tokens * BYTES_A_TOKEN:
        return "too long"
    return _formed(turns, form)


def _add(turns: list[tuple[str, str]], role: str, text: str) -> None:
    """Adjacent messages of one role are joined, so that roles alternate."""
    if turns and turns[-1][0] == role:
        turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
    else:
        turns.append((role, text))


def _formed(turns: list[tuple[str, str]], form: Form) -> Json | str:
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    if not turns or turns[0][0] != "user" or turns[-1][0] != "assistant":
        return "does not begin with a user and end with the model"
    if any(role not in ("user", "assistant") for role, _ in turns):
        return "a system message in the middle"
    if any(not text.strip() for _, text in turns):
        return "an empty message"
    if form == "messages":
        said = [("system", system), *turns] if system else turns
        return {"messages": [{"role": role, "content": text} for role, text in said]}
    line: Json = {}
    if system:
        line["systemInstruction"] = {"role": "system", "parts": [{"text": system}]}
    names = {"user": "user", "assistant": "model"}
    line["contents"] = [{"role": names[role], "parts": [{"text": text}]} for role, text in turns]
    return line


def _lines(paths: Sequence[Path], form: Form, most_tokens: int, counts: RowCounts) -> Iterator[str]:
    for place, row in rows_of(paths):
        line = line_of(row, place, form, most_tokens)
        if isinstance(line, str):
            counts.dropped[line] += 1
        else:
            yield json.dumps(line, ensure_ascii=False)


def _is_aside(line: str, share: float, seed: int) -> bool:
    digest = hashlib.sha256(f"{seed}\n{line}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _write(line: str, file: TextIO) -> None:
    file.write(line + "\n")


def _check(counts: RowCounts, files: dict[str, Path]) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in counts.dropped.most_common())
    if not counts.train:
        raise InputError("No row is left to train on.", hint=f"Left out: {dropped or 'nothing'}.")
    for name, count, most in (
        ("train", counts.train, MOST_EXAMPLES),
        ("validation", counts.validation, MOST_VALIDATION),
    ):
        if count > most:
            raise InputError(f"{name}: {count:,} examples; the service accepts {most:,}.")
        if (size := files[name].stat().st_size) > MOST_BYTES:
            raise InputError(f"{name}: {size:,} bytes; the service accepts {MOST_BYTES:,}.")
