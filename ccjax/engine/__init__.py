"""The meeting point of policy, store and models: turns a request into an answer and a reuse report."""

from ccjax.config import EngineConfig
from ccjax.engine.document_cache import CachedDocument, Removal, WarmedDocument, Warming
from ccjax.engine.documents import Pin
from ccjax.engine.engine import Engine
from ccjax.engine.requests import MOST_ANSWERS, Choice, Delta, Request, Response, SamplingParams, TokenLogprob
from ccjax.engine.trace import RequestTrace

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
