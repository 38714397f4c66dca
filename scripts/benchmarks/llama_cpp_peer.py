"""llama.cpp, for comparison: its server in this process (xllamacpp)."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ccjax.loading.named import gguf_path


def file_of(model: str) -> tuple[Path | None, list[str]]:
    """The GGUF file of a named model; None with the reason if llama.cpp cannot be measured here."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None, ["llama.cpp: xllamacpp is not installed"]
    file = gguf_path(model)
    return file, [] if file else [f"llama.cpp: {model} is no GGUF file"]


def prefill_s(model: Path, lengths: Sequence[int], repetitions: int) -> dict[int, list[float]]:
    """Seconds of each run that prefills this many tokens on all cores, after an uncounted one."""
    server = Server(model, 1, max(lengths) + 1)
    return {length: [server.prefill_s(length) for _ in range(repetitions + 1)][1:] for length in lengths}


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
