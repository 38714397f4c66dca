"""The worker process of a compilation: loads the model once and carries out commands one after the other."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ccjax.cache.documents.pruning import Pruned
from ccjax.cache.warming.shared import SharedVariant
from ccjax.engine import Engine, EngineConfig
from ccjax.evaluation.questions import read_questions
from ccjax.loading.devices import with_dtype
from ccjax.loading.model import LoadedModel, load_model
from ccjax.policy.strategies import get_strategy
from ccjax.precompute.estimate import file_system_of
from ccjax.precompute.messages import Collection, Failure, Settings, WarmingWork
from ccjax.precompute.plan import SPARE_NEIGHBOURS, Surroundings, make_plan
from ccjax.precompute.quality import Quality, measure_quality
from ccjax.precompute.stored import Sizes, stored_ids
from ccjax.retrieval import Retriever
from ccjax.runner.device import kv_spec_of
from ccjax.server.loading import open_documents, use_compile_cache
from ccjax.store.errors import StoreError
from ccjax.store.spec import StoreIdentity
from ccjax.store.usage import DISK
from ccjax.types import Chunk, Document

logger = logging.getLogger(__name__)

_ROUNDS = 3
_SAMPLE = ".ccjax-sample-"
_LEFT_OVER_S = 3600.0


class Worker:
    """One model, and an engine over the store once that is open."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._received_end = False
        self._engine: Engine | None = None
        self._retriever: Retriever | None = None
        self._chunks: tuple[Chunk, ...] = ()
        use_compile_cache(Path(settings.compile_cache))
        wanted = with_dtype(settings.engine)
        # These engines serve no requests, so they need no pages for many of them.
        wanted = {**wanted, "store_optional": False}
        self._config = EngineConfig(**{**wanted, "max_num_seqs": 1, "share_computation": True})
        self._server_config = EngineConfig(**wanted)
        self._model: LoadedModel = load_model(
            settings.model,
            dtype=self._config.dtype,
            quantization=self._config.quantization,
            tokenizer=self._config.tokenizer,
            tensor_parallel_size=self._config.tensor_parallel_size,
            progress=self._progress,
        )

    def end(self, *_: Any) -> None:
        """Interrupts the current work at the next layer."""
        self._received_end = True

    def is_cancelled(self) -> bool:
        """True once the coordinator sent anything or is gone."""
        return self._received_end or self._connection.poll()

    def read(self) -> Collection:
        """Reads, splits and embeds the documents as a server does, and determines what the store lacks."""
        settings, model, config = self._settings, self._model, self._config
        self._retriever = retriever = self._open_documents()
        passages = [passage for document_id in retriever.document_ids for passage in retriever.passages(document_id)]
        documents = tuple(passage.as_document() for passage in passages)
        # Without a store, so that an estimate leaves no trace in it.
        with Engine(model, config.replace(store=None)) as engine:
            system, num_tokens = engine.documents.prompt_overhead()
            frame = engine.documents.frame
            around = Surroundings(system, num_tokens, engine.max_model_len, frame.chunks(""))
            self._chunks = engine.documents.passage_chunks(documents)
        neighbours: dict[int, list[int]] = {}
        if settings.num_neighbours:
            numbers = {passage.passage_id: number for number, passage in enumerate(passages)}
            found = retriever.neighbours(settings.num_neighbours + SPARE_NEIGHBOURS)
            neighbours = {numbers[key]: [numbers[neighbour] for neighbour in others] for key, others in found.items()}
        spec = kv_spec_of(model.config, config.dtype)
        plan = make_plan(
            self._chunks,
            around,
            self.stored(),
            neighbours=neighbours,
            num_neighbours=settings.num_neighbours,
            compares="deviations" in get_strategy(config.strategy).needs,
            sizes=Sizes(spec, self._identity, config.disk_kv_dtype).of,
        )
        unusable = retriever.report.failed
        return Collection(documents, frame.documents, plan, unusable, config.dtype, spec.num_bytes(1))

    def check_questions(self, path: Path, limit: int | None) -> None:
        """Checks that the questions can be asked at the end."""
        if len(read_questions(path, limit=limit, find=lambda text: [Document(text)])) < 2:
            raise ValueError(f"questions: wanted at least two, got one in {path}")

    def stored(self) -> frozenset[str]:
        """Ids of the variants in the store now."""
        assert self._config.store is not None
        return stored_ids(self._config.store, self._identity)

    def calibrate(self, work: WarmingWork) -> float:
        """Seconds to compute and store a sample under real conditions, in a temporary store on the same file system;
        done twice before, so that nothing is compiled during the measurement."""
        assert self._config.store is not None
        place = file_system_of(self._config.store)
        for left_over in Path(place.directory).glob(f"{_SAMPLE}*") if place else ():
            if time.time() - left_over.stat().st_mtime > _LEFT_OVER_S:  # of a killed run
                shutil.rmtree(left_over, ignore_errors=True)
        seconds = 0.0
        for done in range(_ROUNDS):
            self._progress("sample", done, _ROUNDS)
            with tempfile.TemporaryDirectory(prefix=_SAMPLE, dir=place and place.directory) as directory:
                config = self._config.replace(store=Path(directory).as_uri(), disk_cache_bytes=None)
                with Engine(self._model, config) as engine:
                    # The system prompt and the frame are there in the real run.
                    frame = engine.documents.frame.documents
                    for number, passage in enumerate(frame):
                        engine.documents.warm_shared([passage], behind=[frame[:number]])
                    started = time.perf_counter()
                    self._warm(engine, work)
                    seconds = time.perf_counter() - started
        self._progress("sample", _ROUNDS, _ROUNDS)
        return seconds

    def open(self) -> int:
        """Opens the store; returns the bytes in use."""
        self._engine = Engine(self._model, self._config)
        return self._engine.cache.usage()[DISK].used_bytes

    def note(self, numbers: tuple[int, ...]) -> None:
        """Records the documents of passages that are stored already."""
        assert self._engine is not None
        self._engine.documents.note_passages([self._chunks[number] for number in numbers])

    def prune(self) -> Pruned:
        """Drops variants of passages that no longer exist."""
        assert self._engine is not None
        return self._engine.documents.prune({chunk.chunk_id for chunk in self._chunks})

    def compute(self, work: WarmingWork) -> tuple[SharedVariant, ...]:
        """Computes what is missing of some work; returns the results so far if interrupted."""
        assert self._engine is not None
        return self._warm(self._engine, work)

    def _warm(self, engine: Engine, work: WarmingWork) -> tuple[SharedVariant, ...]:
        return engine.documents.warm_shared(work.documents, behind=work.behind, is_cancelled=self.is_cancelled)

    def ask(self, path: Path, top_k: int, limit: int | None, max_new_tokens: int) -> Quality:
        """Asks questions over the store, with passages found as in a server."""
        if self._retriever is None:  # the worker that read the documents has died
            self._retriever = self._open_documents()
        self.close_engine()
        return measure_quality(
            self._model, self._server_config, path, self._retriever, top_k, limit, max_new_tokens, self._progress
        )

    def close_engine(self) -> None:
        """Writes what is pending and closes the store."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _open_documents(self) -> Retriever:
        settings = self._settings
        retriever = open_documents(settings.model, settings.documents, self._model.tokenizer, self._progress)
        if retriever is None:
            raise ValueError("docs: wanted a directory of documents, or demo")
        retriever.give_way(lambda: False)
        retriever.complete()
        return retriever

    @property
    def _identity(self) -> StoreIdentity:
        return StoreIdentity(self._model.fingerprint, self._config.tenant_salt)

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._connection.send(("progress", (stage, done, total)))


def run(connection: Connection, settings: Settings) -> None:
    """Serves commands until it receives "end" or the connection breaks. Ignores Ctrl-C, which is for the
    coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings.environment)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    worker: Worker | None = None
    try:
        worker = _answer(connection, lambda: Worker(settings, connection), says=False)
        if worker is None:
            return
        signal.signal(signal.SIGTERM, worker.end)
        while True:
            command, *arguments = connection.recv()
            if command == "end":
                return
            method = getattr(worker, command)
            _answer(connection, lambda method=method, arguments=arguments: method(*arguments))
    except (EOFError, OSError):  # the coordinator is gone
        pass
    finally:
        if worker is not None:
            worker.close_engine()


def _answer(connection: Connection, call: Callable[[], Any], *, says: bool = True) -> Any:
    """Sends the result of a call (or, without `says`, only that it returned), or the exception, and returns None
    then."""
    try:
        value = call()
    except (ValueError, OSError, StoreError) as error:
        if isinstance(error, BrokenPipeError | ConnectionResetError):
            raise
        connection.send(("failed", Failure(True, " ".join(str(error).split()) or type(error).__name__)))
        return None
    except Exception as error:
        logger.exception("a worker failed")
        connection.send(("failed", Failure(False, f"{type(error).__name__}: {error}")))
        return None
    connection.send(("done", value if says else None))
    return value
