"""`--env textarena:Wordle-v0`: the text games of TextArena, for one player or several."""

from __future__ import annotations

from collections.abc import Sequence

from envserver import Backend, Environment, Integration

from .games import WORD_GAMES, download_program

VERSION = "0.7.4"


def _environment(game: str) -> type[Environment]:
    from .env import textarena_environment

    return textarena_environment(game)


def _backend(game: str, packages: Sequence[str]) -> Backend:
    return Backend(
        name="textarena",
        requirements=[f"textarena=={VERSION}"],
        prepare=download_program() if game.startswith(WORD_GAMES) else "",
    )


INTEGRATION = Integration(
    what="text games of TextArena", environment=_environment, module="textarena", backend=_backend
)
