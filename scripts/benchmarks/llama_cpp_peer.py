"""llama.cpp, for comparison: its own llama-bench if it is installed, else its server in this process (xllamacpp)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import BenchmarkError

NAME = "llama-bench"


def find(folder: Path | None) -> Path | None:
    """The program in a folder or its `bin`, or on PATH if no folder is given; None if PATH lacks it.

    Raises:
      BenchmarkError: the folder lacks it.
    """
    if folder is None:
        found = shutil.which(NAME)
        return Path(found) if found else None
    found = shutil.which(NAME, path=os.pathsep.join([str(folder), str(folder / "bin")]))
    if found is None:
        raise BenchmarkError(f"--llama-cpp: wanted a folder with {NAME}, got {folder}")
    return Path(found)


def prefill_s(program: Path | None, model: Path, lengths: Sequence[int], repetitions: int) -> dict[int, list[float]]:
    """Seconds of each run that prefills this many tokens on all cores, after an uncounted one.

    Args:
      program: llama-bench; None for xllamacpp.

    Raises:
      BenchmarkError: the program does not run, or prints something else.
    """
    if program is None:
        server = Server(model, 1, max(lengths) + 1)
        return {length: [server.prefill_s(length) for _ in range(repetitions + 1)][1:] for length in lengths}
    folder = program.resolve().parent
    libraries = [str(folder), str(folder / "lib"), str(folder.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    command = [str(program), "-m", str(model), "-p", ",".join(map(str, lengths))]
    command += f"-n 0 -r {repetitions} -t {os.cpu_count()} -o json".split()
    try:
        environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found = {int(row["n_prompt"]): [ns / 1e9 for ns in row["samples_ns"]] for row in json.loads(done.stdout)}
        return {length: found[length] for length in lengths}
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchmarkError(f"{program}: exit code {error.returncode}: {last}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{program}: wanted llama-bench's JSON, got {type(error).__name__}: {error}") from error


def has_package() -> bool:
    """Whether xllamacpp is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def prompt(number: int, num_tokens: int) -> list[int]:
    """Tokens of a prompt, different for each number, and in any vocabulary."""
    return [3 + (31 * number + 7 * position) % 200 for position in range(num_tokens)]


def in_float32(source: Path, target: Path) -> Path:
    """Writes a GGUF file with the same weights in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind.name == "ARRAY" else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class Server:
    """llama.cpp's server in this process, on all cores."""

    def __init__(self, model: Path, num_slots: int, num_tokens: int) -> None:
        """`num_tokens`: of all requests at once, answers included."""
        xllamacpp: Any = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.verbosity = num_tokens, num_slots, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
        self._num_slots = num_slots
        self._server = xllamacpp.Server(params)

    def answer(self, token_ids: Sequence[int], num_answer_tokens: int) -> dict[str, Any]:
        """The greedy answer of this many tokens, as of POST /v1/completions, with llama.cpp's timings."""
        return self._server.handle_completions(
            {
                "prompt": list(token_ids),
                "n_predict": num_answer_tokens,
                "cache_prompt": False,
                "temperature": 0,
                "ignore_eos": True,
            }
        )

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of a prefill of this many tokens."""
        return self.answer(prompt(0, num_tokens), 1)["timings"]["prompt_ms"] / 1e3

    def tokens_per_s(self, count: int, num_prompt_tokens: int, num_answer_tokens: int) -> float:
        """Tokens per second of `count` answers while all of them are being decoded."""

        def predicted_s(number: int) -> float:
            done = self.answer(prompt(number, num_prompt_tokens), num_answer_tokens)
            return done["timings"]["predicted_ms"] / 1e3

        with ThreadPoolExecutor(count) as pool:
            # The shortest is that of the last one to begin: the others wait for its prompt.
            return count * num_answer_tokens / min(pool.map(predicted_s, range(count)))
