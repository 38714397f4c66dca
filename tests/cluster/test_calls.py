"""Requests that are answered away from their socket: the application's answer is streamed back part by part."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from ccjax.cluster import calls
from ccjax.cluster.calls import Call, Head, ReplicaResponse, perform, perform_whole
from ccjax.server.app import PASSAGES
from ccjax.types import Document

CALL = Call("POST", b"/v1/a%20b%2Fc", b"x=1&y=%20", ((b"content-type", b"text/plain"),), b"question", ("10.0.0.7", 80))


def start(status=200, *headers):
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data=b"", more=False):
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_the_application_sees_the_original_request():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, message=await receive())
        await send(start(201, (b"a", b"b")))
        await send(body(b"done"))

    call = dataclasses.replace(CALL, passages=(Document("text", "7"),))
    assert asyncio.run(perform_whole(app, call)) == ReplicaResponse(Head(201, ((b"a", b"b"),)), b"done")
    assert seen["message"] == {"type": "http.request", "body": b"question", "more_body": False}
    assert (seen["path"], seen["raw_path"], seen["query_string"]) == ("/v1/a b/c", b"/v1/a%20b%2Fc", b"x=1&y=%20")
    assert (seen["method"], seen["headers"], seen["client"]) == ("POST", list(CALL.headers), CALL.client)
    assert seen[PASSAGES] == (Document("text", "7"),)


def test_response_parts_are_streamed_as_they_are_sent():
    async def check():
        sent, go_on = [], asyncio.Event()

        async def app(scope, receive, send):
            await send(start())
            for number in range(3):
                sent.append(number)
                await send(body(b"%d" % number, more=True))
                await go_on.wait()
                go_on.clear()
            await send(body())

        found = []
        async for piece in perform(app, CALL):
            found.append(piece)
            if isinstance(piece, bytes):
                assert sent == list(range(len(found) - 1))  # the next one is not begun
                go_on.set()
        assert found[1:] == [b"0", b"1", b"2"]

    asyncio.run(asyncio.wait_for(check(), 120))


def test_a_slow_reader_blocks_the_application():
    async def check():
        sent = []

        async def app(scope, receive, send):
            await send(start())
            for number in range(50):
                await send(body(b"x", more=True))
                sent.append(number)
            await send(body())

        async with contextlib.aclosing(perform(app, CALL)) as pieces:
            await anext(pieces)
            for _ in range(100):  # it has many turns to go on in
                await asyncio.sleep(0)
            assert len(sent) < 3

    asyncio.run(asyncio.wait_for(check(), 120))


@pytest.mark.parametrize("is_sending", [True, False])
def test_application_receives_client_disconnect(is_sending):
    async def check():
        told = []

        async def app(scope, receive, send):
            await receive()
            await send(start())
            await send(body(b"first", more=True))
            if is_sending:
                for _ in range(5):
                    await send(body(b"more", more=True))
            told.append(await receive())

        async with contextlib.aclosing(perform(app, CALL)) as pieces:
            assert isinstance(await anext(pieces), Head) and await anext(pieces) == b"first"
            assert told == []
        assert told == [{"type": "http.disconnect"}]

    asyncio.run(asyncio.wait_for(check(), 120))


def test_an_application_that_ignores_a_disconnect_is_cancelled(monkeypatch):
    monkeypatch.setattr(calls, "_TO_LEAVE_S", 0.05)
    ended = []

    async def app(scope, receive, send):
        await send(start())
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def check():
        async with contextlib.aclosing(perform(app, CALL)) as pieces:
            await anext(pieces)
        assert ended == [True]

    asyncio.run(asyncio.wait_for(check(), 120))


def test_cancelling_the_task_tells_the_application():
    told, has_question = [], asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        has_question.set()
        told.append(await receive())

    async def check():
        running = asyncio.ensure_future(perform_whole(app, CALL))
        await has_question.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert told == [{"type": "http.disconnect"}]

    asyncio.run(asyncio.wait_for(check(), 120))


@pytest.mark.parametrize("begins", [False, True])
def test_application_exception_propagates(begins):
    async def app(scope, receive, send):
        if begins:
            await send(start())
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(perform_whole(app, CALL))


def test_an_exception_after_the_answer_is_not_raised():
    async def app(scope, receive, send):
        await send(start(500))
        await send(body(b"sorry"))
        raise ValueError("logged by whoever answered")

    assert asyncio.run(perform_whole(app, CALL)) == ReplicaResponse(Head(500, ()), b"sorry")


@pytest.mark.parametrize("sends", [[], [start()], [start(), body(b"half", more=True)]])
def test_an_application_that_ends_without_an_answer_is_an_error(sends):
    async def app(scope, receive, send):
        for message in sends:
            await send(message)

    with pytest.raises(RuntimeError, match="ended without an answer"):
        asyncio.run(perform_whole(app, CALL))


def test_large_bodies_pass_in_both_directions():
    async def app(scope, receive, send):
        message = await receive()
        await send(start())
        await send(body(message["body"][::-1]))

    data = bytes(range(256)) * 40_000  # 10 MB
    answer = asyncio.run(perform_whole(app, dataclasses.replace(CALL, body=data)))
    assert answer.body == data[::-1]
