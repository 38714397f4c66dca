"""Runs a target under libFuzzer, which ends the process: `python -m scripts.fuzzing.run MODULE:NAME [its options]`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
INSTRUMENTED = ["ccjax", "ccjax.models.llama3", "ccjax.store", "gguf", "yaml", "bs4", "html.parser", "pypdf"]


def main(argv: Sequence[str]) -> None:
    """Fuzzes until a finding or an option of libFuzzer ends it."""
    module, _, name = argv[1].partition(":")
    with atheris.instrument_imports([*INSTRUMENTED, module], enable_loader_override=False):  # pyright: ignore
        named = importlib.import_module(module)
        target = named.ANY if name == "any" else named.TARGETS[name]
        for imported in target.imports:
            importlib.import_module(imported)

    def once(data: bytes) -> None:
        try:
            target.run(data)
        except target.allowed:
            pass

    atheris.Setup([argv[0], *argv[2:]], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
