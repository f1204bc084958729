"""A server inside a Ray cluster, for trainers that live on it.
Groups come from the server over HTTP, never through the object store; the server and its runners
end when the actor does, and the actor when the trainer's driver does.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import orjson
from envserver_records.errors import ConfigError, EnvserverError, NotFoundError

from ..ray_cluster.cluster import NAMESPACE
from ..ray_cluster.command import ServerCommand
from .python_api import spec_of
from .ray_runners import check_engine, plain
from .run_settings import ServeSettings

if TYPE_CHECKING:
    from envserver_clients.http import SyncEnvClient
    from envserver_clients.records import Batch

_START_SECONDS = 120.0
_LOOK_SECONDS = 0.2


class ServerFailed(EnvserverError):
    """The server in the cluster did not start."""

    kind, status = "server_failed", 502


class RayServer:
    """A server in the cluster; made by `ray_server`, or `named` by another process of the cluster.

    Attributes:
        actor: the handle of the actor.
        url, token: address of the server, and a token of the role `trainer`.
    """

    def __init__(self, actor: Any) -> None:
        import ray

        self.actor = actor
        self.url, self.token = ray.get(actor.access.remote(), timeout=_START_SECONDS)
        self._opened = contextlib.ExitStack()
        self._client: SyncEnvClient | None = None

    @classmethod
    def named(cls, name: str = "envserver") -> RayServer:
        """Finds the server that another process of the cluster has started. Raises
        NotFoundError."""
        import ray

        try:
            return cls(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            raise NotFoundError(f"No server {name!r} runs in this Ray cluster.") from None

    def client(self, run: str = "trainer", **settings: Any) -> SyncEnvClient:
        """Returns a client for this server; see `envserver_clients.http`."""
        from envserver_clients.http import SyncEnvClient

        return SyncEnvClient(self.url, run=run, token=self.token, **settings)

    def batch(self, groups: int = 8, *, timeout_seconds: float | None = None) -> Batch | None:
        """Leases the next `groups` groups for the run `trainer`: `batch.rows` are numpy arrays.
        Returns None after `timeout_seconds`; default: waits."""
        client = self._own_client()
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            wait = 30.0 if end is None else max(0.0, min(30.0, end - time.monotonic()))
            batch = client.lease(wait_seconds=wait, max_groups=groups)
            if batch is not None or (end is not None and time.monotonic() >= end):
                return batch

    def ack(self, batch: Batch | str, *, checkpoint: str | None = None) -> None:
        """Acknowledges a batch: it is learned, and never comes again."""
        self._own_client().ack(batch, checkpoint=checkpoint)

    def close(self, seconds: float = 60.0) -> None:
        """Finishes the open groups within `seconds`, then ends the server and its runners."""
        import ray

        self._opened.close()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.actor.stop.remote(seconds), timeout=seconds + 30)
        ray.kill(self.actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_client(self) -> SyncEnvClient:
        if self._client is None:
            self._client = self._opened.enter_context(self.client())
        return self._client

    def wait(self) -> None:
        """Waits until the server answers. Raises ServerFailed: it has ended, or does not answer."""
        import ray

        end = time.monotonic() + _START_SECONDS
        headers = {"authorization": f"Bearer {self.token}"}
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/v1/status", headers=headers).is_success:
                    return
            state = ray.get(self.actor.state.remote())
            if state["status"] is not None:
                raise ServerFailed(f"The server ended with {state['status']}: {state['said']}")
            time.sleep(_LOOK_SECONDS)
        raise ServerFailed(f"The server at {self.url} did not answer in {_START_SECONDS:g} s.")


def ray_server(
    environment: str | Path, *, name: str = "envserver", num_cpus: float = 1.0, **settings: Any
) -> RayServer:
    """Starts a server in the Ray cluster that this process is connected to.

    Args:
        environment: a name, or a path that the nodes know.
        name: of the actor, in the namespace `envserver`: `RayServer.named(name)` finds it.
        num_cpus: CPUs that Ray reserves for the server.
        settings: see `ServeSettings`; `ray={"runners": 4}` for the runners. The store is on the
            server's node unless it is a database.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment; or this
            process is not connected to a cluster.
        ServerFailed: the server does not start.
    """
    import ray

    if not ray.is_initialized():
        raise ConfigError("This process is in no Ray cluster.", hint="Call ray.init() first.")
    spec = spec_of(ServeSettings, str(environment), settings)
    check_engine(spec.settings)
    actor = ray.remote(ServerCommand).options(
        name=name, namespace=NAMESPACE, num_cpus=num_cpus, max_restarts=0
    )
    config = orjson.dumps(plain(spec.settings)).decode()
    server = RayServer(actor.remote(config, ray.get_runtime_context().gcs_address))
    try:
        server.wait()
    except BaseException:
        server.close(1.0)
        raise
    return server
