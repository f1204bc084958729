"""Starts the engine: python -m envserver_local --help."""

from __future__ import annotations

import sys

from envserver_records.extras import install_command

from .options import parse


def main() -> int:
    """Serves until SIGTERM or SIGINT; returns 2 if it cannot start."""
    options = parse()
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        sys.stderr.write(
            f"The local engine needs torch and transformers: {error}.\n"
            f"Install them: {install_command('local')}.\n"
        )
        return 2
    from .server import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
