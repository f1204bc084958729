"""Where settings come from, which source wins, and what every mistake is told."""

import shlex
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from envserver_records.errors import ConfigError, NotFoundError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from support.cases import cases_of
from support.extent import examples

from envserver import EnvironmentConfig, SamplingConfig, ServerConfig, Settings
from envserver.cli.command_line import CommandSpec
from envserver.cli.settings import export_dotenv
from envserver.running.options import with_environment
from envserver.settings.section import Section

MISTAKES = cases_of(__file__, "mistakes.toml")
TOO_DEEP = "env: " + "[" * 5000


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


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(line: str = "", **arguments: Any) -> Settings:
    """Settings by the flags of `line`, and by a `.env` file only where `folder` is given."""
    kind = arguments.pop("settings_class", with_environment(Settings, Config))
    command = CommandSpec("", "", kind, openai_variables=arguments.pop("openai_variables", "no"))
    facts = {"environ": {}, "folder": Path("/nonexistent")}
    return command.read(shlex.split(line), **(facts | arguments))


def env(line: str = "", **arguments: Any) -> Config:
    settings = load(line, **arguments)
    assert isinstance(settings.env, Config)
    return settings.env


def message(line: str = "", **arguments: Any) -> str:
    with pytest.raises((ConfigError, NotFoundError)) as caught:
        load(line, **arguments)
    return str(caught.value)


def of_file(text: str) -> str:
    """The flag that names a file with this text."""
    Path("run.yaml").write_text(text)
    return " --config run.yaml"


def test_lists_by_commas_by_repetition_and_as_json() -> None:
    for flags in ("a,b,c", "a --env.sources b,c", """'["a", "b", "c"]'"""):
        assert env(f"--env.sources {flags}").sources == ["a", "b", "c"]
    for urls in ("http://a:1/v1/,http://b:2/v1", "http://a:1/v1 --openai.base_url http://b:2/v1"):
        engines = load(f"--openai.base_url {urls}").openai.base_urls
        assert engines == ["http://a:1/v1", "http://b:2/v1"]


def test_a_nested_section_keeps_what_its_default_sets() -> None:
    config = env("--env.judge.top_p 0.9 --env.ratio none --env.limits '{\"turns\": 4}'")
    assert (config.judge.temperature, config.judge.top_p) == (0.25, 0.9)
    assert (config.ratio, config.limits) == (None, {"turns": 4})


def test_a_key_is_one_line_and_never_in_the_error() -> None:
    assert load("--openai.api_key 'sk-1\n'").openai.api_key.get_secret_value() == "sk-1"
    for name in ("--openai.api_key", "--judge.api_key"):
        told = message(f"{name} 'sk-secret\r\nx-evil: 1'")
        assert f"{name}: a key must be one line" in told and "secret" not in told


def test_the_stronger_source_wins() -> None:
    Path(".env").write_text(
        "OTHER=1\nexport ENVSERVER_ENV__GROUP_SIZE=3\n"
        "ENVSERVER_ENV__SEED='3'\nENVSERVER_ENV__MAX_TURNS=3 # three\n"
    )
    settings = env(
        of_file("env: {group_size: 2, seed: 2, max_turns: 2, digits: 2}") + " --env.group_size 5",
        environ={"ENVSERVER_ENV__GROUP_SIZE": "4", "ENVSERVER_ENV__SEED": "4", "HOME": "/"},
        folder=Path(),
        defaults={"env": {"digits": 1, "worker_timeout": 0.1}},
    )
    assert (settings.group_size, settings.seed, settings.max_turns) == (5, 4, 3)
    assert (settings.digits, settings.worker_timeout) == (2, 0.1)


@hypothesis.settings(deadline=None, max_examples=examples(30))
@given(st.dictionaries(st.sampled_from(["group_size", "max_turns", "digits"]), st.integers(1, 99)))
def test_flags_variables_and_files_say_the_same(values: dict[str, int]) -> None:
    by_flag = env(" ".join(f"--env.{name}={value}" for name, value in values.items()))
    environ = {f"ENVSERVER_ENV__{name.upper()}": str(value) for name, value in values.items()}
    assert by_flag == env(environ=environ) == env(defaults={"env": values})


def test_mistakes_are_told() -> None:
    for line, expected in MISTAKES["flags"].items():
        assert expected in message(line)
    for text, expected in {**MISTAKES["files"], TOO_DEEP: "nested too deeply"}.items():
        told = message(of_file(text))
        assert expected in told and "run.yaml" in told
    assert len(message("--env.seed x --env.group_size 0 --server.port 99999999").splitlines()) == 3

    unknown = message(environ={"ENVSERVER_ENV__GROUPSIZE": "8"})
    assert "ENVSERVER_ENV__GROUPSIZE: there is no such setting" in unknown
    assert "Did you mean ENVSERVER_ENV__GROUP_SIZE?" in unknown
    assert message(environ={"ENVSERVER_ENV__SEED": "x"}).startswith("ENVSERVER_ENV__SEED: must be")
    Path(".env").write_text("\nFINE=1\nENVSERVER_ENV__SEED=x\n")
    assert ".env:3" in message(folder=Path())


def test_secrets_are_in_no_error() -> None:
    for line in (
        "--env.token hush --env.seed x",
        "--env.tokn hush",
        "--env.token hush hush",
        "--openai.base_url ftp://me:hush@host/v1",
    ):
        assert "hush" not in message(line)
    environ = {"ENVSERVER_OPENAI__API_KEY": "hush", "ENVSERVER_OPENAI__TIMEOUT": "0"}
    assert "hush" not in message(environ=environ)
    told = message(of_file("env:\n  token: [hush]\n"))
    assert "run.yaml:2: env.token" in told and "hush" not in told
    warned: list[str] = []
    environ = {"OPENAI_BASE_URL": "http://me:hush@host/v1"}
    load(environ=environ, warn=warned.append, openai_variables="engine")
    assert len(warned) == 1 and "hush" not in warned[0]


@pytest.mark.parametrize("case", MISTAKES["openai"])
def test_variables_of_openai_name_the_engine_where_nothing_else_does(case: dict[str, Any]) -> None:
    class Own(Settings):
        model: str | None = None

    environ = case["environ"]
    Path(".env").write_text("OPENAI_MODEL=of the file\n" if "OPENAI_MODEL" in environ else "")
    told: list[str] = []
    sources: dict[str, Any] = {"environ": environ, "folder": Path(), "openai_variables": "openai"}
    engine = load(case["flags"], settings_class=Own, warn=told.append, **sources).openai
    key = engine.api_key.get_secret_value()
    assert told == ([case["said"]] if case["said"] else [])
    found = f"{engine.base_url} {engine.model_name} {key} {engine.server_type}"
    assert found == case["expected"] if case["expected"] else not key


def test_a_key_alone_names_no_engine_of_a_trainer() -> None:
    settings = load(environ={"OPENAI_API_KEY": "sk-1"}, openai_variables="engine")
    assert settings.openai.base_url == "http://localhost:9001/v1"
    assert settings.openai.api_key.get_secret_value() == ""  # nobody named that address


def test_tokens_of_other_services_are_found_in_a_dotenv_file() -> None:
    Path(".env").write_bytes(b"HF_TOKEN=hf-1\nTAVILY_API_KEY=tv-1\nA=\xe9\nENVSERVER_TOKEN=\0\n")
    environ = {"HF_TOKEN": "stronger"}
    told: list[str] = []
    export_dotenv(Path(), environ, told.append)
    assert environ == {"HF_TOKEN": "stronger", "TAVILY_API_KEY": "tv-1"}
    assert told == ["TAVILY_API_KEY of .env is used."]


KUBERNETES = """
SERVICE_HOST=10.0.0.1 SERVICE_PORT=8000 SERVICE_PORT_HTTP=8000 PORT=tcp://10.0.0.1:8000
PORT_8000_TCP=tcp://10.0.0.1:8000 PORT_8000_TCP_PROTO=tcp PORT_8000_TCP_PORT=8000
PORT_8000_TCP_ADDR=10.0.0.1 TRAINER_2_SERVICE_HOST=10.0.0.2 TRAINER_2_PORT=udp://10.0.0.2:53
"""


def test_variables_that_kubernetes_adds_are_not_settings() -> None:
    pairs = (word.split("=") for word in KUBERNETES.split())
    added = {f"ENVSERVER_{name}": value for name, value in pairs}
    assert load(environ=added).model_dump() == load().model_dump()
    assert load(environ=added | {"ENVSERVER_SERVER__PORT": "9009"}).server.port == 9009
    assert "ENVSERVER_PORTS" in message(environ={"ENVSERVER_PORTS": "tcp://10.0.0.1:8000"})


def test_names_of_atropos_are_accepted_with_a_word_where_they_have_no_meaning_here() -> None:
    text = """
env: &common
  group_size: 2
  use_wandb: false
openai:
  - {base_url: 'http://a:1/v1', model_name: m, api_key: x}
  - {base_url: 'http://b:2/v1', model_name: m, api_key: x}
slurm: false
testing: false
"""
    warnings: list[str] = []
    settings = load(of_file(text), warn=warnings.append)
    assert settings.openai.base_urls == ["http://a:1/v1", "http://b:2/v1"]
    assert settings.openai.model_name == "m"
    assert [line.split(" has ")[0] for line in warnings] == ["run.yaml:4: env.use_wandb"]
    warnings.clear()
    settings = load(
        "--env.use_wandb false --env.tokenizer_name x --openai.health_check=false "
        "--env.max_batches_offpolicy 7 --env.group_size 2",
        warn=warnings.append,
    )
    assert settings.env.group_size == 2
    assert settings.rollouts.max_batches_offpolicy == 7
    assert len(warnings) == 3
    assert warnings[0].startswith("--env.use_wandb has no effect here: ")


@pytest.mark.parametrize(("flags", "variable", "file"), MISTAKES["environments"])
def test_the_environment_is_named_by_any_source(flags: str, variable: str, file: str) -> None:
    words = f"{flags} --env.data_set sample {of_file(file)}"
    environ = dict([variable.split("=")]) if variable else {}
    settings = load(words, settings_class=Settings, environ=environ, folder=Path())
    assert settings.environment == "math"
    assert settings.env.model_dump()["data_set"] == ["sample"]


def test_a_command_skips_what_shared_sources_say_of_other_commands() -> None:
    class Few(Section):
        server: ServerConfig = ServerConfig()

    text = "environment: math\nenv: {digits: 3}\nserver: {port: 1}\nsim: {seed: 2}\n"
    environ = {"ENVSERVER_OPENAI__API_KEY": "x", "ENVSERVER_ENV__DIGITS": "4"}
    assert load(of_file(text), settings_class=Few, environ=environ).server.port == 1
    told = message("--sim.seed 1", settings_class=Few)
    assert "--sim.seed has no meaning for this command" in told
