"""Publishes a model or a LoRA adapter to the Hugging Face hub; `upload` copies or pushes folders.

A `Plan` names each file that would be uploaded, with its size and sha256, and each that would not,
with the reason. Only files that loading or understanding a model needs are in it, never optimizer
states; a file that looks as if it had a secret in it ends the planning; a repository is private
unless the caller says otherwise. The hub library handles the token; it is never read or shown here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from envserver_records.errors import ConfigError, InputError, StoreError
from envserver_records.extras import install_command
from envserver_records.files import read_object, replacing_path, sha256_of, storing
from envserver_records.tasks import Json

_KIND = "envserver/"
"""Beginning of the data set type of our results."""
_BEGIN = "<!-- envserver: evaluation -->"
_END = "<!-- envserver: end of evaluation -->"
_SECTION = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)
_HEADER = re.compile(r"\A---\r?\n(.*?)^---[ \t]*\r?\n?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The evaluation of a model on one environment: tasks and attempts that count.

    `low` and `high` are the 95 % interval of the mean over tasks, None for one task.
    """

    environment: str
    split: str
    tasks: int
    attempts: int
    mean_reward: float
    low: float | None
    high: float | None
    pass_at: Mapping[int, float] = field(default_factory=dict)


def with_results(text: str, name: str, results: Sequence[Result]) -> str:
    header, body = split_card(text)
    others = [entry for entry in _entries(header) if not _is_ours(entry)]
    entries = [*others, *map(_entry, results)]
    header["model-index"] = [{"name": name, "results": entries}]
    body = _SECTION.sub("\n\n", body).rstrip("\n")
    return joined_card(header, f"{body}\n\n{_BEGIN}\n{_table(results)}{_END}\n")


def split_card(text: str) -> tuple[Json, str]:
    """Returns the header of a card, {} without one, and the text below."""
    found = _HEADER.match(text)
    if found is None:
        return {}, text
    try:
        header = yaml.safe_load(found[1]) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        raise InputError(f"README.md: its header is not YAML: {error}") from error
    if not isinstance(header, dict):
        raise InputError("README.md: its header must be a mapping.")
    return header, text[found.end() :]


def joined_card(header: Json, body: str) -> str:
    header_text = yaml.safe_dump(dict(header), sort_keys=False, allow_unicode=True)
    return f"---\n{header_text}---\n\n{body.lstrip(chr(10))}"


def _entries(header: Json) -> list[Any]:
    models = header.get("model-index")
    first = models[0] if isinstance(models, list) and models else {}
    found = first.get("results") if isinstance(first, dict) else None
    return found if isinstance(found, list) else []


def _is_ours(entry: Any) -> bool:
    data = entry.get("dataset") if isinstance(entry, dict) else None
    return isinstance(data, dict) and str(data.get("type", "")).startswith(_KIND)


def _entry(result: Result) -> Json:
    counted = {"tasks": result.tasks, "attempts": result.attempts}
    interval = {} if result.low is None else {"low": result.low, "high": result.high}
    metrics = [
        {
            "type": "mean_reward",
            "value": result.mean_reward,
            "name": "mean reward",
            "args": counted | interval,
        },
        *(
            {"type": f"pass@{k}", "value": value, "name": f"pass@{k}"}
            for k, value in result.pass_at.items()
        ),
    ]
    name = result.environment
    return {
        "task": {"type": "text-generation", "name": "Agent in an environment"},
        "dataset": {"type": f"{_KIND}{name}", "name": name, "split": result.split},
        "metrics": metrics,
    }


def _table(results: Sequence[Result]) -> str:
    lines = [
        "## Evaluation\n",
        "| environment | split | tasks | attempts | mean reward | 95 % interval | pass@k |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for result in results:
        interval = "" if result.low is None else f"{result.low:.3f} to {result.high:.3f}"
        passed = ", ".join(f"@{k} {value:.3f}" for k, value in result.pass_at.items())
        name = result.environment.replace("|", "\\|")
        counts = f"{result.split} | {result.tasks} | {result.attempts}"
        lines.append(f"| {name} | {counts} | {result.mean_reward:.3f} | {interval} | {passed} |")
    footnote = "\nMeasured by `envserver evaluate`; intervals resample tasks.\n"
    return "\n".join(lines) + "\n" + footnote


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (
    *("model.safetensors", "model-*-of-*.safetensors"),
    "adapter_model.safetensors",
)
_ALLOWED = (
    *_WEIGHTS,
    *("*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*"),
    *("additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json"),
    *("README.md", "LICENSE*", "NOTICE*", "merge.json", "training.json", "metrics.jsonl"),
)
_CARD = "README.md"
_BASE = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""A name on the hub; those of old models have no owner."""
_UNFINISHED = ".work"
_REASONS = (
    ("optimizer state", ("optimizer*", "scheduler*", "rng_state*", "trainer_state*", "*.distcp")),
    ("Python's pickles may run code", ("*.bin", "*.pt", "*.pth", "*.pkl")),
)
_SECRETS = {
    "a token of the Hugging Face hub": re.compile(rb"\bhf_[A-Za-z0-9]{30,}"),
    "a key of an API": re.compile(rb"\bsk-[A-Za-z0-9_-]{24,}"),
    "a key of AWS": re.compile(rb"\bAKIA[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50,})"),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY")
_LEAST_SECRET = 12
_BLOCK = 1 << 20


@dataclass(frozen=True)
class PlannedFile:
    """A file to upload: its path in the repository, and its content (a path, or changed bytes)."""

    name: str
    content: Path | bytes
    size: int
    sha256: str


@dataclass(frozen=True)
class Plan:
    """What would be published to OWNER/NAME; `left_out`: name -> reason."""

    repository: str
    files: Sequence[PlannedFile]
    left_out: Mapping[str, str]
    private: bool = True

    @property
    def card(self) -> str:
        [content] = [file.content for file in self.files if file.name == _CARD]
        assert isinstance(content, bytes)
        return content.decode()


def plan(
    folder: Path,
    repository: str,
    *,
    results: Sequence[Result] = (),
    base_model: str | None = None,
    license: str | None = None,
    private: bool = True,
) -> Plan:
    """Decides what would be published; reads all files, and changes none."""
    if not _NAME.fullmatch(repository):
        raise ConfigError(f"{repository!r} is not a name on the hub.", hint="Write OWNER/NAME.")
    names = [path.relative_to(folder).as_posix() for path in sorted(_files(folder))]
    kept = [name for name in names if _is_allowed(name)]
    _check_finished(folder, kept)
    changed = _changed(folder, repository, kept, results, base_model, license)
    files = [_planned(folder, name, changed.get(name)) for name in sorted({*kept, *changed})]
    left_out = {name: _reason(name) for name in names if name not in kept}
    return Plan(repository, files, left_out, private)


def publish(planned: Plan) -> str:
    hub = _library("huggingface_hub", "Publishing")
    api = hub.HfApi()
    name = planned.repository
    operations = [
        hub.CommitOperationAdd(
            file.name, file.content if isinstance(file.content, bytes) else str(file.content)
        )
        for file in planned.files
    ]
    try:
        api.create_repo(name, repo_type="model", private=planned.private, exist_ok=True)
        is_private = api.model_info(name).private
    except Exception as error:
        raise _refused(f"{name} cannot be published", error) from error
    if planned.private and not is_private:
        raise ConfigError(
            f"{name} exists on the hub and is public: nothing was uploaded.",
            hint="Publish with --public, or under another name.",
        )
    try:
        done = api.create_commit(
            name, operations, commit_message="Model uploaded by envserver", repo_type="model"
        )
    except Exception as error:
        raise _refused(f"{name} cannot be published", error) from error
    return str(done.commit_url)


def _files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder.")
    for path in folder.rglob("*"):
        if path.is_file():
            if not path.resolve().is_relative_to(folder.resolve()):
                raise InputError(
                    f"{path} is a link to {path.resolve()}, outside the folder.",
                    hint="Copy the file into the folder if it is to be published, or remove it.",
                )
            yield path


def _is_allowed(name: str) -> bool:
    below = "/" in name
    return any(
        fnmatch.fnmatchcase(name, pattern) for pattern in _ALLOWED if ("/" in pattern) == below
    )


def _reason(name: str) -> str:
    last = name.rpartition("/")[2]
    for reason, patterns in _REASONS:
        if any(fnmatch.fnmatchcase(last, pattern) for pattern in patterns):
            return reason
    return "in a subfolder" if "/" in name else "not part of a model"


def _check_finished(folder: Path, names: Sequence[str]) -> None:
    if (folder / _UNFINISHED).exists():
        raise InputError(
            f"{folder} holds an unfinished training.",
            hint="Finish it with the command that started it.",
        )
    weights = [
        name for name in names if any(fnmatch.fnmatchcase(name, weight) for weight in _WEIGHTS)
    ]
    described = "adapter_config.json" in names or "config.json" in names
    if not weights or not described:
        raise InputError(
            f"{folder} is neither a model nor an adapter: it needs config.json or "
            "adapter_config.json, and weights as safetensors.",
            hint="Name the folder that a training or `envserver merge` wrote.",
        )
    for name in names:
        if name.endswith(".index.json"):
            shards = read_object(folder / name).get("weight_map")
            if not isinstance(shards, dict):
                raise InputError(f"{folder / name} has no weight_map.")
            if missing := sorted({str(shard) for shard in shards.values()} - set(names)):
                raise InputError(f"{folder / name} names {missing[0]}, which is missing.")


def _changed(
    folder: Path,
    repository: str,
    names: Sequence[str],
    results: Sequence[Result],
    base_model: str | None,
    license: str | None,
) -> dict[str, bytes]:
    """Returns the card, and configs that name a folder of this machine, as they are uploaded."""
    made: dict[str, bytes] = {}
    for name, key in (
        ("config.json", "_name_or_path"),
        ("adapter_config.json", "base_model_name_or_path"),
    ):
        if name not in names:
            continue
        config = read_object(folder / name)
        base_name = config.get(key)
        if key == "base_model_name_or_path" and base_model is not None:
            config[key] = base_model
        elif isinstance(base_name, str) and _is_here(base_name):
            if key != "_name_or_path":
                raise InputError(
                    f"{folder / name} names a folder of this machine as the base: {base_name}.",
                    hint="Name the base on the hub: --base_model OWNER/NAME.",
                )
            del config[key]
        if config.get(key) != base_name:
            made[name] = (json.dumps(config, indent=2) + "\n").encode()
    card = folder / _CARD
    text = _read(card) if card.is_file() else f"# {repository}\n"
    header, body = split_card(text)
    header |= {
        key: value
        for key, value in (("base_model", base_model), ("license", license))
        if value is not None
    }
    bases = header.get("base_model")
    for base in bases if isinstance(bases, list) else [bases]:
        if isinstance(base, str) and _is_here(base):
            raise InputError(
                f"{card} names a folder of this machine as the base: {base}.",
                hint="Name the base on the hub: --base_model OWNER/NAME.",
            )
    text = joined_card(header, body)
    if results:
        text = with_results(text, repository.partition("/")[2], results)
    return {**made, _CARD: text.encode()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error


def _is_here(name: str) -> bool:
    return not _BASE.fullmatch(name) or Path(name).is_dir()


def _planned(folder: Path, name: str, content: bytes | None) -> PlannedFile:
    path = folder / name
    if content is not None:
        _check_secrets(content, path)
        return PlannedFile(name, content, len(content), hashlib.sha256(content).hexdigest())
    if name.endswith(".safetensors"):
        _check_secrets(_safetensors_header(path), path)
    else:
        _check_secrets(path.read_bytes(), path)
    return PlannedFile(name, path, path.stat().st_size, sha256_of(path))


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, 100 * _BLOCK))


def _check_secrets(content: bytes, path: Path) -> None:
    found = [what for what, pattern in _SECRETS.items() if pattern.search(content)]
    found += [
        f"the value of ${name}"
        for name, value in os.environ.items()
        if _SECRET_NAMES.search(name.upper())
        and len(value) >= _LEAST_SECRET
        and value.encode() in content
    ]
    if found:
        raise InputError(
            f"{path} seems to contain {found[0]}: nothing was uploaded.",
            hint="Remove it from the file, and revoke it if the file was ever shared.",
        )


# Targets: a path; any URL that fsspec knows (`gs://bucket/prefix`, `s3://...`, `memory://...`); a
# data set on the hub (`hf://datasets/owner/name`, or with a folder after it), in one commit. The
# file that describes the folder goes last: where it is, everything is. The hub library handles the
# token (HF_TOKEN, or the one of `hf auth login`); it is never read, written or shown here.

HUB = "hf://"
_LAST = ("SUMMARY.json", "summary.json")
OnProgress = Callable[[str], None]
"""Called with the address of each uploaded file."""


def upload(
    folder: Path, target: str, *, on_progress: OnProgress = lambda address: None
) -> list[str]:
    """Copies all files to `target`, replacing those of the same names; returns their addresses."""
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: (path.name in _LAST, str(path)),
    )
    if target.startswith(HUB):
        addresses = _to_hub(folder, files, target)
        for address in addresses:
            on_progress(address)
        return addresses
    if "://" not in target:
        return _to_folder(folder, files, Path(target), on_progress)
    return _to_url(folder, files, target, on_progress)


def check_target(target: str) -> None:
    if target.startswith(HUB):
        _data_set(target)
        _library("huggingface_hub", f"Uploading to {target}")
    elif "://" in target:
        _file_system(target)


def _to_folder(folder: Path, files: list[Path], target: Path, on_progress: OnProgress) -> list[str]:
    if target.exists() and target.resolve() == folder.resolve():
        raise ConfigError(f"{target} is where the data was written.", hint="Leave --upload out.")
    addresses = []
    with storing(target):
        for path in files:
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing_path(place, sync=False) as partial:
                shutil.copyfile(path, partial)
            addresses.append(str(place))
            on_progress(addresses[-1])
    return addresses


def _to_url(folder: Path, files: list[Path], target: str, on_progress: OnProgress) -> list[str]:
    system, root = _file_system(target)
    addresses = []
    for path in files:
        place = "/".join([root.rstrip("/"), *path.relative_to(folder).parts])
        try:
            system.makedirs(place.rpartition("/")[0], exist_ok=True)
            system.put_file(str(path), place)
        except Exception as error:
            raise _refused(f"{target} cannot be written", error) from error
        addresses.append(str(system.unstrip_protocol(place)))
        on_progress(addresses[-1])
    return addresses


def _file_system(target: str) -> tuple[Any, str]:
    fsspec = _library("fsspec.core", f"Uploading to {target}")
    try:
        system, root = fsspec.url_to_fs(target)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{target} cannot be used: {error}") from error
    return system, root


def _to_hub(folder: Path, files: list[Path], target: str) -> list[str]:
    name, below = _data_set(target)
    api = _library("huggingface_hub", f"Uploading to {target}").HfApi()
    try:
        api.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            repo_type="dataset",
            folder_path=str(folder),
            path_in_repo=below or None,
            commit_message="Data written by envserver",
        )
    except Exception as error:
        raise _refused(f"{target} cannot be written", error) from error
    root = f"{HUB}datasets/{name}" + (f"/{below}" if below else "")
    return [f"{root}/{path.relative_to(folder).as_posix()}" for path in files]


def _data_set(target: str) -> tuple[str, str]:
    parts = target.removeprefix(HUB).strip("/").split("/")
    if parts[0] != "datasets" or len(parts) < 3:
        raise ConfigError(f"{target} is not a data set.", hint="hf://datasets/OWNER/NAME[/FOLDER]")
    return "/".join(parts[1:3]), "/".join(parts[3:])


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs {library}, which cannot be imported: {error}.",
            hint=install_command("data"),
        ) from error


def _refused(what: str, error: Exception) -> StoreError:
    reason = " ".join(str(error).split())[:300]
    return StoreError(f"{what}: {type(error).__name__}: {reason}")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--push_to_hub: {name!r} is not a name of a data set.", hint="Write OWNER/NAME."
        )
    check_target(_target(name))


def push(folder: Path, name: str) -> str:
    """Uploads `folder` in one commit to a data set, private if it is new; returns its address."""
    upload(folder, _target(name))
    return _target(name)


def _target(name: str) -> str:
    return f"{HUB}datasets/{name}"
