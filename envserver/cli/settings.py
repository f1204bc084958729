"""Reads flags, variables and files into validated settings.

Sources, from lowest to highest precedence: defaults, `--config run.yaml`, `.env`, environment
variables, flags. In the result `env` has the type of the environment's own `Config` and
`environment` its reference. All mistakes are reported in one ConfigError, one line each, with the
flag, variable or file:line and the nearest valid name. It never contains the values of secrets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from envserver_records.errors import ConfigError
from envserver_records.http_errors import TOKEN_VARIABLE
from pydantic import BaseModel

from ..running.options import (
    ANY_NAME,
    Option,
    config_error,
    expanded,
    flatten,
    named_sections,
    nearest,
    options_of,
    parse,
    validated,
    with_environment,
)
from ..settings.config import NO_ENGINE, Settings
from ..settings.section import EnvironmentConfig, Section
from ..telemetry.redaction import redacted
from .sources import (
    VARIABLE_PREFIX,
    ConfigFile,
    Given,
    argument_name,
    as_list,
    read_dotenv,
    read_dotenv_values,
    read_flags,
    read_variables,
)

S = TypeVar("S", bound=Section)


def to_stderr(line: str) -> None:
    print(f"envserver: {line}", file=sys.stderr)


def once(warn: Callable[[str], None]) -> Callable[[str], None]:
    seen: set[str] = set()

    def warn_once(line: str) -> None:
        if line not in seen:
            seen.add(line)
            warn(line)

    return warn_once


def config_file(path: Path | None) -> ConfigFile:
    if path is None:
        return ConfigFile()
    from .yaml_file import YamlFile

    return YamlFile(path)


def load_settings(
    command_line: Sequence[str],
    *,
    settings_class: type[S] = Settings,  # type: ignore[assignment]
    config_class: type[EnvironmentConfig] | None = None,
    environment: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    warn: Callable[[str], None] = to_stderr,
    over_file: tuple[str, Mapping[str, Any]] = ("", {}),
    openai_variables: Literal["no", "engine", "openai"] = "no",
) -> S:
    """Reads the settings of one command from all sources.

    Args:
        settings_class: a section that lacks settings ignores them in files and variables.
        config_class: the environment's Config; unset: the Config of the given environment.
        environment: the environment, which overrides the sources.
        defaults: a tree of values that every source overrides.
        over_file: a place in a file and its tree of values, which override the rest of the file.
        openai_variables: see `CommandSpec`.
        warn: called with one line for each name that is old, or has no effect.
    """
    read = partial(read_flags, aliases=aliases, arguments=arguments)
    flags, file, variables = _sources(
        read(command_line, _basic_options(settings_class)), environ, folder or Path()
    )
    model = settings_class
    if "env" in settings_class.model_fields:
        basic = _basic_options(settings_class)
        reference = environment or _environment([*file.read(basic), *variables, *flags])
        if config_class is not None or reference is not None:
            model = with_environment(settings_class, reference or "", config_class)
    options = options_of(model)
    origin, tree = over_file
    over = [
        Given(path, value, origin, "file", is_text=False)
        for path, value in flatten(tree, options).items()
    ]
    names = [given.path.removeprefix("no_") for given in (*over, *variables, *flags)]
    names += [name for section in named_sections(options) for name in file.names_in(section)]
    options = expanded(options, names)
    flags = [given for given in read(command_line, options) if given.path != "config"]
    if environment is not None:
        flags = [given for given in flags if given.path != "environment"]
        flags.append(Given("environment", environment, "--env", "flag"))
    from_file = file.read(options_of(Settings) | options)

    problems: list[str] = []
    given = [*from_file, *over, *variables, *flags]
    if openai_variables != "no":
        environ = os.environ if environ is None else environ
        alone = openai_variables == "openai"
        given = [*engine_variables(given, environ, folder or Path(), warn, alone=alone), *given]
    chosen = _choose(given, options, settings_class, warn, problems)
    parsed = _parsed(chosen, options, problems)
    if problems:
        raise config_error(problems)

    def where(path: str) -> str:
        if path in chosen:
            return chosen[path][-1].where
        return argument_name(path) if path in arguments else f"--{path}"

    return validated(model, parsed, options, where, defaults)


def named_environment(flags: Sequence[Given]) -> str | None:
    flags, file, variables = _sources(flags, None, Path())
    return _environment([*file.read(options_of(Settings)), *variables, *flags])


def _basic_options(settings_class: type[BaseModel]) -> dict[str, Option]:
    return options_of(Settings) | options_of(settings_class)


def _sources(
    flags: Sequence[Given], environ: Mapping[str, str] | None, folder: Path
) -> tuple[list[Given], ConfigFile, list[Given]]:
    named = [given for given in flags if given.path == "config"]
    if len(named) > 1:
        raise ConfigError("--config is given twice.", hint="Put everything into one file.")
    if named and not named[0].value:
        raise ConfigError("--config needs a value: the path of a YAML file.")
    file = config_file(Path(named[0].value) if named else None)
    variables = read_dotenv(folder / ".env")
    variables += read_variables(os.environ if environ is None else environ)
    return [given for given in flags if given.path != "config"], file, variables


def _environment(given: Iterable[Given]) -> str | None:
    named = [one for one in given if one.path == "environment"]
    flags = [one for one in named if one.kind == "flag"]
    if len(flags) > 1:
        values = " and ".join(str(one.value) for one in flags)
        raise ConfigError(
            f"--env is given twice ({values}).", hint="For several, use --env math=2,code=1."
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


def _choose(
    all_given: Iterable[Given],
    options: Mapping[str, Option],
    settings_class: type[BaseModel],
    warn: Callable[[str], None],
    problems: list[str],
) -> dict[str, list[Given]]:
    """Returns the values of each option from its strongest source; several only of repeated
    flags."""
    others = options_of(Settings)
    chosen: dict[str, list[Given]] = {}
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
            problems.append(_unknown(given, path, options, others))
    return chosen


def _is_for_another(path: str, settings_class: type[BaseModel]) -> bool:
    from ..running.run_settings import JoinSettings

    if path.startswith("env.") and "env" not in settings_class.model_fields:
        return True
    return path in options_of(JoinSettings)


def _unknown(
    given: Given, path: str, options: Mapping[str, Option], others: Mapping[str, Option]
) -> str:
    members = [known for known in options if known.startswith(f"{path}.")]
    if members:
        return f"{given.where} is a group of settings: try {_spelled(members[0], given)}."
    if path in others:
        return f"{given.where} has no meaning for this command."
    sections = {known.rpartition(".")[0] for known in options} if given.kind == "file" else set()
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


def _parsed(
    chosen: Mapping[str, list[Given]], options: Mapping[str, Option], problems: list[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, given in chosen.items():
        option = options[path]
        try:
            parsed = [_parsed_one(one, option) for one in given]
        except ValueError as error:
            problems.append(f"{given[-1].where}: {error}.")
            continue
        if option.is_list and len(parsed) > 1:
            values[path] = [item for one in parsed for item in as_list(one)]
        else:
            values[path] = parsed[-1]
    return values


def _parsed_one(given: Given, option: Option) -> Any:
    if not given.is_text:
        return given.value
    if given.value is None:
        if option.is_bool:
            return True
        raise ValueError(f"a value is needed ({option.type_name})")
    return parse(option, given.value)


# The variables that OpenAI's own clients read, exported or in `.env`: the weakest source of the
# engine's settings.
OPENAI_PATHS = {
    "OPENAI_BASE_URL": "openai.base_url",
    "OPENAI_MODEL": "openai.model_name",
    "OPENAI_API_KEY": "openai.api_key",
}
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
    given = {EQUIVALENTS.get(one.path, one.path): one.value for one in stronger}
    if given.get("model") or given.get("openai.base_url", OPENAI_URL) in ("", NO_ENGINE):
        return []
    values = {**read_dotenv_values(folder / ".env", OPENAI_PATHS), **environ}
    found = [
        Given(path, values[name], name, "variable")
        for name, path in OPENAI_PATHS.items()
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
        warn(redacted(f"{', '.join(used)} {'is' if len(used) == 1 else 'are'} used: {engine}."))
    return found


def export_dotenv(
    folder: Path, environ: MutableMapping[str, str], warn: Callable[[str], None]
) -> None:
    """Sets the tokens of services that `.env` holds and the environment lacks: their clients look
    for them there.
    """
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

_METRICS = "metrics are served at /metrics and shown while a command runs"
_WANDB = "`--track wandb` sends them to Weights & Biases"
_PROMPTS = "prompts belong to the environment; see its own --env.* settings"
_EVALUATION = "training and evaluation are separate commands"
_ALONE = "one environment runs at a time"
_RUBRIC = "the environment decides what counts; see --env.rubric.*"
_EXACT = "token ids come from the engine, so no tokenizer is needed"

# Accepted, with a warning that says what replaces it.
IGNORED: dict[str, str] = {
    "env.use_wandb": _WANDB,
    "env.wandb_name": _WANDB,
    "env.num_rollouts_to_keep": _METRICS,
    "env.num_rollouts_per_group_for_logging": _METRICS,
    "env.min_items_sent_before_logging": _METRICS,
    "env.tokenizer_name": _EXACT,
    "env.rollout_server_url": "`envserver serve` is the server itself; see --server.port",
    "env.batch_size": "the trainer sets its batch size when it registers",
    "env.inference_weight": _ALONE,
    "env.min_batch_allocation": _ALONE,
    "env.max_num_workers": "see --rollouts.max_concurrent",
    "env.max_num_workers_per_node": "see --rollouts.max_concurrent",
    "env.max_eval_workers": _EVALUATION,
    "env.steps_per_eval": _EVALUATION,
    "env.eval_handling": _EVALUATION,
    "env.eval_limit_ratio": _EVALUATION,
    "env.data_dir_to_save_evals": _EVALUATION,
    "env.use_chat_completion": "agents may use any API",
    "env.scoring_strategy": _RUBRIC,
    "env.length_penalty_weight": _RUBRIC,
    "env.debug_scoring": _RUBRIC,
    "env.save_full_traces": "each agent's trace is in its trajectory",
    "env.thinking_mode": _PROMPTS,
    "env.reasoning_effort": _PROMPTS,
    "env.max_reasoning_tokens": _PROMPTS,
    "env.custom_thinking_prompt": _PROMPTS,
    "openai.num_requests_for_eval": _EVALUATION,
    "openai.rolling_buffer_length": "it was never used",
    "openai.tokenizer_name": _EXACT,
    "openai.n_kwarg_is_ignored": "each rollout requests one completion at a time",
    "openai.health_check": "engine health is judged by its answers",
    "tasks_per_step": "rows are written as their groups finish",
    "max_n_completions": "each rollout requests one completion at a time",
    "proxy_url": "the recording proxy is part of the server",
}

# Errors unless switched off.
REFUSED: dict[str, str] = {
    "slurm": "Give the engines' addresses: --openai.base_url http://a:8000/v1,http://b:8000/v1",
    "api_url": "Rollouts are made here; `atropos-sft-gen` fetches them from a server.",
    "testing": "Use the simulated engine: --model sim",
}
