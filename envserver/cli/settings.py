"""Turns flags, variables and files into the values of settings: old names, unknown names,
the variables of OpenAI's clients. `command_line` reads the sources and validates the result.

All mistakes are reported in one ConfigError, one line each, with the flag, variable or file:line
and the nearest valid name. It never contains the values of secrets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from envserver_records.errors import ConfigError
from envserver_records.http_errors import TOKEN_VARIABLE
from pydantic import BaseModel

from ..running.options import ANY_NAME, Option, config_error, nearest, options_of
from ..settings.config import NO_ENGINE, Settings
from ..telemetry.redaction import redacted
from .sources import (
    VARIABLE_PREFIX,
    Given,
    as_list,
    read_dotenv,
    read_dotenv_values,
    read_variables,
)

if TYPE_CHECKING:
    from .yaml_file import YamlFile


def to_stderr(line: str) -> None:
    print(f"envserver: {line}", file=sys.stderr)


def once(warn: Callable[[str], None]) -> Callable[[str], None]:
    seen: set[str] = set()

    def warn_once(line: str) -> None:
        if line not in seen:
            seen.add(line)
            warn(line)

    return warn_once


@dataclass(frozen=True)
class Sources:
    """The values from the command line, `.env`, variables and the file of --config."""

    flags: list[Given]
    variables: list[Given]
    file: YamlFile | None

    @classmethod
    def of(cls, flags: Sequence[Given], environ: Mapping[str, str], folder: Path) -> Sources:
        files = [given.value for given in flags if given.path == "config"]
        if len(files) > 1:
            raise ConfigError("--config is given twice.", hint="Put everything into one file.")
        file = None
        if files:
            if not files[0]:
                raise ConfigError("--config needs a value: the path of a YAML file.")
            from .yaml_file import YamlFile

            file = YamlFile(Path(files[0]))
        variables = [*read_dotenv(folder / ".env"), *read_variables(environ)]
        return cls([given for given in flags if given.path != "config"], variables, file)

    def in_file(self, options: Mapping[str, Option]) -> list[Given]:
        """Returns the values in the file; `options` decides which mappings are sections."""
        return [] if self.file is None else self.file.read(options)

    def environment(self, options: Mapping[str, Option]) -> str | None:
        all_given = [*self.in_file(options), *self.variables, *self.flags]
        named = [given for given in all_given if given.path == "environment"]
        flags = [str(given.value) for given in named if given.kind == "flag"]
        if len(flags) > 1:
            raise ConfigError(
                f"--env is given twice ({' and '.join(flags)}).",
                hint="For several, use --env math=2,code=1.",
            )
        if not named:
            return None
        last = named[-1]
        if not isinstance(last.value, str) or not last.value:
            raise ConfigError(
                f"{last.where} needs a value: the name of an environment or a .py file.",
                hint="`envserver list` shows the names.",
            )
        return last.value


def chosen_values(
    all_given: Iterable[Given],
    options: Mapping[str, Option],
    settings_class: type[BaseModel],
    warn: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values from the strongest source of each option, and where each was given.
    `all_given`: from the weakest source to the strongest; several only of repeated flags count."""
    chosen: dict[str, list[Given]] = {}
    problems: list[str] = []
    for given in all_given:
        path = given.path if given.path in options else EQUIVALENTS.get(given.path, given.path)
        if path in options:
            before = chosen.get(path, [])
            repeated = given.kind == "flag" and bool(before) and before[0].kind == "flag"
            chosen[path] = [*before, given] if repeated else [given]
        elif path in REFUSED:
            if str(given.value).lower() not in ("false", "0", "no", "off"):
                problems.append(f"{given.where} is not supported. {REFUSED[path]}")
        elif path in IGNORED:
            warn(f"{given.where} has no effect here: {IGNORED[path]}.")
        elif given.kind == "flag" or not _is_for_another(path, settings_class):
            problems.append(_unknown(given, path, options))
    values: dict[str, Any] = {}
    for path, several in chosen.items():
        try:
            parsed = [given.parsed(options[path]) for given in several]
        except ValueError as error:
            problems.append(f"{several[-1].where}: {error}.")
            continue
        is_joined = options[path].is_list and len(parsed) > 1
        values[path] = (
            [item for part in parsed for item in as_list(part)] if is_joined else parsed[-1]
        )
    if problems:
        raise config_error(problems)
    return values, {path: several[-1].where for path, several in chosen.items()}


def _is_for_another(path: str, settings_class: type[BaseModel]) -> bool:
    from ..running.run_settings import JoinSettings

    if path.startswith("env.") and "env" not in settings_class.model_fields:
        return True
    return path in options_of(JoinSettings)


def _unknown(given: Given, path: str, options: Mapping[str, Option]) -> str:
    members = [known for known in options if known.startswith(f"{path}.")]
    if members:
        return f"{given.where} is a group of settings: try {_spelled(members[0], given)}."
    if path in options_of(Settings):
        return f"{given.where} has no meaning for this command."
    sections = {option.group for option in options.values()} if given.kind == "file" else set()
    near = nearest(path, [*options, *sorted(sections - {""})])
    tail = f" Did you mean {_spelled(near, given)}?" if near else " See --help all."
    return f"{given.where}: there is no such setting.{tail}"


def _spelled(path: str, like: Given) -> str:
    path = path.replace(f".{ANY_NAME}", ".NAME")
    if like.kind == "flag":
        return f"--{'env' if path == 'environment' else path}"
    if like.kind == "variable":
        return VARIABLE_PREFIX + path.replace(".", "__").upper()
    return path


# The variables that OpenAI's own clients read, exported or in `.env`: the weakest source of the
# engine's settings.
_URL, _MODEL, _KEY = "openai.base_url", "openai.model_name", "openai.api_key"
OPENAI_PATHS = {"OPENAI_BASE_URL": _URL, "OPENAI_MODEL": _MODEL, "OPENAI_API_KEY": _KEY}
OPENAI_URL = "https://api.openai.com/v1"
OPENAI_MODEL = "gpt-4o-mini"
_READ_ELSEWHERE = ("HF_TOKEN", "TAVILY_API_KEY", TOKEN_VARIABLE)


def engine_variables(
    stronger: Sequence[Given],
    environ: Mapping[str, str],
    folder: Path,
    warn: Callable[[str], None],
    *,
    alone: bool,
) -> list[Given]:
    """Returns what the variables say of the engine; says in one line which are used.

    The key goes only to an engine that the user names: nothing is returned if envserver starts the
    engine (`model`) or engines register (`openai.base_url` none), and no key without an address
    unless `alone` (a key alone names OpenAI's address). `stronger`: what all other sources give.
    """
    given = {EQUIVALENTS.get(flag.path, flag.path): flag.value for flag in stronger}
    if given.get("model") or given.get(_URL, OPENAI_URL) in ("", NO_ENGINE):
        return []
    texts = {**read_dotenv_values(folder / ".env", OPENAI_PATHS), **environ}
    found = {
        path: Given(path, texts[name], name, "variable")
        for name, path in OPENAI_PATHS.items()
        if texts.get(name) and path not in given
    }
    if _KEY in found and _URL not in {**found, **given}:
        if alone:
            found[_URL] = Given(_URL, OPENAI_URL, "OPENAI_API_KEY", "variable")
        else:
            del found[_KEY]
    if not found:
        return []
    used = [*dict.fromkeys(value.origin for value in found.values())]
    known = {path: value.value for path, value in found.items()} | given
    url = known.get(_URL)
    if isinstance(url, str) and urlsplit(url).hostname == urlsplit(OPENAI_URL).hostname:
        for path, value in (("openai.server_type", "openai"), (_MODEL, OPENAI_MODEL)):
            if path not in known:
                found[path] = Given(path, value, used[0], "variable")
        known.setdefault(_MODEL, OPENAI_MODEL)
    engine = " and ".join(f"--{path} {known[path]}" for path in (_URL, _MODEL) if known.get(path))
    warn(redacted(f"{', '.join(used)} {'is' if len(used) == 1 else 'are'} used: {engine}."))
    return [*found.values()]


def export_dotenv(
    folder: Path, environ: MutableMapping[str, str], warn: Callable[[str], None]
) -> None:
    """Sets the tokens of services that `.env` holds and the environment lacks: their clients look
    for them there."""
    values = read_dotenv_values(folder / ".env", _READ_ELSEWHERE)
    new = {name: value for name, value in values.items() if value and name not in environ}
    environ.update(new)
    if new:
        warn(f"{', '.join(sorted(new))} of .env {'is' if len(new) == 1 else 'are'} used.")


# Command lines and YAML files written for Atropos work. These are the fields of `BaseEnvConfig`,
# `APIServerConfig` and `ServerManagerConfig` of atroposlib 0.4.0 with another meaning, or none,
# here; a setting of the environment with the same name takes precedence.
EQUIVALENTS: dict[str, str] = {
    "api_key": "openai.api_key",
    "out_dir": "out",
    "env.max_batches_offpolicy": "rollouts.max_batches_offpolicy",
    "env.max_concurrent_processes": "workers.dedicated",
    "env.process_timeout": "env.worker_timeout",
    "env.dataset_path": "env.data_path",
    "env.agent_verbosity": "env.verbosity",
}

# Accepted, with a warning that says what replaces it.
_IGNORED = {
    "`--track wandb` sends them to Weights & Biases": "env.use_wandb env.wandb_name",
    "metrics are served at /metrics and shown while a command runs": """
        env.num_rollouts_to_keep env.num_rollouts_per_group_for_logging
        env.min_items_sent_before_logging""",
    "token ids come from the engine, so no tokenizer is needed": """
        env.tokenizer_name openai.tokenizer_name""",
    "`envserver serve` is the server itself; see --server.port": "env.rollout_server_url",
    "the trainer sets its batch size when it registers": "env.batch_size",
    "one environment runs at a time": "env.inference_weight env.min_batch_allocation",
    "see --rollouts.max_concurrent": "env.max_num_workers env.max_num_workers_per_node",
    "training and evaluation are separate commands": """
        env.max_eval_workers env.steps_per_eval env.eval_handling env.eval_limit_ratio
        env.data_dir_to_save_evals openai.num_requests_for_eval""",
    "agents may use any API": "env.use_chat_completion",
    "the environment decides what counts; see --env.rubric.*": """
        env.scoring_strategy env.length_penalty_weight env.debug_scoring""",
    "each agent's trace is in its trajectory": "env.save_full_traces",
    "prompts belong to the environment; see its own --env.* settings": """
        env.thinking_mode env.reasoning_effort env.max_reasoning_tokens
        env.custom_thinking_prompt""",
    "it was never used": "openai.rolling_buffer_length",
    "each rollout requests one completion at a time": "openai.n_kwarg_is_ignored max_n_completions",
    "engine health is judged by its answers": "openai.health_check",
    "rows are written as their groups finish": "tasks_per_step",
    "the recording proxy is part of the server": "proxy_url",
}
IGNORED = {path: why for why, paths in _IGNORED.items() for path in paths.split()}

# Errors unless switched off.
REFUSED: dict[str, str] = {
    "slurm": "Give the engines' addresses: --openai.base_url http://a:8000/v1,http://b:8000/v1",
    "api_url": "Rollouts are made here; `atropos-sft-gen` fetches them from a server.",
    "testing": "Use the simulated engine: --model sim",
}
