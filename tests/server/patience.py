"""httpx's functions with patience: its default, 5 s, fails on a busy machine and says nothing of a server."""

import functools

import httpx

get = functools.partial(httpx.get, timeout=60.0)
post = functools.partial(httpx.post, timeout=60.0)
