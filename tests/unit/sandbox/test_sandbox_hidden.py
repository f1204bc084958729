"""Environments that are not installed are hidden, too, and links lead to nothing that is."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import forked, words

from envserver import SandboxConfig, SandboxSpec, registry
from envserver.running.sandboxes import private_paths, sandboxes_of
from envserver.sandbox import landlock, linux, namespaces, system
from envserver.sandbox import service as selection
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.service import probe

ENVIRONMENT = """
from pathlib import Path
from envserver import Environment, SandboxSpec

class Graded(Environment):
    sandbox = SandboxSpec()
    class Config(Environment.Config):
        data_path: Path
        compiler: Path = Path("/usr/bin/gcc")
    def tasks(self, split):
        yield from ()
    async def rollout(self, task, run):
        return {}
    def score(self, task, result):
        return 0.0
"""


@pytest.fixture
def graders() -> Iterator[Path]:
    """The file of an environment in a folder that programs see otherwise, with data elsewhere."""
    name = f"graders-{os.getpid()}"
    folder, data = Path(sys.prefix, "lib", name), Path(sys.prefix, "lib", f"data-{name}.jsonl")
    folder.mkdir()
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "answers.txt").write_text("42")
    data.write_text("{}")
    yield folder / "env.py"
    shutil.rmtree(folder)
    data.unlink()


@pytest.mark.parametrize("backend", selection.ORDER)
async def test_an_environment_given_by_path_is_hidden(graders: Path, backend: str) -> None:
    data = graders.parents[1] / f"data-{graders.parent.name}.jsonl"
    kind = registry.find(str(graders))
    environment = kind(kind.Config(data_path=data))
    assert set(private_paths(environment)) >= {str(graders.parent), str(data)}
    assert "/usr/bin/gcc" not in private_paths(environment)
    config = SandboxConfig.model_validate({"backend": backend})
    report = await probe(backend, config)
    if not report.works:
        pytest.skip(f"{backend} does not work here: {report.failure}")
    async with (
        sandboxes_of(environment, config) as service,
        SandboxClient(service.address) as client,  # type: ignore[union-attr]
        client.open(SandboxSpec()) as sandbox,
    ):
        result = await sandbox.run_python(
            f"""
import sys
for name in ("env.py", "answers.txt", "../{data.name}"):
    try:
        print(open(f"{{sys.prefix}}/lib/{graders.parent.name}/{{name}}").read())
    except OSError:
        continue
    """
        )
    assert result.ok, result
    assert result.stdout == b""


def test_private_paths_are_hidden_by_their_real_place(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert str(tmp_path / "real") in system.hidden_paths([str(tmp_path / "link")])


@pytest.mark.parametrize("name", ["folder", "a, b", "link"])
async def test_a_folder_is_shown_without_what_is_hidden_in_it(tmp_path: Path, name: str) -> None:
    """By one mount, or by one for each entry where overlayfs cannot: not with a comma in a path,
    nor with something mounted below the folder, by whatever link it is named."""
    report = await probe("namespace", SandboxConfig(backend="namespace"))
    if not report.works:
        pytest.skip(f"namespaces do not work here: {report.failure}")
    folder = tmp_path / name
    if name == "link":
        (tmp_path / "real").mkdir()
        folder.symlink_to("real")
    (folder / "sub").mkdir(parents=True)
    for file in (*(f"entry{n}" for n in range(20)), "secret", "sub/secret", "sub/shown"):
        (folder / file).write_text(file)
    (folder / "link").symlink_to("secret")
    visible = [str(path) for path in folder.iterdir() if path.name not in ("secret", "sub")]
    visible.append(str(folder / "sub/shown"))
    (tmp_path / "root").mkdir()

    def look() -> dict[str, object]:
        return {
            "names": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
            "link": words((folder / "link").read_text),
            "shown": words((folder / "sub/shown").read_text),
            "mounted": (folder / "entry1").read_text(),
            "new": words((folder / "new").touch),
            "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        }

    def enter() -> dict[str, object]:
        namespaces.own_users()
        if name == "link":
            linux.unshare(linux.CLONE_NEWNS)
            linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            linux.mount(f"{folder}/entry2", f"{folder}/entry1", flags=linux.MS_BIND)
        ours, theirs = os.pipe()
        partly = {str(folder): [str(folder / "secret"), str(folder / "sub/secret")]}
        namespaces.enter_outer(
            str(tmp_path / "root"),
            {"visible": visible, "etc": {}, "partly": partly},
            lambda: print(json.dumps(look()), file=os.fdopen(theirs, "w"), flush=True),
        )
        return dict(json.loads(os.read(ours, 65536)))

    found = forked(enter)
    assert found["names"] == sorted([*(f"entry{n}" for n in range(20)), "link", "sub", "sub/shown"])
    assert found["link"].startswith("FileNotFoundError")
    assert found["new"].startswith("OSError")
    assert found["shown"] == ""
    assert found["mounted"] == ("entry2" if name == "link" else "entry1")
    assert (found["mounts"] < 20) == (name == "folder")


@pytest.mark.skipif(landlock.abi() < 1, reason="no Landlock in this kernel")
def test_a_link_that_is_visible_shows_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/secret").write_text("x")
    (tmp_path / "lib/shown").write_text("x")
    (tmp_path / "lib64").symlink_to("lib")

    def attempts() -> dict[str, str]:
        shown = [str(tmp_path / "lib64"), str(tmp_path / "lib/shown")]
        landlock.restrict(shown, [], listed=[str(tmp_path / "lib")])
        return {
            "secret": words((tmp_path / "lib/secret").read_text),
            "secret by the link": words((tmp_path / "lib64/secret").read_text),
            "ok: shown": words((tmp_path / "lib64/shown").read_text),
            "ok: listed": words(lambda: list((tmp_path / "lib64").iterdir())),
        }

    found = forked(attempts)
    assert {n: said for n, said in found.items() if (said == "") != n.startswith("ok")} == {}
