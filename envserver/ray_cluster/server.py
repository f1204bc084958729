"""The actor that holds a server: `envserver serve --ray` as its child, on a node of the cluster.

What holds: other nodes reach it at the address of its node, with tokens that only those know who
can ask the actor. Its runners are actors of its own, and end with it.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

from ..http.access import create_token
from .command import Command

RUNNER_TOKEN = "ENVSERVER_RAY__TOKEN"


class ServerCommand(Command):
    """A running server.

    Args:
        config: the settings of `serve`, as JSON.
        cluster: address of the Ray cluster.
    """

    def __init__(self, config: str, cluster: str) -> None:
        import ray

        host = str(ray.util.get_node_ip_address())
        self._folder = Path(tempfile.mkdtemp(prefix="envserver-tokens-"))
        tokens = self._folder / "tokens.yaml"
        self._token, _ = create_token(tokens, "trainer", "trainer")
        runner, _ = create_token(tokens, "runners", "environment")
        port = _free_port(host)
        self._url = f"http://{host}:{port}"
        place = ("--server.host", host, "--server.port", str(port))
        super().__init__(
            ("serve", "--ray.address", cluster, *place, "--server.tokens_file", str(tokens)),
            config,
            {RUNNER_TOKEN: runner},
        )

    def access(self) -> tuple[str, str]:
        """Returns the address of the server, and the token of trainers."""
        return self._url, self._token

    def stop(self, seconds: float) -> int:
        try:
            return super().stop(seconds)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
