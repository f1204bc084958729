"""Fetches GAIA to a local copy: `python -m envserver_environments.gaia.download [--output-dir
DIR]`.

The data set is gated: its authors admit people with a login (`hf auth login` or HF_TOKEN) who agree
not to spread it, so none of it ships here. At the end files are compared with the hub's record.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_records.extras import install_command

from envserver import ConfigError, EnvserverError

from .loading import DEFAULT_COPY, YEAR, GaiaQuestion, read_copy

PATTERNS = (f"{YEAR}/*",)


@dataclass(frozen=True)
class Source:
    """A data set on the hub, and the revision that is known to work."""

    repo: str
    revision: str


ANNOTATED = Source("smolagents/GAIA-annotated", "main")
RAW = Source("gaia-benchmark/GAIA", "682dd723ee1e1697e00360edccf2366dc8418dd9")


def fetch(source: Source, folder: Path, *, endpoint: str | None = None) -> int:
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ConfigError(
            "Fetching needs the library huggingface_hub.", hint=install_command("gaia")
        ) from error
    try:
        expected = _expected(hub, source, endpoint)
        for _ in range(2):
            hub.snapshot_download(
                source.repo,
                repo_type="dataset",
                revision=source.revision,
                local_dir=folder,
                allow_patterns=list(PATTERNS),
                endpoint=endpoint,
            )
            wrong = [name for name, facts in expected.items() if not facts.fit(folder / name)]
            if not wrong:
                return len(expected)
            for name in wrong:
                (folder / name).unlink(missing_ok=True)
    except Exception as error:
        raise _explained(error, source) from error
    raise ConfigError(
        f"{len(wrong)} files are not as the hub says: {', '.join(wrong[:5])}.",
        hint="Run it again; is the disk full?",
    )


@dataclass(frozen=True)
class _Facts:
    """The hub's record of a file; it knows the digests of large ones only."""

    size: int | None
    sha256: str | None

    def fit(self, file: Path) -> bool:
        if not file.is_file():
            return False
        if self.size is not None and file.stat().st_size != self.size:
            return False
        if self.sha256 is None:
            return True
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest() == self.sha256


def _expected(hub: Any, source: Source, endpoint: str | None) -> dict[str, _Facts]:
    api = hub.HfApi(endpoint=endpoint)
    info = api.dataset_info(source.repo, revision=source.revision, files_metadata=True)
    return {
        file.rfilename: _Facts(file.size, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings
        if file.rfilename.startswith(f"{YEAR}/")
    }


def _explained(error: Exception, source: Source) -> EnvserverError:
    from huggingface_hub import errors

    page = f"https://huggingface.co/datasets/{source.repo}"
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    match error:
        case EnvserverError():
            return error
        case errors.GatedRepoError():
            return ConfigError(
                f"You have no access to {source.repo}.",
                hint=f"Agree to its terms at {page}, and {log_in}. Then run this again.",
            )
        case errors.RevisionNotFoundError():
            return ConfigError(f"{source.repo} has no revision {source.revision!r}.")
        case errors.RepositoryNotFoundError():
            return ConfigError(
                f"{source.repo} does not exist, or you have no access to it.",
                hint=f"Look at {page}, and {log_in}.",
            )
        case errors.OfflineModeIsEnabled():
            return ConfigError(
                "HF_HUB_OFFLINE forbids fetching.", hint="Unset it, or copy a folder by hand."
            )
        case OSError() if error.errno is not None and not isinstance(error, ConnectionError):
            return ConfigError(f"The files cannot be written: {error}")
    return ConfigError(
        f"The hub did not give the files: {type(error).__name__}: {str(error)[:300]}",
        hint="Fetched files are kept: run it again to continue.",
    )


def summary(folder: Path) -> str:
    levels: Counter[int] = Counter()
    refused: Counter[str] = Counter()
    attachments = 0
    for _, found in read_copy(folder, "validation"):
        if isinstance(found, GaiaQuestion):
            levels[found.level] += 1
            attachments += found.attachment is not None
        else:
            refused[found] += 1
    if not levels:
        raise ConfigError(f"{folder} has no task with an answer: {dict(refused)}.")
    parts = ", ".join(f"{levels[level]} of level {level}" for level in sorted(levels))
    lost = "".join(f"\n{count} rows of no use: {why}" for why, count in refused.items())
    return f"{levels.total()} tasks with answers ({parts}), {attachments} with a file{lost}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envserver_environments.gaia.download",
        description="Fetches GAIA, with your login.",
    )
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_COPY, help="default: data/gaia")
    parser.add_argument("--use-raw", action="store_true", help=f"{RAW.repo}, not {ANNOTATED.repo}")
    parser.add_argument("--revision", help="another revision than the one that is known to work")
    parser.add_argument("--endpoint", help="address of another hub")
    options = parser.parse_args(arguments)
    source = RAW if options.use_raw else ANNOTATED
    if options.revision:
        source = Source(source.repo, options.revision)
    try:
        count = fetch(source, options.output_dir, endpoint=options.endpoint)
        counts = summary(options.output_dir)
    except EnvserverError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    sys.stdout.write(
        f"{count} files of {source.repo} are in {options.output_dir} as the hub has them: "
        f"{counts}.\n"
        "They are for evaluation: do not pass them on, and do not train on them.\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
