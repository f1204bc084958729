"""Counts the Python code of the tree and holds it against tests/size.toml; `make lint` runs it.

    python -m support.code_size [--rooms]

In: every *.py file that git tracks or would add. Out: files, lines and tokens by top folder; with
--rooms also by the folders one level below. Tokens are those of `tokenize` without comments,
docstrings, line ends and indents: they do not change when code is only laid out anew. Exits with 1
where a folder is over its budget. The budget only falls: a change that adds something takes the
room for it from something else.
"""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def size_of(text: str) -> Counter[str]:
    """Lines and tokens of one module; a module that does not parse has no tokens."""
    size = Counter(files=1, lines=text.count("\n"))
    try:
        docstrings = {
            line
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        size["tokens"] = sum(
            token.type not in _LAYOUT and token.start[0] not in docstrings for token in tokens
        )
    except (SyntaxError, tokenize.TokenError):
        return size
    return size


def sizes() -> dict[str, Counter[str]]:
    """Sums by folder: "envserver" and "envserver/proxy"."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sums: dict[str, Counter[str]] = {}
    for name in listed.splitlines():
        if (path := ROOT / name).exists():
            size = size_of(path.read_text(errors="replace"))
            for folder in {"/".join(name.split("/")[:depth]) for depth in (1, 2)}:
                sums.setdefault(folder, Counter()).update(size)
    return sums


def main(argv: list[str]) -> int:
    budget = tomllib.loads((ROOT / "tests/size.toml").read_text())
    sums = sizes()
    over = []
    print(f"{'folder':44}{'files':>7}{'lines':>9}{'tokens':>10}")
    for folder, limits in budget.items():
        below = [name for name in sorted(sums) if name.startswith(f"{folder}/")]
        for name in (folder, *(below if "--rooms" in argv else ())):
            size = sums[name]
            label = name if name == folder else f"  {name}"
            print(f"{label:44}{size['files']:7}{size['lines']:9,}{size['tokens']:10,}")
        for unit, limit in limits.items():
            if sums[folder][unit] > limit:
                over.append(f"{folder} has {sums[folder][unit]:,} {unit}, {limit:,} are allowed")
    for line in over:
        print(f"{line} (tests/size.toml, which only falls: make room elsewhere).", file=sys.stderr)
    return bool(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
