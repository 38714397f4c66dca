"""A real HTTP server that streams chats as it is told to: what comes when stands in the question."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn


def body(number: int, max_tokens: int = 3, **script: Any) -> dict[str, Any]:
    """A chat whose question is a script: `first_s`, `gap_s`, `status`, `ending`, and `until`: so many
    must have been under way at once before it is answered."""
    question = json.dumps({"number": number, **script})
    return {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "stream": True}


@dataclasses.dataclass
class Scripted:
    """What the server saw: when each text went out (`time.perf_counter`).

    Attributes:
      noted: if this is a list, no event is sent before something was added to it behind the one before.
    """

    url: str = ""
    noted: list[float] | None = None
    sent_s: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    most_at_once: int = 0
    num_open: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # uvicorn runs without a lifespan then
            raise NotImplementedError
        content = b""
        while (message := await receive()).get("more_body"):
            content += message["body"]
        request = json.loads(content + message["body"])
        script = json.loads(request["messages"][0]["content"])
        self.num_open += 1
        self.most_at_once = max(self.most_at_once, self.num_open)
        try:
            await self._answer(script, request["max_tokens"], send)
        finally:
            self.num_open -= 1

    async def _answer(self, script: dict[str, Any], max_tokens: int, send: Any) -> None:
        status, ending = script.get("status", 200), script.get("ending", "whole")
        await send({"type": "http.response.start", "status": status, "headers": []})

        async def put(value: Any, end: bool = False) -> None:
            part = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            if ending != "split":
                num_noted = len(self.noted or ())
                await send({"type": "http.response.body", "body": part, "more_body": not end})
                while self.noted is not None and not end and len(self.noted) == num_noted:
                    await asyncio.sleep(0.001)
                return
            await send({"type": "http.response.body", "body": part[:9], "more_body": True})
            await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": part[9:], "more_body": not end})

        if status != 200:
            return await put({"error": {"message": "no"}}, end=True)
        await put({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        while self.most_at_once < script.get("until", 0):
            await asyncio.sleep(0.001)
        await asyncio.sleep(script.get("first_s", 0.0))
        sent = self.sent_s[script["number"]] = []
        for token in range(max_tokens):
            if token:
                await asyncio.sleep(script.get("gap_s", 0.0))
            if ending == "abort" and token == 1:
                raise ConnectionAbortedError
            if ending == "hang" and token == 1:
                await asyncio.sleep(30.0)
            sent.append(time.perf_counter())
            if ending != "mute":
                await put({"choices": [{"delta": {"content": f"{script['number']}."}}]})
        if ending == "error":
            await put({"error": {"message": "the server failed"}})
        num_tokens = max_tokens - (ending == "short")
        reuse = {"computed_share": 0.25, "prompt_tokens": 40}
        usage = {"prompt_tokens": 40, "completion_tokens": num_tokens}
        await put({"choices": [], "usage": usage, "reuse": reuse}, end=ending == "no done")
        if ending != "no done":
            await put("[DONE]", end=True)


@contextlib.contextmanager
def scripted_server() -> Iterator[Scripted]:
    """The server on a free port and a thread of its own."""
    app = Scripted()
    listener = socket.create_server(("127.0.0.1", 0))
    app.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield app
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
