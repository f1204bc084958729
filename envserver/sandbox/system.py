"""The programs' view of this machine: system directories and Python, but not this project.

Visible are /usr and the like, a few files of /etc, and the running Python installation with its
packages, except for what `hidden` names: envserver and everything that holds environments. All of
it is read-only for programs; the rest of the machine is not there.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from . import linux, namespaces
from .wire import NAMESPACE_BACKENDS

OUR_PACKAGES = (
    "envserver",
    "envserver_records",
    "envserver_environments",
    "envserver_integrations",
    "envserver_tools",
    "envserver_local",
    "envserver_factory",
    "envserver_clients",
)
_OUR_DISTRIBUTIONS = ("envserver", "envserver-clients")
_ENTRY_POINTS = "envserver.environments"


def hidden_paths(private: Iterable[str] = ()) -> set[str]:
    """The real paths that no program may see; not all of them need to exist.

    `private`: further paths, of environments and data that are not installed.
    """
    sites = _site_directories()
    found = {os.path.realpath(path) for path in private} - sites
    with_environments = _with_environments()
    for name in {*OUR_PACKAGES, *_packages(with_environments)}:
        for place in package_places(name):
            found |= {place, str(Path(place).parent)} - sites
    for site in sites:
        found.update(f"{site}/{name}" for name in _pointers(site))
    for distribution in with_environments:
        found.update(
            os.path.realpath(str(distribution.locate_file(name)))
            for name in _top_level(distribution)
        )
    return found


def environment_packages() -> set[str]:
    """The import names of all installed packages that environments are in."""
    return _packages(_with_environments())


def package_places(name: str) -> set[str]:
    """The real folders of a package, or the file of a module; nothing if it is absent."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return set()
    places = list(spec.submodule_search_locations or [])
    if not places and spec.has_location and spec.origin is not None:
        places = [spec.origin]
    return {os.path.realpath(place) for place in places}


def _with_environments() -> list[Distribution]:
    """Our own distributions and all others with environments.

    It reads the names of none of them, for parsing the metadata of hundreds takes 50 ms.
    """
    ours = [each for name in _OUR_DISTRIBUTIONS for each in distributions(name=name)]
    return ours + [each for each in distributions() if _environment_modules(each)]


def _packages(with_environments: Iterable[Distribution]) -> set[str]:
    return {name for each in with_environments for name in _environment_modules(each)}


def _environment_modules(distribution: Distribution) -> set[str]:
    if _ENTRY_POINTS not in (distribution.read_text("entry_points.txt") or ""):
        return set()
    points = distribution.entry_points.select(group=_ENTRY_POINTS)
    return {point.module.partition(".")[0] for point in points}


def _site_directories() -> set[str]:
    """The real directories that hold packages of many authors, and Python's own modules."""
    known = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    known.update(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return {os.path.realpath(path) for path in known if Path(path).is_dir()}


def _pointers(site: str) -> Iterator[str]:
    """Names in a site directory that lead Python to projects in other folders."""
    for name in (entry.name for entry in os.scandir(site)):
        if name.startswith(("__editable__", "_editable_impl_")) or name.endswith(".egg-link"):
            yield name
        elif name.endswith(".pth"):
            lines = Path(site, name).read_text(errors="replace").splitlines()
            if any(line.strip().startswith(("/", ".")) or "editable" in line for line in lines):
                yield name


def _top_level(distribution: Distribution) -> set[str]:
    tops = {path.parts[0] for path in distribution.files or [] if path.parts}
    return tops - {"..", "/", "__pycache__"}


_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/magic", "/etc/terminfo"),
    *("/etc/protocols", "/etc/services"),
)

_OWN_DIRECTORIES = ("/work", "/tmp", "/dev", "/proc", "/box", "/run")
"""A sandbox has its own versions of these, so the host's files below them are not visible."""
_SPARE_DIRECTORIES = ("/mnt", "/srv", "/media", "/opt")
_SCRIPT_BYTES = 32768

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables for numeric libraries: there are many programs, so none may use every core."""


@functools.cache
def visible_paths(private: tuple[str, ...] = ()) -> list[str]:
    """The host paths that programs may read, with all below each.

    A link stands for itself only: what it leads to is visible if its real place is. They are those
    of this interpreter: call it after `move_python`, if that is needed.
    """
    roots = _seen_in_roots(private).values()
    return list(dict.fromkeys(path for seen in roots for path in seen if seen[path]))


@functools.cache
def partly_visible(private: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """The folders of which programs see all but some paths, and these paths: `visible_paths` has
    everything else in such a folder."""
    found: dict[str, list[str]] = {}
    shown = visible_paths(private)
    for root, seen in _seen_in_roots(private).items():
        hidden = [path for path in seen if not seen[path]]
        is_whole = root in seen or any(_is_below(root, each) for each in found)
        if not is_whole and not any(_is_below(path, each) for path in shown for each in hidden):
            found[root] = hidden
    return found


def search_path() -> list[str]:
    """The import path of programs: the part of this interpreter's path that they see.

    It never has a directory that they can write to (the server may have been started in /tmp): the
    next program would import a module that a program leaves there.
    """
    roots = shown_roots()
    return [
        entry for entry in sys.path if any(_is_below(os.path.realpath(entry), r) for r in roots)
    ]


def shown_roots() -> set[str]:
    """The real places of directories and files that are visible but for what is hidden."""
    return {os.path.realpath(root) for root in _roots()}


def variables() -> dict[str, str]:
    places = [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin"]
    places += ["/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(dict.fromkeys(places)),
        "HOME": "/work",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        **ONE_THREAD,
    }


def etc_files() -> dict[str, str]:
    """The files of /etc that programs get instead of the host's, by name."""
    return {
        "passwd": (
            "root:x:0:0:root:/:/usr/sbin/nologin\n"
            "sandbox:x:1000:1000:sandbox:/work:/bin/bash\n"
            "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
        ),
        "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
    }


def must_move_python() -> bool:
    """Whether this interpreter is below a directory that a sandbox replaces."""
    return _in_the_way(sys.prefix)


def move_python() -> None:
    """Restarts this process from another path if a sandbox would hide its Python.

    A virtual environment below /work or /tmp would be invisible in every sandbox. So, in a mount
    namespace of its own, this process binds it to a path that no sandbox replaces, and executes its
    own command line again with every mention of the old path replaced. It returns at once if
    nothing must move; open descriptors are kept if they are inheritable.
    """
    if not must_move_python():
        return
    if _in_the_way(sys.base_prefix):
        raise OSError(
            f"Python is installed in {sys.base_prefix}, where a sandbox has its own directories"
        )
    place = _spare_directory()
    namespaces.own_users()
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", place, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=16m")
    new_prefix = f"{place}/python"
    Path(new_prefix, "bin").mkdir(parents=True)
    for part in ("lib", "lib64", "pyvenv.cfg"):
        _bind(f"{sys.prefix}/{part}", f"{new_prefix}/{part}")
    _move_scripts(f"{sys.prefix}/bin", f"{new_prefix}/bin")
    words = [word.replace(sys.prefix, new_prefix) for word in sys.orig_argv]
    executable = sys.executable.replace(sys.prefix, new_prefix)
    os.execv(executable, [executable, *words[1:]])


def _bind(source: str, target: str) -> None:
    if not os.path.lexists(source):
        return
    if Path(source).is_symlink():
        Path(target).symlink_to(Path(source).readlink())
        return
    if Path(source).is_dir():
        Path(target).mkdir()
    else:
        Path(target).touch()
    linux.mount(source, target, flags=linux.MS_BIND | linux.MS_REC)


def _move_scripts(old: str, new: str) -> None:
    """Rewrites scripts whose first line names the interpreter by its old path."""
    for entry in os.scandir(old):
        target = Path(new, entry.name)
        is_script = entry.is_file(follow_symlinks=False) and entry.stat().st_size < _SCRIPT_BYTES
        text = Path(entry.path).read_bytes() if is_script else b""
        if text.startswith(b"#!" + os.fsencode(old)):
            target.write_bytes(text.replace(os.fsencode(old), os.fsencode(new), 1))
            target.chmod(0o755)
        else:
            _bind(entry.path, str(target))


def _spare_directory() -> str:
    needed = [sys.base_prefix, *sys.path, *visible_paths()]
    for place in _SPARE_DIRECTORIES:
        if Path(place).is_dir() and not any(_is_below(path, place) for path in needed):
            return place
    raise OSError(
        f"{sys.prefix} cannot be shown in sandboxes, which have their own directory there, "
        f"and no other mount point is free (tried {', '.join(_SPARE_DIRECTORIES)})"
    )


def _in_the_way(path: str) -> bool:
    return any(_is_below(path, own) for own in _OWN_DIRECTORIES)


def _roots() -> Iterator[str]:
    """Directories and files that are visible except for what is hidden in them.

    A link comes with its real place: by itself it makes nothing visible.
    """
    bases = [sys.base_prefix, os.path.realpath(sys.base_prefix)]
    wanted = [*_SYSTEM, *(f"{base}/{part}" for base in bases for part in ("bin", "lib", "lib64"))]
    if sys.prefix != sys.base_prefix:
        wanted += [f"{sys.prefix}/{part}" for part in ("pyvenv.cfg", "bin", "lib", "lib64")]
    wanted += [os.path.realpath(path) for path in wanted if Path(path).is_symlink()]
    return (path for path in dict.fromkeys(wanted) if os.path.lexists(path))


@functools.cache
def _seen_in_roots(private: tuple[str, ...]) -> dict[str, dict[str, bool]]:
    """For each of `_roots` whether paths in it are visible: see `_look`."""
    hidden = hidden_paths(private)
    found: dict[str, dict[str, bool]] = {}
    for root in _roots():
        if not any(_is_below(root, path) for seen in found.values() for path in seen if seen[path]):
            # A virtual environment may be in the project's folder, which is hidden as a whole.
            real = os.path.realpath(root)
            secrets = {path for path in hidden if not _is_below(real, path)}
            found[root] = dict(_look(root, secrets))
    return found


def _look(path: str, hidden: set[str]) -> Iterator[tuple[str, bool]]:
    """Yields whether `path` is visible; if only a part of it is, whether the paths in it are."""
    real = os.path.realpath(path)
    if any(_is_below(real, secret) for secret in hidden):
        yield path, False
        return
    if Path(path).is_symlink() or not any(_is_below(secret, real) for secret in hidden):
        yield path, True
        return
    try:
        names = sorted(entry.name for entry in os.scandir(path))
    except OSError:  # a directory that cannot be listed cannot be shown either
        yield path, False
        return
    for name in names:
        yield from _look(f"{path}/{name}", hidden)


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


# This needs a good part of the standard library, and every module that a zygote has imported makes
# each of its forks slower: 0.1 ms of CPU per megabyte, and a sandbox takes two forks.


def describe(backend: str, private: tuple[str, ...]) -> dict[str, Any]:
    """
    Args:
        private: see `system.hidden_paths`.

    Returns:
        `moves`: Python must be moved first (`system.move_python`), and the rest asked for again;
        `visible`, `partly`, `etc`, `variables`, `search_path`, `one_thread`: see `system`;
        `filter`: of system calls, for programs, in hexadecimal digits; `tcp_filter`: one for
        workers in the host's network.
    """
    from . import seccomp  # the rest of this module needs only the standard library

    whole = backend in NAMESPACE_BACKENDS
    if whole and must_move_python():
        return {"moves": True}
    return {
        "moves": False,
        "visible": visible_paths(private),
        "partly": partly_visible(private),
        "etc": etc_files(),
        "variables": variables(),
        "search_path": search_path(),
        "one_thread": ONE_THREAD,
        "filter": seccomp.program(inet=whole).hex(),
        "tcp_filter": seccomp.program(inet=True, host=True).hex(),
    }


def tell(backend: str, private: tuple[str, ...], descriptor: int) -> None:
    try:
        text = json.dumps(["ok", describe(backend, private)])
    except Exception as error:  # noqa: BLE001 - whatever it is, the zygote must hear of it
        text = json.dumps(["error", f"{type(error).__name__}: {error}"])
    with os.fdopen(descriptor, "w") as pipe:
        pipe.write(text)
