"""Atropos: a trainer's loop on the Atropos wire, with our rows at its end.

In: any server that speaks that wire (`envserver serve`, or atroposlib's own). Out: the batches of
`envserver_clients.records`, as the native client gives them. For trainers that came with Atropos
and want typed rows; a stock Atropos trainer needs none of this and goes to the same addresses.

What the wire does not carry is unknown here: `policy_version` of every group is -1, group ids are
counted. An envserver that is asked with `acknowledged` delivers a batch again that was not
acknowledged; everywhere else fetching is acknowledging.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec
from envserver_records import ConflictError, InputError

from envserver_clients.protocol import Answer, Retries, authorization, checked, pause_before_next
from envserver_clients.records import Batch, ClientGroup

_LEASE: Final = "x-envserver-lease"
_RETRIES: Final = Retries()


class AtroposTrainerClient:
    """A context manager that registers the trainer.

    Args:
        url: of the server.
        group_size: rows of a group.
        batch_size: groups of a batch, so that the wire's batch has group_size * batch_size rows.
        max_token_length: of a row; what environments cut their rows to.
        starting_step, steps: the trainer's own, told to environments.
        checkpoint_folder: likewise.
        project, group: names for those who log.
        acknowledged: a batch is the trainer's only after `ack` (an envserver knows of it).
        poll_seconds: between two questions for a batch that is not there yet.
        token: the server's access token; unset: the environment variable ENVSERVER_TOKEN.
        timeout_seconds: for one request.
        transport: for tests.
    """

    def __init__(
        self,
        url: str,
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
        retries: Retries = _RETRIES,
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
        self._retries = retries
        self._groups = 0
        headers = authorization(token)
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_seconds, transport=transport
        )

    def __enter__(self) -> Self:
        try:
            self.register()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def register(self) -> None:
        """Begins the run; environments that wait for a trainer go on with the first `lease`."""
        self._send("POST", "/register", json=self._registration)

    def lease(self, *, wait_seconds: float = 0.0) -> Batch | None:
        """The next batch, or None when there was none within `wait_seconds`.

        Raises:
            ConflictError: the server knows of no trainer: another one reset it.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            batch = self._batch(self._send("GET", "/batch", headers=self._ask))
            left = deadline - time.monotonic()
            if batch is not None or left <= 0:
                return batch
            time.sleep(min(self._poll_seconds, left))

    def batches(self, *, idle_seconds: float | None = None) -> Iterator[Batch]:
        """Batches as they come, without end, or until none came for `idle_seconds`."""
        while True:
            batch = self.lease(wait_seconds=60.0 if idle_seconds is None else idle_seconds)
            if batch is not None:
                yield batch
            elif idle_seconds is not None:
                return

    def ack(self, batch: Batch | str, *, checkpoint: str | None = None) -> None:
        """The batch is learned; where fetching was acknowledging, nothing is left to do.

        Args:
            checkpoint: the wire has no place for it; the native client's `ack` has.
        """
        lease_id = batch.lease_id if isinstance(batch, Batch) else batch
        if lease_id:
            self._send("POST", "/ack", json={"lease_id": lease_id})

    def _batch(self, answer: Answer) -> Batch | None:
        try:
            told = msgspec.json.decode(answer.content, type=_Told)
        except msgspec.DecodeError as error:
            raise InputError(f"The server's answer is no batch: {error}.", place="body") from error
        if told.status == "error":
            raise ConflictError(
                f"There is no batch: {told.message}",
                hint="The server was reset or started anew; call `register` again.",
            )
        if told.batch is None:
            return None
        return Batch(
            lease_id=answer.headers.get(_LEASE, ""),
            expires_at=0.0,
            groups=[self._group(memoryview(group)) for group in told.batch],
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
            pause = pause_before_next(self._retries, tried, problem)
            if pause is None:
                assert isinstance(problem, Answer)
                return checked(problem)
            time.sleep(pause)


class _Told(msgspec.Struct):
    """The answer to `GET /batch`: groups as they came."""

    batch: list[msgspec.Raw] | None = None
    status: str = ""
    message: str = ""


class _Maker(msgspec.Struct):
    env_id: int | None = None
