"""The environment `code` with sandboxes, as a scorer has it."""

from typing import Any

from envserver_environments.code.env import Code

from envserver import Sandboxes


def code(rooms: Sandboxes, **settings: Any) -> Code:
    """Returns an instance that runs programs in `rooms`."""
    environment = Code(Code.Config(**settings))
    environment.sandboxes = rooms
    return environment
