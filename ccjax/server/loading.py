"""Loads a model's engine and the documents of the server."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ccjax.config import DEMO, DocumentOptions
from ccjax.engine import Engine
from ccjax.loading.model import ASSETS, DEMO_CORPUS, Progress
from ccjax.loading.named import TOY
from ccjax.retrieval import Retriever, default_embedder
from ccjax.runner.compiler_threads import find_compilers
from ccjax.text import Tokenizer


def documents_directory(model: str, options: DocumentOptions) -> Path | None:
    """Directory of the documents of a server of this model; None for none."""
    if options.docs == DEMO:
        return DEMO_CORPUS if model == TOY else ASSETS / "handbook"
    return None if options.docs is None else Path(options.docs)


def load_engine(model: str, settings: Mapping[str, Any], progress: Progress | None = None) -> Engine:
    """The engine of a model directory, or of "demo".

    Args:
      settings: fields of `EngineConfig`; dtype may be "auto", the default.

    Raises:
      ConfigError, CheckpointError, StoreIdentityError, StoreUnavailableError: as `Engine.from_pretrained`.
    """
    find_compilers()
    return Engine.from_pretrained(model, progress=progress, **settings)


def open_documents(
    model: str,
    options: DocumentOptions,
    tokenizer: Tokenizer | None,
    progress: Progress | None = None,
    *,
    warmup: bool = False,
) -> Retriever | None:
    """The updated index of the documents, ready for questions after a `warmup`; None if the server has none.

    Raises:
      ValueError, OSError: a setting, the embedder or the directory cannot be used; the message names the argument.
    """
    directory = documents_directory(model, options)
    if directory is None:
        return None
    if tokenizer is None:
        raise ValueError("docs: wanted a model with tokenizer files, to cut documents into passages")
    try:
        embedder = None if options.embedder == "auto" else default_embedder(options.embedder)
    except (ValueError, OSError) as error:
        message = str(error).removeprefix("directory: ").removeprefix("embedder: ")
        raise ValueError(f"embedder: {message}") from error
    settings = {name: getattr(options, name) for name in DocumentOptions.model_fields}
    settings |= {"embedder": embedder, "index_dir": index_directory(directory, options)}
    if options.index_dir is None:
        settings |= {"others": settings["index_dir"].parent}
    retriever = Retriever(directory, count_tokens=token_counter(tokenizer), progress=progress, **settings)
    if not retriever.num_passages:
        failed, skipped = retriever.report.failed, retriever.report.skipped_text()
        retriever.close()
        why = skipped + (f"; {': '.join(failed[0])}" if failed else "")
        raise ValueError(f"docs: wanted a directory with documents, got none in {directory}{why}")
    retriever.give_way(lambda: True)  # to the compilation of the model's steps, until a server says what is wanted
    if warmup:
        try:
            retriever.warmup()
        except BaseException:
            retriever.close()
            raise
    return retriever


def index_directory(directory: Path, options: DocumentOptions) -> Path:
    """Where the index of a directory of documents is."""
    key = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return user_cache() / "index" / key if options.index_dir is None else Path(options.index_dir)


def token_counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """The length function by which documents are cut into passages."""
    return lambda text: len(tokenizer.encode(text, allow_special=False))


def user_cache() -> Path:
    """The cache directory of ccjax, whose contents can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ccjax"


def use_compile_cache(directory: Path) -> None:
    """Enables JAX's persistent compilation cache. Quick compilations are included: there are hundreds of them.

    Raises:
      OSError: the directory cannot be used.
    """
    import jax

    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
