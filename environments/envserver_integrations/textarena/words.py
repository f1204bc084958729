"""NLTK's word lists, which TextArena's word games download when they are imported.

What always holds: a rollout downloads nothing. `envserver env install` does, into the virtual
environment; without the lists a game is refused with a message that says how to get them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from envserver import ConfigError

WORD_GAMES = (
    "Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee",
    "WordChains", "WordLadder", "WordSearch", "Wordle",
)  # fmt: skip
RESOURCES = {
    "words": "corpora/words",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
}


def download_program() -> str:
    """Returns a program that downloads the lists that are missing into the virtual environment
    that runs it."""
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
