"""Turns requests into answers and reuse reports: start-up, the batch loop over cache and runner, idle-time work."""

from ccjax.cache.document_registry import Pin
from ccjax.cache.documents.document_cache import CachedDocument, Removal
from ccjax.cache.warming.passages import WarmedDocument, Warming
from ccjax.config import EngineConfig
from ccjax.engine.engine import Engine
from ccjax.requests import Choice, Delta, Request, RequestTrace, Response, TokenLogprob
from ccjax.sampling import MOST_ANSWERS, Constraint, SamplingParams

__all__ = [
    "MOST_ANSWERS",
    "CachedDocument",
    "Choice",
    "Constraint",
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
