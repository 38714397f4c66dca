"""Turns requests into answers and reuse reports: start-up, the batch loop over cache and runner, idle-time work."""

from ccjax.cache.documents.document_cache import CachedDocument, Removal
from ccjax.cache.documents.registry import Pin
from ccjax.cache.documents.warming import WarmedDocument, Warming
from ccjax.config import EngineConfig
from ccjax.engine.engine import Engine
from ccjax.requests import (
    MOST_ANSWERS,
    Choice,
    Delta,
    Request,
    RequestTrace,
    Response,
    SamplingParams,
    TokenLogprob,
)

__all__ = [
    "MOST_ANSWERS",
    "CachedDocument",
    "Choice",
    "Delta",
    "Engine",
    "EngineConfig",
    "Pin",
    "Removal",
    "Request",
    "RequestTrace",
    "Response",
    "SamplingParams",
    "TokenLogprob",
    "WarmedDocument",
    "Warming",
]
