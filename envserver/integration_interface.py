"""What a package says to run the environments of another framework as `--env SCHEME:REST`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .environment import Environment


def _same(rest: str) -> str:
    return rest


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual environment that environments of a framework share.

    Args:
        name: of its folder in `envserver env list`; another version of the framework is another
            backend: "verifiers-v1".
        requirements: what pip installs, with versions: ["verifiers==0.4.0"]. The version of the
            first is shown as the backend's.
        prepare: a program for its Python, run once after each installation; it may use the
            network: downloads that no rollout may make.
    """

    name: str
    requirements: list[str]
    prepare: str = ""


class Integration(msgspec.Struct, frozen=True, kw_only=True):
    """The environments of a framework: an entry point of the group `envserver.integrations`.

    The entry point's name is the scheme. Its module is imported whenever the scheme is used, in
    every interpreter: it imports the framework only in `environment`.

    Args:
        what: half a sentence for `envserver list`: "environments of verifiers' hub".
        environment: returns the class of `REST`; called in an interpreter that can import
            `module`, once in each process. It raises NotFoundError or ConfigError.
        module: the framework's package; "": the server's own interpreter always has what is needed.
        backend: returns the virtual environment of `REST`, for `envserver env install
            SCHEME:REST --with ...`; it gets REST and what was given with `--with`, and raises
            InputError. None: pip install the package beside envserver.
        absolute: returns REST in a form that another process, in another folder, understands
            (paths); default: as it is.
    """

    what: str
    environment: Callable[[str], type[Environment]]
    module: str = ""
    backend: Callable[[str, Sequence[str]], Backend] | None = None
    absolute: Callable[[str], str] = _same
