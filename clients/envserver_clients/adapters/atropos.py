"""Atropos: a client for trainers that speaks the Atropos API and returns typed rows.

It works with any server that speaks that API (`envserver serve`, or atroposlib's); an unchanged
Atropos trainer does not need it. What the API does not carry is unknown: `policy_version` is -1,
and group ids are numbers. With `acknowledged` an envserver redelivers batches that were not
acknowledged; otherwise fetching a batch acknowledges it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final, Self

import httpx
import msgspec
from envserver_records import ConflictError, InputError, NotFoundError
from envserver_records.http_errors import Urls, authorization
from envserver_records.servers import ServersClient

from envserver_clients.protocol import (
    Answer,
    Retries,
    checked,
    new_key,
    object_of,
    pause_before_next,
)
from envserver_clients.records import Batch, ClientGroup

_LEASE: Final = "x-envserver-lease"


class AtroposTrainerClient:
    """Fetches batches over the Atropos API; a context manager that registers the trainer.

    Args:
        url: the server's address; several equal servers: a list, or a text with commas.
        group_size: rows per group.
        batch_size: groups per batch; the API's batch has group_size * batch_size rows.
        max_token_length: tokens per row, to which environments cut rows.
        starting_step, steps: the trainer's first step and number of steps, for environments.
        checkpoint_folder: the trainer's, for environments.
        project, group: names for logging.
        acknowledged: batches need an `ack` (only an envserver supports it).
        poll_seconds: pause between requests for a batch that is not ready.
        token: the server's access token. Default: the environment variable ENVSERVER_TOKEN.
        timeout_seconds: time limit of one request.
        transport: for tests.
    """

    def __init__(
        self,
        url: Urls,
        *,
        group_size: int,
        batch_size: int = 8,
        max_token_length: int = 2048,
        starting_step: int = 0,
        steps: int = 1_000_000,
        checkpoint_folder: str = "checkpoints",
        project: str = "envserver",
        group: str = "envserver",
        acknowledged: bool = False,
        poll_seconds: float = 0.2,
        token: str | None = None,
        timeout_seconds: float = 60.0,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._registration = {
            "wandb_group": group,
            "wandb_project": project,
            "batch_size": group_size * batch_size,
            "max_token_len": max_token_length,
            "checkpoint_dir": checkpoint_folder,
            "save_checkpoint_interval": 0,
            "starting_step": starting_step,
            "num_steps": steps,
        }
        self._ask = {"x-envserver-ack": "lease"} if acknowledged else {}
        self._poll_seconds = poll_seconds
        self._retries = retries or Retries()
        self._groups = 0
        self._http = ServersClient(
            url, headers=authorization(token), timeout=timeout_seconds, transport=transport
        )

    def __enter__(self) -> Self:
        try:
            self.register()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def register(self) -> None:
        """Begins the run; environments that wait for a trainer continue at the first `lease`."""
        self._send("POST", "/register", json=self._registration)

    def lease(self, *, wait_seconds: float = 0.0) -> Batch | None:
        """Returns the next batch, or None if there is none within `wait_seconds`.

        Raises ConflictError: no trainer is registered: the server was reset.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            batch = self._batch(self._send("GET", "/batch", headers=self._ask | new_key()))
            left = deadline - time.monotonic()
            if batch is not None or left <= 0:
                return batch
            time.sleep(min(self._poll_seconds, left))

    def batches(self, *, idle_seconds: float | None = None) -> Iterator[Batch]:
        """Yields batches without end, or until none arrived for `idle_seconds`."""
        while True:
            batch = self.lease(wait_seconds=60.0 if idle_seconds is None else idle_seconds)
            if batch is not None:
                yield batch
            elif idle_seconds is not None:
                return

    def ack(self, batch: Batch | str, *, checkpoint: str | None = None) -> None:
        """Acknowledges a batch; without effect where fetching already acknowledged it.

        The API cannot carry `checkpoint`; the native client can.
        """
        lease_id = batch.lease_id if isinstance(batch, Batch) else batch
        if lease_id:
            self._send("POST", "/ack", json={"lease_id": lease_id})

    def status(self) -> dict[str, Any]:
        """Returns GET /v1/status; {} from a server that has none, such as atroposlib's."""
        try:
            return object_of(self._send("GET", "/v1/status"))
        except NotFoundError:
            return {}

    def _batch(self, answer: Answer) -> Batch | None:
        try:
            batch_answer = msgspec.json.decode(answer.content, type=_BatchAnswer)
        except msgspec.DecodeError as error:
            raise InputError(
                f"The server's answer is not a batch: {error}.", place="body"
            ) from error
        if batch_answer.status == "error":
            raise ConflictError(
                f"There is no batch: {batch_answer.message}",
                hint="The server was reset or restarted; call `register` again.",
            )
        if batch_answer.batch is None:
            return None
        return Batch(
            lease_id=answer.headers.get(_LEASE, ""),
            expires_at=0.0,
            groups=[self._group(memoryview(group)) for group in batch_answer.batch],
        )

    def _group(self, body: memoryview) -> ClientGroup:
        self._groups += 1
        maker = msgspec.json.decode(body, type=_Maker).env_id
        return ClientGroup(
            group_id=f"atropos-{self._groups}",
            env="" if maker is None else str(maker),
            format="atropos",
            policy_version=-1,
            body=body,
        )

    def _send(self, method: str, path: str, **more: Any) -> Answer:
        tried = 0
        while True:
            tried += 1
            problem: Exception | Answer
            try:
                came = self._http.request(method, path, **more)
                problem = Answer(came.status_code, came.headers, came.content)
            except httpx.TransportError as error:
                problem = error
            pause = pause_before_next(self._retries, tried, problem, self._http.base_url)
            if pause is None:
                return checked(problem)
            time.sleep(pause)


class _BatchAnswer(msgspec.Struct):
    batch: list[msgspec.Raw] | None = None
    status: str = ""
    message: str = ""


class _Maker(msgspec.Struct):
    env_id: int | None = None
