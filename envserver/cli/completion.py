"""`envserver completion bash|zsh|fish`: completion of commands, flags, environments and choices.

The script calls `envserver completion candidates -- WORD...` to complete the last word. Each output
line has a candidate, a tab and a description; the line `:files` stands for matching files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from . import Command, all_commands, find_command, subcommand

if TYPE_CHECKING:
    from ..running.options import Option

FILES = ":files"

HELP = """Usage: envserver completion bash|zsh|fish

Prints the completion script of a shell. To load it:

  bash  echo 'eval "$(envserver completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(envserver completion zsh)"' >> ~/.zshrc   (after compinit)
  fish  envserver completion fish > ~/.config/fish/completions/envserver.fish"""

SCRIPTS = {
    "bash": r"""_envserver() {
    local current="${COMP_WORDS[COMP_CWORD]}" line file
    local words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    [ "$current" = "=" ] && current=""
    COMPREPLY=()
    while IFS= read -r line; do
        if [ "$line" = ":files" ]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$current")
        else
            COMPREPLY+=("${line%%$'\t'*}")
        fi
    done < <("${COMP_WORDS[0]}" completion candidates -- "${words[@]}" 2>/dev/null)
}
complete -F _envserver envserver
""",
    "zsh": r"""#compdef envserver
_envserver() {
    local -a lines described
    local line
    lines=("${(@f)$("${words[1]}" completion candidates -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in $lines; do
        if [[ $line == ":files" ]]; then
            _files
        else
            described+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
        fi
    done
    if (( ${#described} )); then _describe envserver described; fi
}
compdef _envserver envserver
""",
    "fish": r"""function __envserver_candidates
    set -l words (commandline -opc) (commandline -ct)
    for line in ($words[1] completion candidates -- $words[2..-1] 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c envserver -f -a '(__envserver_candidates)'
""",
}


def run(argv: list[str]) -> int:
    if argv[:2] == ["candidates", "--"]:
        for candidate, description in candidates(argv[2:]):
            sys.stdout.write(f"{candidate}\t{description}\n" if description else f"{candidate}\n")
        return 0
    if argv and argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        from envserver_records.errors import UsageError

        raise UsageError(f"Which shell? envserver completion {'|'.join(SCRIPTS)}.")
    sys.stdout.write(SCRIPTS[argv[0]])
    return 0


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`words` ends with the word to complete, which may be empty. bash splits `--name=va` into
    three words, other shells do not."""
    *before, current = words or [""]
    if current == "=":
        current = ""
    elif before and before[-1] == "=":
        before.pop()
    prefix = ""
    if current.startswith("--") and "=" in current:
        flag, _, current = current.partition("=")
        before, prefix = [*before, flag], f"{flag}="
    for value, description in _possible(before, current):
        if value == FILES or value.startswith(current):
            yield (value if value == FILES else prefix + value), description


def _possible(before: Sequence[str], current: str) -> Iterator[tuple[str, str]]:
    if not before:
        yield from ((name, command.summary) for name, command in all_commands().items())
        return
    named = find_command(before[0])
    if named is None:
        return
    command, rest = subcommand(named, list(before[1:]))
    if before[0] == "completion":
        yield from ((shell, "") for shell in SCRIPTS)
        return
    if not rest and not current.startswith("-"):
        yield from ((word, below.summary) for word, below in command.words.items())
    if command.module and rest and rest[-1] == "--env":
        yield from _environments()
    elif command.module:
        yield from _of_command(command, rest, current)


def _of_command(command: Command, rest: Sequence[str], current: str) -> Iterator[tuple[str, str]]:
    spec = command.load_spec()
    if spec is None:
        return
    options = spec.options(rest)
    if rest and rest[-1].startswith("--"):
        option = options.get(spec.path_of(rest[-1], options))
        if option is not None and not option.is_switch:
            yield from _values(option)
            return
    if current.startswith("-"):
        yield from _flags(options, spec.shown_names(), current)
    elif spec.arguments:
        yield FILES, ""


def _flags(
    options: Mapping[str, Option], names: Mapping[str, str], current: str
) -> Iterator[tuple[str, str]]:
    yield "--config", "YAML file with settings"
    yield "--help", "Show the frequent settings; --help all shows every one"
    for path, option in options.items():
        name = names.get(path, f"--{path}")
        if "*" in path or not name.startswith("--"):
            continue
        yield name, option.first_sentence
        if option.is_switch and current.startswith("--no"):
            yield f"--no-{name[2:]}", option.first_sentence


def _values(option: Option) -> Iterator[tuple[str, str]]:
    yield from ((choice, "") for choice in option.choices)
    if not option.choices:
        yield FILES, ""


def _environments() -> Iterator[tuple[str, str]]:
    from importlib.metadata import entry_points

    from ..registry.installed import with_own_interpreter

    names = {point.name for point in entry_points(group="envserver.environments")}
    names.update(with_own_interpreter())
    yield from ((name, "") for name in sorted(names))
    yield FILES, ""
