"""Fails on retired words in names, comments, docstrings, messages and docs: python scripts/words.py [FILE ...]

One concept has one word (the glossary in docs/architecture.md). Names are checked where they are defined, part by part;
uses of names from elsewhere are not. Without FILEs all product code and docs are checked.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ccjax", "models", "pallas_kernels", "store", "scripts")

ALLOWED = ("scripts/words.py",)
"""Paths that are not checked: this list itself."""

NO_MESSAGES = ("ccjax/demo/",)
"""Paths whose strings are data: texts of the demo corpus."""

NAMES = {
    "ahead": "what is done early: preload, speculate, lookahead",
    "door": "admission",
    "doors": "admission",
    "guest": "exclusive access",
    "in_line": "queued",
    "let_go": "release",
    "let_in": "exclusive access",
    "news": "change feed",
    "newcomer": "new entry",
    "nobody": "none",
    "parked": "held",
    "seat": "slot, admission",
    "seating": "admission",
    "seats": "slots, max_num_seqs",
    "sibling": "sequence of a request",
    "siblings": "sequences of a request",
    "somebody": "a process, a client",
    "take_in": "apply, insert, handle",
    "takes_in": "applies, inserts, handles",
    "tell_others": "announce",
    "welcome": "accept, admit",
    "whoever": "caller, client, process",
}
"""Retired parts of names, lower case, and what to say instead."""

PROSE = {
    r"doors?": "admission",
    r"guests?": "exclusive access",
    r"(?:in|into|out of|left the) line(?! ?[\d{]| with\b)": "queued, the queue",
    r"newcomers?": "new entry",
    r"news": "change feed, changes",
    r"(?:nobody|somebody|anybody|everybody|whoever|whomever)": "the process, client or caller",
    r"seat(?:s|ed|ing)?": "slot, admission",
    r"siblings?": "sequences of a request",
    r"(?:take|takes|took|taken|taking) in": "apply, store, insert",
    r"tells? others": "announce",
    r"welcom(?:e|es|ed|ing)": "accept",
}
"""Retired words of prose as regular expressions, and what to say instead."""

_PROSE = [(re.compile(rf"\b{words}\b", re.IGNORECASE), instead) for words, instead in PROSE.items()]
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_CODE = re.compile(r"`[^`]*`|\{[^{}]*\}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a retired word was found."""
    parser = argparse.ArgumentParser(prog="words.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    files = [path.resolve() for path in parser.parse_args(argv).files] or list(product_files())
    findings = [
        finding
        for path in files
        for finding in (check_page if path.suffix == ".md" else check)(path.read_text("utf-8"), _name(path))
    ]
    for finding in findings:
        print(finding)
    return int(bool(findings))


def product_files() -> Iterator[Path]:
    """The Python files of the product, without those in `ALLOWED`, README and the pages of docs/."""
    yield from (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path and not _name(path).startswith(ALLOWED):
                yield path


def check(source: str, name: str) -> list[str]:
    """A line for each retired word in the source of a file, by line number."""
    found = [*_names(source), *_prose(source, messages=not name.startswith(NO_MESSAGES))]
    return [f"{name}:{line}: {word!r}: say {instead}" for line, word, instead in sorted(set(found))]


def check_page(text: str, name: str) -> list[str]:
    """As `check`, for a page of Markdown; blocks of code are not read."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            found += [f"{name}:{number}: {word!r}: say {instead}" for word, instead in _retired(line)]
    return found


def _names(source: str) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name, line = node.name, node.lineno
        elif isinstance(node, ast.arg):
            name, line = node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name, line = node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        else:
            continue
        parts = f"_{_CAMEL.sub('_', name).lower()}_"
        for part, instead in NAMES.items():
            if f"_{part}_" in parts:
                yield line, name, instead


def _prose(source: str, *, messages: bool) -> Iterator[tuple[int, str, str]]:
    docstrings = {line for node in ast.walk(ast.parse(source)) for line in _docstring_lines(node)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if not (token.type == tokenize.COMMENT or is_docstring or (messages and _is_string(token))):
            continue
        for word, instead in _retired(" ".join(token.string.split())):
            yield token.start[0], word, instead


def _retired(text: str) -> Iterator[tuple[str, str]]:
    text = _CODE.sub("0", text)
    for pattern, instead in _PROSE:
        for match in pattern.finditer(text):
            yield match.group(), instead


def _is_string(token: tokenize.TokenInfo) -> bool:
    # From Python 3.12 on an f-string comes in parts.
    is_string = token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
    return is_string and " " in token.string  # a single word is a key or an option


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        yield node.lineno


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


if __name__ == "__main__":
    sys.exit(main())
