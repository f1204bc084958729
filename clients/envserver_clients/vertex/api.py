"""Creates, reads and lists the service's tuning jobs over REST, with tokens and retries.

In: settings and a request body. Out: jobs as the service describes them. What always holds: no
message contains a token; `create` looks for a job with its label before it tries again; temporary
failures are retried with growing pauses.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from envserver_records import (
    ConfigError,
    EngineRefused,
    EngineUnavailable,
    EnvserverError,
    NotFoundError,
)
from envserver_records.backoff import Backoff
from envserver_records.extras import CLIENTS, install_command
from envserver_records.servers import ServersClient

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
        """Returns a token; `anew` renews it. Raises ConfigError: there are no credentials."""
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
    """Manages the tuning jobs of a project in a location; a context manager.

    Args:
        say: receives a line for each failure that is retried.
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

    def create(self, body: Mapping[str, Any]) -> Job:
        """Launches a job, or returns the one with the same run label.

        Raises:
            EngineRefused: the service rejected it.
            EngineUnavailable: it did not answer in time.
        """
        run = body["labels"][RUN]
        for pause in self._pauses("launching"):
            if (found := self.find(run)) is not None:
                return found
            job = self._once("POST", f"{self._parent}/tuningJobs", json=dict(body))
            if job is not None:
                return job
            pause()
        raise self._gave_up("launch the job")

    def get(self, name: str) -> Job:
        """Returns the job; for errors see `create`."""
        return self._patiently("GET", name)

    def find(self, run: str) -> Job | None:
        """Returns the job with this run label, or None."""
        page = ""
        while True:
            params = {"pageSize": "100", **({"pageToken": page} if page else {})}
            found = self._patiently("GET", f"{self._parent}/tuningJobs", params=params)
            for job in found.get("tuningJobs", []):
                if job.get("labels", {}).get(RUN) == run:
                    return dict(job)
            page = str(found.get("nextPageToken", ""))
            if not page:
                return None

    def _patiently(self, method: str, path: str, **more: Any) -> Job:
        for pause in self._pauses(path):
            answer = self._once(method, path, **more)
            if answer is not None:
                return answer
            pause()
        raise self._gave_up(f"answer about {path}")

    def _once(self, method: str, path: str, **more: Any) -> Job | None:
        """Returns the answer; None if a later try may help."""
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

    def _pauses(self, what: str) -> Iterator[Callable[[], None]]:
        """Yields functions that sleep for growing times, until the patience ends."""
        until = time.monotonic() + self._patience.seconds
        backoff = Backoff(self._patience.first_pause, _LONGEST_PAUSE, jitter=(0.5, 1.0))
        for tried in itertools.count(1):
            left = until - time.monotonic()
            length = backoff.seconds(tried, random.random())
            yield lambda length=length: time.sleep(length)  # type: ignore[misc]
            if length > left:
                return

    def _gave_up(self, what: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"The service did not {what} for {self._patience.seconds / 60:g} minutes.",
            hint="A launched job continues; the same command watches it again.",
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
    """Uploads a file and checks the size of what arrived.

    Raises:
        ConfigError: no installed library supports such URLs.
        EnvserverError: the upload failed.
    """
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
    """Downloads all files below a URL; `folder` appears when it is complete.

    Returns:
        The files' names, relative to the folder.

    Raises:
        NotFoundError: there are no files.
        EnvserverError: the download failed.
    """
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
