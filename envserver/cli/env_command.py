"""`envserver env WORD`: installs, lists, removes and shares packages of environments."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ..registry.installed import MANIFEST, Installed, installed
from ..running.installing import install, prepare, remove
from .console import show_rows
from .specs.env_command import INSTALL, LIST, PUSH, REMOVE


def run_install(argv: list[str]) -> int:
    """Installs a package; prints the names of its environments, one per line."""
    settings = INSTALL.read(argv)
    one = install(
        settings.source,
        packages=settings.packages,
        interpreter=settings.interpreter,
        replace=settings.replace,
        on_progress=lambda text: print(f"{text} ...", file=sys.stderr),
    )
    print(
        f"Installed {one.package} {one.version} {_where(one)}. Its manifest: "
        f"{one.folder / MANIFEST}",
        file=sys.stderr,
    )
    print("\n".join(one.names))
    return 0


def run_list(argv: list[str]) -> int:
    """Prints a table of the installed packages."""
    LIST.read(argv)
    rows = [("PACKAGE", "VERSION", "PYTHON", "ENVIRONMENTS", "FROM"), *map(_row, installed())]
    show_rows(rows)
    return 0


def run_remove(argv: list[str]) -> int:
    """Removes a package."""
    one = remove(REMOVE.read(argv).name)
    print(f"Removed {one.package} {one.version}.", file=sys.stderr)
    return 0


def run_push(argv: list[str]) -> int:
    """Uploads a project; prints the address of each file. Without a token nothing is uploaded."""
    from envserver_factory.publishing.upload import upload

    settings = PUSH.read(argv)
    target = f"hf://datasets/{settings.to}"
    with tempfile.TemporaryDirectory(prefix="envserver-push-") as temporary:
        folder = Path(temporary)
        manifests = prepare(settings.project, settings.to, folder)
        why = "--dry-run" if settings.dry_run else _why_no_hub()
        if why:
            for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                print(f"{target}/{path.relative_to(folder).as_posix()}")
        else:
            upload(folder, target, on_progress=print)
    names = ", ".join(f"{one.name} {one.version}" for one in manifests)
    if why:
        print(f"Dry run ({why}): nothing was uploaded of {names}.", file=sys.stderr)
    else:
        print(
            f"Uploaded {names}. To install: envserver env install hub:{settings.to}",
            file=sys.stderr,
        )
    return 0


def _why_no_hub() -> str:
    """Returns why nothing can be uploaded; "" if it can."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return "huggingface_hub is not installed"
    return "" if get_token() else "there is no token; run `hf auth login` or set HF_TOKEN"


def _row(one: Installed) -> tuple[str, ...]:
    python = "shared" if one.interpreter is None else "own venv"
    return (one.package, one.version, python, ",".join(one.names), one.source)


def _where(one: Installed) -> str:
    return "in its own virtual environment" if one.interpreter else "beside envserver"
