"""The settings of `envserver sandboxes serve`."""

from __future__ import annotations

from ...running.run_settings import SandboxesServeSettings
from ..command_line import CommandSpec

SUMMARY = """Makes sandboxes on this machine for servers and runners elsewhere, which name it in
--sandbox.remote. Clients need a token of the role `environment` (--server.tokens_file); without a
tokens file only this machine can connect. SIGTERM or Ctrl-C once waits until the open sandboxes are
closed, at most --server.drain_seconds; twice stops at once."""


COMMAND = CommandSpec(
    "sandboxes serve",
    SUMMARY,
    SandboxesServeSettings,
    frequent=(
        *("server.host", "server.port", "server.tokens_file"),
        *("server.ssl_certfile", "server.ssl_keyfile", "server.drain_seconds"),
        *("sandbox.backend", "sandbox.concurrent", "sandbox.room", "sandbox.docker_image"),
        *("sandbox.max_memory_mb", "sandbox.max_disk_mb", "log_level", "log_format"),
    ),
)
