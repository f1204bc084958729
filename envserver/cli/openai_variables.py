"""The variables that OpenAI's own clients read, as the weakest source of the engine's settings.

`OPENAI_BASE_URL`, `OPENAI_MODEL` and `OPENAI_API_KEY`, exported or in `.env`, stand for
`openai.base_url`, `openai.model_name` and `openai.api_key` where no other source gives these.
Where text is enough, a key without any address is a key of OpenAI: its address is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from envserver_records.urls import TOKEN_VARIABLE

from ..config import NO_ENGINE
from ..telemetry.redaction import redacted
from .renamed import current_path
from .sources import Given, read_dotenv_values

PATHS = {
    "OPENAI_BASE_URL": "openai.base_url",
    "OPENAI_MODEL": "openai.model_name",
    "OPENAI_API_KEY": "openai.api_key",
}
OPENAI_URL = "https://api.openai.com/v1"
OPENAI_MODEL = "gpt-4o-mini"
"""Model that is asked at OpenAI's address where none is named."""
_READ_ELSEWHERE = ("HF_TOKEN", "TAVILY_API_KEY", TOKEN_VARIABLE)


def engine_variables(
    stronger: Sequence[Given],
    environ: Mapping[str, str],
    folder: Path,
    tell: Callable[[str], None],
    *,
    alone: bool,
) -> list[Given]:
    """Returns what the variables say of the engine; says in one line which are used.

    The key goes only to an engine that the user names: nothing is returned if envserver starts the
    engine (`model`) or engines register (`openai.base_url` none), and no key without an address
    unless `alone`.

    Args:
        stronger: what all other sources give.
        environ: environment variables, which override those of `.env`.
        folder: folder of `.env`.
        alone: whether a key alone names OpenAI's address.
    """
    given = {current_path(one.path, PATHS.values()): one.value for one in stronger}
    if given.get("model") or given.get("openai.base_url", OPENAI_URL) in ("", NO_ENGINE):
        return []
    values = {**read_dotenv_values(folder / ".env", PATHS), **environ}
    found = [
        Given(path, values[name], name, "variable")
        for name, path in PATHS.items()
        if values.get(name) and path not in given
    ]
    known = {**{one.path: one.value for one in found}, **given}
    url = known.get("openai.base_url")
    if url is None and not alone:
        found = [one for one in found if one.origin != "OPENAI_API_KEY"]
    used = [one.origin for one in found]
    if url is None and "OPENAI_API_KEY" in used:
        url = OPENAI_URL
        found.append(Given("openai.base_url", url, "OPENAI_API_KEY", "variable"))
    if used and isinstance(url, str) and urlsplit(url).hostname == urlsplit(OPENAI_URL).hostname:
        found += [
            Given(path, value, used[0], "variable")
            for path, value in (
                ("openai.server_type", "openai"),
                ("openai.model_name", OPENAI_MODEL),
            )
            if path not in known
        ]
        known.setdefault("openai.model_name", OPENAI_MODEL)
    if used:
        model = known.get("openai.model_name")
        engine = " and ".join(
            f"--{path} {value}"
            for path, value in (("openai.base_url", url), ("openai.model_name", model))
            if value
        )
        tell(redacted(f"{', '.join(used)} {'is' if len(used) == 1 else 'are'} used: {engine}."))
    return found


def export_dotenv(
    folder: Path, environ: MutableMapping[str, str], tell: Callable[[str], None]
) -> None:
    """Sets the tokens of services that `.env` holds and the environment lacks: their clients look
    for them there."""
    values = read_dotenv_values(folder / ".env", _READ_ELSEWHERE)
    new = {name: value for name, value in values.items() if value and name not in environ}
    environ.update(new)
    if new:
        tell(f"{', '.join(sorted(new))} of .env {'is' if len(new) == 1 else 'are'} used.")
