"""One game of TextArena: who is to move, what they see, and how it ended. It depends on nothing but
its id, options, number of players, seed and actions: TextArena draws from Python's global random
numbers, so each game keeps a state of its own."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

from envserver import ConfigError, NotFoundError

# A rollout downloads nothing. `envserver env install` does, into the virtual environment; without
# the lists a game is refused with a message that says how to get them.

WORD_GAMES = (
    "Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee",
    "WordChains", "WordLadder", "WordSearch", "Wordle",
)  # fmt: skip
RESOURCES = {
    "words": "corpora/words",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
}


def download_program() -> str:
    """A program that downloads missing lists into the virtual environment that runs it."""
    return f"""
import nltk, os, sys
place = os.path.join(sys.prefix, "nltk_data")
def there(path):
    try:
        return bool(nltk.data.find(path))
    except LookupError:
        return False
missing = [
    name for name, path in {RESOURCES}.items()
    if not there(path) and not there(path + ".zip") and not nltk.download(name, place, quiet=True)
]
sys.exit(f"NLTK cannot download {{missing}}." if missing else 0)
"""


def look_for_words_in(folders: str) -> None:
    """Adds folders, separated as in $PATH, to those in which NLTK looks."""
    import nltk

    for folder in reversed(folders.split(os.pathsep)):
        if folder and folder not in nltk.data.path:
            nltk.data.path.insert(0, folder)


@contextmanager
def without_downloads(game: str) -> Iterator[None]:
    """Within the block nothing is downloaded, and nothing is printed to standard output."""
    import nltk

    missing: set[str] = set()

    def held(wanted: Any = None, *arguments: Any, **options: Any) -> bool:
        names = [wanted] if isinstance(wanted, str) else list(wanted or ())
        lacking = {name for name in names if not _is_there(name)}
        missing.update(lacking)
        return not lacking

    download, nltk.download = nltk.download, held
    try:
        with redirect_stdout(sys.stderr):
            yield
    except LookupError as error:
        if not missing:
            raise
        names = " ".join(sorted(missing))
        raise ConfigError(
            f"{game} needs word lists of NLTK that are not on this machine: {names}.",
            hint=f"python -m nltk.downloader {names}, or envserver env install textarena:{game} "
            "--replace true; both need the network once. --env.nltk_data names another folder.",
        ) from error
    finally:
        nltk.download = download


def _is_there(name: str) -> bool:
    import nltk

    place = RESOURCES.get(name, name)
    for path in (place, f"{place}.zip"):
        try:
            nltk.data.find(path)
        except LookupError:
            continue
        return True
    return False


_MOST_PLAYERS = 20
_INVALID = -1.0
"""TextArena's own penalty for an invalid move."""


class Turn(NamedTuple):
    player: int
    text: str


class Outcome(NamedTuple):
    """How a game ended: rewards by player, whose invalid move ended it, and why, in words."""

    rewards: dict[int, float]
    invalid: list[int]
    reason: str
    fallen: bool = False


class Game:
    """A game from its beginning to its end. `whole`: each turn shows the whole game in TextArena's
    own words, instead of what is new."""

    def __init__(
        self, game: str, options: Mapping[str, Any], *, players: int, seed: int, whole: bool
    ) -> None:
        self._env = copy.deepcopy(_pristine(game, json.dumps(options, sort_keys=True)))
        self._whole = whole
        self._random = _Apart(seed)
        self._players = players
        self._moves = 0
        self._fallen: Outcome | None = None
        self.ended = False
        with self._random.within():
            self._env.reset(num_players=players, seed=seed)

    def turn(self) -> Turn:
        """Returns whose turn it is and what this player is shown; ask once for each turn."""
        with self._random.within():
            if self._whole:
                player, shown = self._env.get_observation()
                return Turn(player, shown if isinstance(shown, str) else self._text(player, shown))
            player, news = _unwrapped(self._env).get_observation()
        return Turn(player, self._text(player, news))

    def act(self, action: str) -> None:
        """An invalid action is punished by the game's rules. Some games crash on malformed ones:
        the player who sends one loses. A game that does not even survive its first action is
        broken, and raises."""
        player = int(_unwrapped(self._env).state.current_player_id)
        try:
            with self._random.within():
                self.ended, _ = self._env.step(action)
        except Exception as error:
            if self._moves == 0:
                raise
            self.ended = True
            reason = f"The game crashed on this action: {type(error).__name__}: {str(error)[:200]}"
            self._fallen = Outcome(forfeited(player, self._players), [player], reason, fallen=True)
        self._moves += 1

    def outcome(self) -> Outcome:
        if self._fallen is not None:
            return self._fallen
        rewards, facts = self._env.close()
        return Outcome(
            rewards={player: _number(reward) for player, reward in (rewards or {}).items()},
            invalid=[player for player, fact in facts.items() if fact.get("invalid_move")],
            reason=next((str(fact["reason"]) for fact in facts.values() if fact.get("reason")), ""),
        )

    def _text(self, player: int, news: Any) -> str:
        if isinstance(news, str):
            return news
        import textarena

        own = textarena.ObservationType.PLAYER_ACTION
        names = _unwrapped(self._env).state.role_mapping
        return "\n".join(
            message if sender == textarena.GAME_ID else f"[{names.get(sender, sender)}] {message}"
            for sender, message, kind in news
            if not (sender == player and kind == own)  # it is in the conversation already
        )


def forfeited(loser: int, players: int) -> dict[int, float]:
    """Returns the rewards if one player gives up: as after an invalid move in TextArena."""
    others = 1.0 if players == 2 else 0.0
    return {player: _INVALID if player == loser else others for player in range(players)}


def check_game(game: str) -> None:
    from textarena.envs.registration import ENV_REGISTRY

    if game not in ENV_REGISTRY:
        near = difflib.get_close_matches(game, ENV_REGISTRY, n=3)
        raise NotFoundError(
            f"TextArena has no game {game!r}.",
            hint=f"Did you mean {' or '.join(near)}?" if near else "See textarena.ai/docs.",
        )


@functools.cache
def fewest_players(game: str, options: str) -> int:
    """The number that the game declares, or else the smallest that it accepts."""
    from textarena.envs.registration import ENV_REGISTRY

    declared = {**ENV_REGISTRY[game].kwargs, **json.loads(options)}.get("num_players")
    if declared is not None:
        return int(declared)
    refusals = []
    for players in range(1, _MOST_PLAYERS + 1):
        env = copy.deepcopy(_pristine(game, options))
        try:
            with _Apart(0).within():
                env.reset(num_players=players, seed=0)
        except Exception as error:  # noqa: BLE001 - games refuse by assertions and by falling over
            refusals.append(f"{players}: {type(error).__name__}: {str(error)[:100]}")
            continue
        return int(_unwrapped(env).state.num_players)
    raise ConfigError(
        f"{game} cannot be started with 1 to {_MOST_PLAYERS} players.", hint=refusals[-1]
    )


@functools.cache
def _pristine(game: str, options: str) -> Any:
    """Returns the game before its first reset; some take seconds to make."""
    import textarena

    try:
        with without_downloads(game), _Apart(0).within():
            return textarena.make(game, **json.loads(options))
    except SyntaxError as error:
        raise ConfigError(
            f"{game} cannot be imported with Python {sys.version.split()[0]}: {error}.",
            hint="This version of TextArena writes it for Python 3.12.",
        ) from error
    except (ImportError, OSError, TypeError, ValueError) as error:
        text = f"{game} cannot be made: {type(error).__name__}: {str(error)[:300]}"
        judged = "API key" in text
        raise ConfigError(
            text,
            hint="It calls a model of its own, outside of envserver's proxy: not supported."
            if judged
            else "--env.options are the arguments of the game's class.",
        ) from error


def _unwrapped(env: Any) -> Any:
    while hasattr(env, "env"):
        env = env.env
    return env


def _number(reward: Any) -> float:
    """Returns a reward; some games of 0.7.4 pass the reason of an invalid move in its place."""
    if isinstance(reward, str):
        return _INVALID
    number = float(reward)
    return number if math.isfinite(number) else _INVALID


class _Apart:
    """Random numbers of one game, apart from those of all others."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Within the block, Python's and NumPy's global random numbers are those of this object,
        and nothing is printed to standard output."""
        numpy = sys.modules.get("numpy")
        python_outside = random.getstate()
        numpy_outside = numpy.random.get_state() if numpy is not None else None
        random.setstate(self._python)
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)
        elif numpy is not None:
            numpy.random.seed(self._seed % 2**32)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            self._python = random.getstate()
            random.setstate(python_outside)
            if numpy is not None:
                self._numpy = numpy.random.get_state()
                numpy.random.set_state(numpy_outside)
