"""Imports an environment of the user from a file or a folder, with the modules beside it; finds the
files that come with envserver (`configs`).

    scripts/my_env.py, scripts/helpers.py    a folder of scripts, as when Python runs `my_env.py`
    my_env/__init__.py, my_env/helpers.py    a package, as when Python imports `my_env`
    tools/__init__.py                        a package beside it, where nothing else has its name

In: a path. Out: the modules that may define the environment. Invariants: a module's name
is made from the real path of its folder, so that files of the same name in different folders are
different modules; `sys.path` stays as it is, and only the files of a folder can import its modules
by their bare names, so nothing else is shadowed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from envserver_records.errors import ConfigError, NotFoundError
from envserver_records.extras import missing_module_hint

_HERE = Path(__file__).parent
_PREFIX = "envserver_folder_"
ENTRY_FILES = ("env.py", "__init__.py")
"""A folder with one of these is an environment."""


def shipped(path: Path) -> Path:
    """`path`; where nothing is there and it leads into `configs`, the file that came with us.

    So a default like `configs/models.yaml` is a file of one's own where there is one, and works in
    any folder.
    """
    if path.is_absolute() or path.parts[:1] != ("configs",) or path.exists():
        return path
    for place in (_HERE, _HERE.parent):
        if (place / path).is_file():
            return place / path
    return path


def is_environment_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in ENTRY_FILES)


def import_path(path: Path) -> list[ModuleType]:
    """Imports a .py file, or a folder's `env.py` and `__init__.py`.

    Returns:
        The modules, the most likely home of the environment first.
    """
    if path.is_dir():
        files = [path / name for name in ENTRY_FILES if (path / name).is_file()]
        if not files:
            raise NotFoundError(
                f"There is no environment in the folder {str(path)!r}.",
                hint=f"It needs a file {' or '.join(ENTRY_FILES)}.",
            )
    elif path.is_file() and path.suffix == ".py":
        files = [path]
    elif path.exists():
        raise ConfigError(
            f"{str(path)!r} is not a Python file.",
            hint="Name a file that ends in .py, or a folder of them.",
        )
    else:
        raise NotFoundError(f"There is no file {str(path)!r}.")
    return [_import_file(file.resolve()) for file in files]


def loaded_paths() -> list[Path]:
    """Returns the folders and files of all environments that this process imported by path."""
    return [*(folder.path for folder in _finder.folders.values()), *_finder.files.values()]


def import_for(importer: str, name: str) -> ModuleType:
    """Imports the module that `import name` means in the module `importer`."""
    folder = _finder.folders.get(importer.partition(".")[0])
    if folder is not None and not name.startswith("."):
        name = folder.module(name, importer) or name
    return importlib.import_module(name, getattr(sys.modules.get(importer), "__package__", None))


def same_folder(module: str, other: str) -> bool:
    """Returns whether two modules, given by their names, come from one environment's folder."""
    return module.partition(".")[0] == other.partition(".")[0]


def _import_file(file: Path) -> ModuleType:
    top = file.parent
    while (top / "__init__.py").is_file() and (top.parent / "__init__.py").is_file():
        top = top.parent
    folder = _finder.add_folder(top)
    names = [folder.package, *file.parent.relative_to(top).parts]
    if file.name != "__init__.py":
        is_also_package = (file.with_suffix("") / "__init__.py").is_file()
        names.append(file.stem.replace(".", "_") + "_file" * is_also_package)
    name = ".".join(names)
    if name != folder.package:
        _finder.files[name] = file
    before = set(sys.modules)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script ends the program where a module does not
        for added in set(sys.modules) - before:  # another try reads the files again
            if added.startswith(folder.package):
                del sys.modules[added]
        missing = isinstance(error, ModuleNotFoundError) and missing_module_hint(error.name or "")
        message = _described(error, top)
        if not message.startswith(f"{file}, "):
            message = f"{file} cannot be imported: {message}"
        raise ConfigError(message, hint=missing or "") from error


def _described(error: BaseException, top: Path) -> str:
    """The error, with the file and line below `top` where it arose."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}."
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500].removesuffix(".") + "."
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(top)
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {text}" if frames else text


@dataclass(frozen=True)
class _Folder:
    """A folder whose files import each other.

    Args:
        path: the top one, absolute and without links.
        package: the name of its package in `sys.modules`.
    """

    path: Path
    package: str

    @property
    def is_package(self) -> bool:
        return (self.path / "__init__.py").is_file()

    def module(self, name: str, importer: str) -> str | None:
        """The module of this folder that `import name` means in `importer`; None: another one.

        Between scripts, a module beside them comes before all others of its name, as in Python.
        In a package only its own name does; its other modules are found if nothing else is.
        A folder without `__init__.py` always comes last, and so do the packages beside a package.
        """
        first, _, rest = name.partition(".")
        if self.is_package and first == self.path.name:
            return f"{self.package}.{rest}".rstrip(".")
        if importer == f"{self.package}.{first}" and not _is_package(importer):
            return None  # `import math` in an environment `math.py`
        spec = PathFinder.find_spec(first, [str(self.path)])
        if spec is None:
            return self._package_beside(first, rest)
        comes_first = spec.origin is not None and not self.is_package
        return f"{self.package}.{name}" if comes_first or not _is_importable(first) else None

    def _package_beside(self, name: str, rest: str) -> str | None:
        other = self.path.parent / name
        is_there = self.is_package and (other / "__init__.py").is_file()
        if not is_there or (_is_importable(name) and not _is_bare_folder(name)):
            return None
        return f"{_finder.add_folder(other).package}.{rest}".rstrip(".")


def _is_package(module: str) -> bool:
    return hasattr(sys.modules.get(module), "__path__")


def _is_importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _is_bare_folder(importable: str) -> bool:
    """Returns whether the import finds only a folder without `__init__.py`."""
    loaded = sys.modules.get(importable)
    spec = importlib.util.find_spec(importable) if loaded is None else loaded.__spec__
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


class _Finder(MetaPathFinder):
    """Finds the modules of environments' folders, and lets nothing else through."""

    def __init__(self) -> None:
        self.folders: dict[str, _Folder] = {}
        """Folders by package."""
        self.files: dict[str, Path] = {}
        """Files that a user named, by their module; their names need not be identifiers."""

    def add_folder(self, path: Path) -> _Folder:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        digest = hashlib.sha1(str(path).encode(), usedforsecurity=False).hexdigest()[:12]
        package = f"{_PREFIX}{re.sub(r'[^0-9A-Za-z_]', '_', path.name)}_{digest}"
        return self.folders.setdefault(package, _Folder(path, package))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self.folders.get(fullname.partition(".")[0])
        if folder is None:
            return None
        spec = self._spec(fullname, folder, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path, folder)
        if spec is None and not folder.path.is_dir():
            raise ModuleNotFoundError(
                f"The module {fullname.partition('.')[2]!r} is in {folder.path}, which this "
                "process cannot see. Import it at the top of the environment's file, or name it "
                "in the environment's `preload`.",
                name=fullname,
            )
        return spec

    def _spec(
        self, fullname: str, folder: _Folder, path: Sequence[str] | None
    ) -> ModuleSpec | None:
        if fullname in self.files:
            return importlib.util.spec_from_file_location(fullname, self.files[fullname])
        if fullname != folder.package:
            return PathFinder.find_spec(fullname, path)
        places = [str(folder.path)]
        if folder.is_package:
            return importlib.util.spec_from_file_location(
                fullname, folder.path / "__init__.py", submodule_search_locations=places
            )
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = places
        return spec


class _Loader(SourceFileLoader):
    """Loads a module whose imports of bare names reach the modules of its folder."""

    def __init__(self, fullname: str, path: str, folder: _Folder) -> None:
        super().__init__(fullname, path)
        self._folder = folder

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the source, past Python's cache: others may import the same file."""
        path = self.get_filename(fullname)
        tree = _OwnImports(self._folder, fullname).visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _OwnImports(ast.NodeTransformer):
    """Turns `import helpers` into `import PACKAGE.helpers as helpers` where the folder has it."""

    def __init__(self, folder: _Folder, module: str) -> None:
        self._folder = folder
        self._module = module

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        found = None if node.level else self._folder.module(node.module or "", self._module)
        if found is None:
            return node
        return ast.copy_location(ast.ImportFrom(found, node.names, 0), node)

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        return [
            ast.copy_location(ast.Import([made]), node)
            for alias in node.names
            for made in self._aliases(alias)
        ]

    def _aliases(self, alias: ast.alias) -> list[ast.alias]:
        found = self._folder.module(alias.name, self._module)
        if found is None:
            return [alias]
        first = alias.name.partition(".")[0]
        made = [ast.alias(found, alias.asname or first)]
        if alias.asname is None and first != alias.name:  # `import a.b` loads `b` and binds `a`
            made.append(ast.alias(self._folder.module(first, self._module) or "", first))
        return made


_finder = _Finder()
