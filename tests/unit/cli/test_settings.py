"""Where settings come from, which source wins, and what every mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from envserver_records.errors import ConfigError, NotFoundError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from support.extent import examples

from envserver import EnvironmentConfig, SamplingConfig, ServerConfig, Settings
from envserver.cli import renamed
from envserver.cli.openai_variables import export_dotenv
from envserver.cli.settings import load_settings
from envserver.config import Section


class Config(EnvironmentConfig):
    """Settings of an environment made up for these tests."""

    digits: int = 3
    """How many digits."""
    sources: list[str] = ["gsm8k", "math"]
    """Data sets."""
    limits: dict[str, int] = {}
    """Limits by name."""
    ratio: float | None = 0.5
    """A share."""
    token: SecretStr = SecretStr("")
    """A secret."""
    judge: SamplingConfig = SamplingConfig(temperature=0.25)
    """How a judge is sampled."""


def load(*flags: str, folder: Path | None = None, **arguments: Any) -> Settings:
    arguments.setdefault("environ", {})
    return load_settings(
        flags, config_class=Config, folder=folder or Path("/nonexistent"), **arguments
    )


def env(*flags: str, **arguments: Any) -> Config:
    settings = load(*flags, **arguments)
    assert isinstance(settings.env, Config)
    return settings.env


def message(*flags: str, **arguments: Any) -> str:
    with pytest.raises((ConfigError, NotFoundError)) as caught:
        load(*flags, **arguments)
    return str(caught.value)


def test_flags_of_every_type() -> None:
    config = env(
        *("--env.group_size", "8"),
        *("--env.seed=-3",),
        *("--env.worker_timeout", "0.5"),
        *("--env.include_messages", "false"),
        *("--env.ratio", "none"),
        *("--env.limits", '{"turns": 4}'),
        *("--env.data_path_to_save_groups", "out.jsonl"),
        *("--env.split", "test"),
    )
    assert (config.group_size, config.seed, config.worker_timeout) == (8, -3, 0.5)
    assert (config.include_messages, config.ratio, config.limits) == (False, None, {"turns": 4})
    assert (config.data_path_to_save_groups, config.split) == (Path("out.jsonl"), "test")


def test_a_bare_flag_is_true() -> None:
    assert env("--env.ensure_scores_are_not_same", "--env.seed", "1").ensure_scores_are_not_same


@pytest.mark.parametrize(
    "flags",
    [
        ["--env.sources", "a,b,c"],
        ["--env.sources", "a", "--env.sources", "b,c"],
        ["--env.sources", '["a", "b", "c"]'],
    ],
)
def test_lists_by_commas_by_repetition_and_as_json(flags: list[str]) -> None:
    assert env(*flags).sources == ["a", "b", "c"]


def test_a_nested_section_keeps_what_its_default_sets() -> None:
    config = env("--env.judge.top_p", "0.9")
    assert (config.judge.temperature, config.judge.top_p) == (0.25, 0.9)


def test_a_key_is_one_line_and_never_in_the_error() -> None:
    assert load("--openai.api_key", "sk-1\n").openai.api_key.get_secret_value() == "sk-1"
    for name in ("--openai.api_key", "--judge.api_key"):
        with pytest.raises(ConfigError, match=f"{name}: a key must be one line") as refused:
            load(name, "sk-secret\r\nx-evil: 1")
        assert "secret" not in str(refused.value)


def test_several_engines() -> None:
    by_comma = load("--openai.base_url", "http://a:1/v1/,http://b:2/v1")
    by_repetition = load("--openai.base_url", "http://a:1/v1", "--openai.base_url", "http://b:2/v1")
    assert by_comma.openai.base_urls == ["http://a:1/v1", "http://b:2/v1"]
    assert by_repetition.openai.base_urls == by_comma.openai.base_urls


def test_the_stronger_source_wins(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("env:\n  group_size: 2\n  seed: 2\n  max_turns: 2\n  digits: 2\n")
    (tmp_path / ".env").write_text(
        "OTHER=1\nexport ENVSERVER_ENV__GROUP_SIZE=3\n"
        "ENVSERVER_ENV__SEED='3'\nENVSERVER_ENV__MAX_TURNS=3 # three\n"
    )
    variables = {"ENVSERVER_ENV__GROUP_SIZE": "4", "ENVSERVER_ENV__SEED": "4", "HOME": "/"}
    settings = env(
        *("--config", str(config), "--env.group_size", "5"),
        environ=variables,
        folder=tmp_path,
        defaults={"env": {"digits": 1, "worker_timeout": 0.1}},
    )
    assert (settings.group_size, settings.seed, settings.max_turns) == (5, 4, 3)
    assert (settings.digits, settings.worker_timeout) == (2, 0.1)


def test_the_same_flag_twice_takes_the_last() -> None:
    assert env("--env.seed", "1", "--env.seed", "2").seed == 2


@hypothesis.settings(deadline=None, max_examples=examples(30))
@given(st.dictionaries(st.sampled_from(["group_size", "max_turns", "digits"]), st.integers(1, 99)))
def test_flags_variables_and_files_say_the_same(values: dict[str, int]) -> None:
    by_flag = env(*(f"--env.{name}={value}" for name, value in values.items()))
    by_variable = env(
        environ={f"ENVSERVER_ENV__{name.upper()}": str(value) for name, value in values.items()}
    )
    by_default = env(defaults={"env": values})
    assert by_flag == by_variable == by_default


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--env.grop_size", "8"], "--env.grop_size: there is no such setting. Did you mean --env"),
        (["--group_size", "8"], "Did you mean --env.group_size?"),
        (["--env.digit", "8"], "Did you mean --env.digits?"),
        (["--env.total_steps", "-1"], "--env.total_steps: must be greater than or equal to 1 (gi"),
        (["--env.seed", "many"], "--env.seed: must be a valid integer"),
        (["--env.seed"], "--env.seed: a value is needed (int)"),
        (["--env.limits", "{turns}"], "--env.limits: must be JSON"),
        (["--env.split", "tset"], "--env.split: must be 'train', 'validation' or 'test' (given"),
        (["--openai", "x"], "--openai is a group of settings: try --openai.base_url"),
        (["--openai.base_url", "localhost:1"], "--openai.base_url: an address must look like http"),
        (["--openai.base_url", "http://h:99999"], "--openai.base_url: the port must be a number"),
        (["--server.host", "0.0.0.0"], "--server.host: must be a loopback address"),
        (["--model", "qwen-0,5b"], "There is no model 'qwen-0,5b'."),
        (["--slurm", "true"], "Give the engines' addresses"),
        (["--testing"], "Use the simulated engine: --model sim"),
        (["math"], "Unexpected argument 'math'"),
        (["--env", "a", "--env", "b"], "--env is given twice (a and b)"),
        (["--config", "a", "--config", "b"], "--config is given twice"),
    ],
)
def test_mistakes_in_flags(flags: list[str], expected: str) -> None:
    assert expected in message(*flags)


def test_all_mistakes_are_told_at_once() -> None:
    text = message("--env.seed", "x", "--env.group_size", "0", "--server.port", "99999999")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "environ", "expected", "said"),
    [
        (
            [],
            {"OPENAI_API_KEY": "sk-1"},
            ("https://api.openai.com/v1", "gpt-4o-mini", "sk-1", "openai"),
            "OPENAI_API_KEY is used: --openai.base_url https://api.openai.com/v1 and "
            "--openai.model_name gpt-4o-mini.",
        ),
        (
            [],
            {"OPENAI_BASE_URL": "http://a:1/v1", "OPENAI_MODEL": "m"},
            ("http://a:1/v1", "m", "", "vllm"),
            "OPENAI_BASE_URL, OPENAI_MODEL are used: --openai.base_url http://a:1/v1 and "
            "--openai.model_name m.",
        ),
        (
            ["--openai.base_url", "http://b:1/v1"],
            {"OPENAI_API_KEY": "sk-1", "OPENAI_BASE_URL": "http://a:1/v1"},
            ("http://b:1/v1", "default", "sk-1", "vllm"),
            "OPENAI_API_KEY is used: --openai.base_url http://b:1/v1.",
        ),
        (
            ["--api_key", "sk-2"],  # an old name
            {"OPENAI_API_KEY": "sk-1"},
            ("http://localhost:9001/v1", "default", "sk-2", "vllm"),
            "--api_key is now --openai.api_key.",
        ),
        (["--openai.base_url", "none"], {"OPENAI_API_KEY": "sk-1"}, None, ""),
        (["--model", "sim"], {"OPENAI_API_KEY": "sk-1", "OPENAI_MODEL": "m"}, None, ""),
    ],
)
def test_variables_of_openai_name_the_engine_where_nothing_else_does(
    flags: list[str],
    environ: dict[str, str],
    expected: tuple[str, str, str, str] | None,
    said: str,
    tmp_path: Path,
) -> None:
    class Own(Settings):
        model: str | None = None

    (tmp_path / ".env").write_text(
        "OPENAI_MODEL=of the file\n" if "OPENAI_MODEL" in environ else ""
    )
    told: list[str] = []
    settings = load_settings(
        flags,
        settings_class=Own,
        environ=environ,
        folder=tmp_path,
        warn=told.append,
        openai_variables="openai",
    )
    engine = settings.openai
    got = (engine.base_url, engine.model_name, engine.api_key.get_secret_value())
    assert told == ([said] if said else [])
    if expected is None:
        assert not got[2]
        return
    assert (*got, engine.server_type) == expected


def test_a_key_alone_names_no_engine_of_a_trainer() -> None:
    settings = load(environ={"OPENAI_API_KEY": "sk-1"}, openai_variables="engine")
    assert settings.openai.base_url == "http://localhost:9001/v1"
    assert settings.openai.api_key.get_secret_value() == ""  # nobody named that address


def test_a_password_in_an_address_is_not_told() -> None:
    told: list[str] = []
    environ = {"OPENAI_BASE_URL": "http://me:hush@host/v1"}
    load_settings([], environ=environ, warn=told.append, openai_variables="engine")
    assert len(told) == 1 and "hush" not in told[0]


def test_tokens_of_other_services_are_found_in_a_dotenv_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=hf-1\nTAVILY_API_KEY=tv-1\nPATH=/nowhere\n")
    environ = {"HF_TOKEN": "stronger"}
    told: list[str] = []
    export_dotenv(tmp_path, environ, told.append)
    assert environ == {"HF_TOKEN": "stronger", "TAVILY_API_KEY": "tv-1"}
    assert told == ["TAVILY_API_KEY of .env is used."]


def test_mistakes_in_variables(tmp_path: Path) -> None:
    unknown = message(environ={"ENVSERVER_ENV__GROUPSIZE": "8"})
    assert "ENVSERVER_ENV__GROUPSIZE: there is no such setting" in unknown
    assert "Did you mean ENVSERVER_ENV__GROUP_SIZE?" in unknown
    assert message(environ={"ENVSERVER_ENV__SEED": "x"}).startswith("ENVSERVER_ENV__SEED: must be")
    (tmp_path / ".env").write_text("\nFINE=1\nENVSERVER_ENV__SEED=x\n")
    assert ".env:3" in message(folder=tmp_path)


def test_variables_that_kubernetes_adds_are_not_settings() -> None:
    added = {
        "ENVSERVER_SERVICE_HOST": "10.0.0.1",
        "ENVSERVER_SERVICE_PORT": "8000",
        "ENVSERVER_SERVICE_PORT_HTTP": "8000",
        "ENVSERVER_PORT": "tcp://10.0.0.1:8000",
        "ENVSERVER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ENVSERVER_PORT_8000_TCP_PROTO": "tcp",
        "ENVSERVER_PORT_8000_TCP_PORT": "8000",
        "ENVSERVER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ENVSERVER_TRAINER_2_SERVICE_HOST": "10.0.0.2",
        "ENVSERVER_TRAINER_2_PORT": "udp://10.0.0.2:53",
    }
    assert load(environ=added).model_dump() == load().model_dump()
    numbers = {"ENVSERVER_SERVER__PORT": "9009"}
    assert load(environ=added | numbers).server.port == 9009
    assert "ENVSERVER_PORTS" in message(environ={"ENVSERVER_PORTS": "tcp://10.0.0.1:8000"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("env:\n  seed: 1\n  grop_size: 2\n", ":3: env.grop_size: there is no such setting"),
        ("env:\n  seed: many\n", ":2: env.seed: must be a valid integer"),
        ("sevrer:\n  port: 1\n", "Did you mean server?"),
        ("env:\n  seed: 1\n  seed: 2\n", ":3: 'seed' is given twice"),
        ("env: [1]\n", "env must be a mapping"),
        ("- 1\n", "the file must be a mapping"),
        ("env:\n  seed: [1\n", "not valid YAML"),
        ("env: \x07", "not valid YAML"),
        ("env: " + "[" * 5000, "nested too deeply"),
        ("env: !!python/object:os.system {}\n", ":1: env must be a mapping"),
        ("store: &a [*a]\n", "recursive"),
    ],
)
def test_mistakes_in_files_name_their_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    told = message("--config", str(path))
    assert expected in told
    assert str(path) in told


def test_no_such_file() -> None:
    with pytest.raises(NotFoundError, match="no file"):
        load("--config", "/nonexistent.yaml")


def test_atropos_yaml_with_several_engines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "env: &common\n  group_size: 2\n  use_wandb: false\n"
        "openai:\n"
        "  - {base_url: 'http://a:1/v1', model_name: m, api_key: x}\n"
        "  - {base_url: 'http://b:2/v1', model_name: m, api_key: x}\n"
        "slurm: false\ntesting: false\n"
    )
    warnings: list[str] = []
    settings = load("--config", str(path), warn=warnings.append)
    assert settings.openai.base_urls == ["http://a:1/v1", "http://b:2/v1"]
    assert settings.openai.model_name == "m"
    assert [line.split(" has ")[0] for line in warnings] == [f"{path}:3: env.use_wandb"]


def test_engines_that_differ_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("openai:\n- {model_name: m}\n- {model_name: n}\n")
    assert f"{path}:3: openai.model_name differs from {path}:2" in message("--config", str(path))


def test_names_of_atropos_without_a_meaning_here_are_accepted_with_a_word() -> None:
    warnings: list[str] = []
    settings = load(
        *("--env.use_wandb", "false", "--env.tokenizer_name", "x", "--openai.health_check=false"),
        *("--env.max_batches_offpolicy", "7", "--env.group_size", "2"),
        warn=warnings.append,
    )
    assert settings.env.group_size == 2
    assert settings.rollouts.max_batches_offpolicy == 7
    assert len(warnings) == 3
    assert warnings[0].startswith("--env.use_wandb has no effect here: ")


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--env.token", "hush", "--env.seed", "x"], {}),
        (["--env.tokn", "hush"], {}),
        (["--env.token", "hush", "hush"], {}),
        ([], {"ENVSERVER_OPENAI__API_KEY": "hush", "ENVSERVER_OPENAI__TIMEOUT": "0"}),
        (["--openai.base_url", "ftp://me:hush@host/v1"], {}),
    ],
)
def test_secrets_are_in_no_error(flags: list[str], environ: dict[str, str]) -> None:
    assert "hush" not in message(*flags, environ=environ)


def test_an_ill_typed_secret_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env:\n  token: [hush]\n")
    told = message("--config", str(path))
    assert f"{path}:2: env.token" in told
    assert "hush" not in told


def test_a_needed_setting_is_asked_for() -> None:
    class Needy(EnvironmentConfig):
        data: Path
        """Where the data lie."""

    with pytest.raises(ConfigError, match=r"--env\.data is needed \(Where the data lie\)\."):
        load_settings([], config_class=Needy, environ={})
    assert load_settings(["--env.data", "x"], config_class=Needy, environ={})


ENVIRONMENT = '''
from envserver import Environment, Score, Task

class Adder(Environment):
    """Adds."""

    class Config(Environment.Config):
        digits: int = 3
        """How many digits."""

    def tasks(self, split):
        yield Task("1", {})

    def rollout(self, task, run):
        return ""

    def score(self, task, result):
        return Score(reward=1.0)
'''


@pytest.mark.parametrize(
    ("flags", "variable", "file"),
    [
        (["--env", "adder.py"], "", ""),
        (["--env.name", "adder.py"], "", ""),
        ([], "ENVSERVER_ENVIRONMENT", ""),
        ([], "ENVSERVER_ENV", ""),
        ([], "ENVSERVER_ENV__NAME", ""),
        ([], "", "environment: adder.py\n"),
        ([], "", "env: adder.py\n"),
        ([], "", "env:\n  name: adder.py\n  digits: 5\n"),
    ],
)
def test_the_environment_is_named_by_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], variable: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adder.py").write_text(ENVIRONMENT)
    Path("run.yaml").write_text(file)
    words = [*flags, "--config", "run.yaml", "--env.digits", "7"]
    environ = {variable: "adder.py"} if variable else {}
    settings = load_settings(words, environ=environ, folder=tmp_path)
    assert settings.environment == "adder.py"
    assert settings.env.model_dump()["digits"] == 7


def test_the_command_line_wins_over_other_names_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(ENVIRONMENT)
    (tmp_path / "run.yaml").write_text("env: {name: other}\n")
    reference = f"{tmp_path}/adder.py"
    words = ["--env", reference, "--config", f"{tmp_path}/run.yaml"]
    settings = load_settings(words, environ={"ENVSERVER_ENV": "third"}, folder=tmp_path)
    assert settings.environment == reference


def test_own_flags_of_a_command_and_short_names() -> None:
    class Own(Settings):
        resume: bool = False
        """Go on."""

    settings = load_settings(
        ["--resume", "--port", "0"],
        settings_class=Own,
        aliases={"port": "server.port"},
        environ={},
    )
    assert (settings.resume, settings.server.port) == (True, 0)


def test_a_command_skips_what_shared_sources_say_of_other_commands(tmp_path: Path) -> None:
    class Few(Section):
        server: ServerConfig = ServerConfig()

    path = tmp_path / "run.yaml"
    path.write_text("environment: math\nenv: {digits: 3}\nserver: {port: 1}\nsim: {seed: 2}\n")
    environ = {"ENVSERVER_OPENAI__API_KEY": "x", "ENVSERVER_ENV__DIGITS": "4"}
    few = load_settings(["--config", str(path)], settings_class=Few, environ=environ)
    assert few.server.port == 1
    with pytest.raises(ConfigError, match=r"--sim\.seed has no meaning for this command"):
        load_settings(["--sim.seed", "1"], settings_class=Few, environ={})


@pytest.fixture
def _new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"environment_set.digit_count": "env.digits", "judging": "env.judge", "out_file": "out"}
    monkeypatch.setattr(renamed, "RENAMED", table)


@pytest.mark.usefixtures("_new_names")
def test_an_old_name_is_accepted_with_a_line_that_says_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("env:\n  seed: 1\njudging:\n  temperature: 0.5\n")
    environ = {"ENVSERVER_JUDGING__TOP_P": "0.25"}
    told: list[str] = []
    config = env(
        *("--environment_set.digit-count", "7", "--config", str(tmp_path / "run.yaml")),
        environ=environ,
        warn=told.append,
    )
    assert (config.digits, config.judge.temperature, config.judge.top_p) == (7, 0.5, 0.25)
    assert told == [
        f"{tmp_path}/run.yaml:4: judging.temperature is now env.judge.temperature.",
        "ENVSERVER_JUDGING__TOP_P is now ENVSERVER_ENV__JUDGE__TOP_P.",
        "--environment_set.digit-count is now --env.digits.",
    ]


@pytest.mark.usefixtures("_new_names")
def test_a_mistake_below_an_old_name_is_told_and_a_command_without_the_new_one_refuses() -> None:
    assert "--judging.temperature: must be a valid number" in message(
        "--judging.temperature", "warm", warn=lambda line: None
    )
    assert message("--out_file", "x").startswith("--out_file: there is no such setting.")
