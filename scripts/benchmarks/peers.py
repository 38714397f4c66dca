"""llama.cpp's server in this process, and a full prefill in Hugging Face transformers, for comparison on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from ccjax.loading.named import gguf_path
from ccjax.models.llama3 import LlamaConfig


def missing(*packages: str) -> str | None:
    """Why peers of these packages cannot be measured; None if they can."""
    if jax.default_backend() != "cpu":
        return "it would run on the CPU"
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def full_prefill(config: LlamaConfig) -> Callable[[int], float]:
    """A function from a number of tokens to the seconds to the first token in transformers, for a model of the same
    shapes with its own random weights, sdpa attention, float32, all cores."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig as PeerConfig  # pyright: ignore[reportMissingImports]
    from transformers import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    raw = {name: value for name, value in config.to_hf().items() if name not in ("architectures", "model_type")}
    peer_config = PeerConfig(**raw)
    peer_config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(peer_config).eval().float()

    def measure(num_tokens: int) -> float:
        ids = torch.randint(config.vocab_size, (1, num_tokens))
        started = time.perf_counter()
        with torch.inference_mode():
            int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - started

    return measure


def gguf_file(model: str) -> tuple[Path | None, str | None]:
    """The GGUF file of a named model, or why llama.cpp cannot be measured on it."""
    reason = missing("xllamacpp")
    file = None if reason else gguf_path(model)
    return file, reason or (None if file else f"{model} is no GGUF file")


def prompt(number: int, num_tokens: int) -> list[int]:
    """Tokens of a prompt, different for each number, and in any vocabulary."""
    return [3 + (31 * number + 7 * position) % 200 for position in range(num_tokens)]


def converted(source: Path, target: Path, matrices: str = "F32") -> Path:
    """Writes a GGUF file with the same weights in float32, or its matrices in another type of GGML (Q8_0)."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind.name == "ARRAY" else None)
    for tensor in reader.tensors:
        values, format_ = gguf.dequantize(tensor.data, tensor.tensor_type), gguf.GGMLQuantizationType[matrices]
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(values, format_), raw_dtype=format_)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class LlamaCpp:
    """llama.cpp's server in this process (xllamacpp), on all cores."""

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
        greedy = {"cache_prompt": False, "temperature": 0, "ignore_eos": True}
        body = {"prompt": list(token_ids), "n_predict": num_answer_tokens, **greedy}
        return self._server.handle_completions(body)

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
