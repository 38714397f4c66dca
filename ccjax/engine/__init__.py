"""The meeting point of policy, store and models: turns a request into an answer and a reuse report."""

from ccjax.engine.config import EngineConfig
from ccjax.engine.engine import Engine
from ccjax.engine.requests import Delta, Request, Response, SamplingParams, TokenLogprob

__all__ = ["Delta", "Engine", "EngineConfig", "Request", "Response", "SamplingParams", "TokenLogprob"]
