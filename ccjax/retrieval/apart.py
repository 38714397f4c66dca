"""Parses content from anywhere apart: in processes with limits on memory and time.

A parser may need a quarter of a second to be imported, so that one process imports it and forks for each content.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import Any

_REQUEST, _REPLY = struct.Struct("<QQQ"), struct.Struct("<Q")
"""Seconds, bytes of memory and of the content; bytes of the JSON that follows."""


class Apart:
    """Calls a function of bytes, whose result JSON can hold, in processes of their own.

    Args:
      module, function: its name.
      idle_seconds: the process that forks ends when nothing came for so long.
    """

    def __init__(self, module: str, function: str, *, idle_seconds: float = 10.0) -> None:
        self._arguments = (module, function, str(idle_seconds))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def __call__(self, data: bytes, *, most_memory: int, most_seconds: int) -> Any:
        """The result.

        Raises:
          ValueError: the function raised it, took too much memory or time, or ended its process.
          ChildProcessError: there is no process to read it, such as while the machine has no memory left.
        """
        request = _REQUEST.pack(most_seconds, most_memory, len(data)) + data
        with self._lock:
            reply = self._asked(request) or self._asked(request)  # the process may have ended meanwhile
        if reply is None:
            raise ChildProcessError("the process that reads it ended")
        result, problem = json.loads(reply)
        if problem is not None:
            raise ValueError(problem)
        return result

    def _asked(self, request: bytes) -> bytes | None:
        """The reply; None if the process ended instead."""
        if self._process is None:
            command = [sys.executable, "-m", __name__, *self._arguments]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise ChildProcessError(f"no process to read it can be started: {error}") from None
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        complete = False
        try:
            process.stdin.write(request)
            process.stdin.flush()
            if len(size := process.stdout.read(_REPLY.size)) == _REPLY.size:
                reply = process.stdout.read(length := _REPLY.unpack(size)[0])
                complete = len(reply) == length
                return reply if complete else None
        except BrokenPipeError:
            pass
        finally:
            if not complete:  # also when this call is interrupted: the next one must not get its reply
                self._end()
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # of what is not yet written
            process.communicate()

    def _forget(self) -> None:
        self._lock, self._process = threading.Lock(), None


def _main(module: str, function: str, idle_seconds: str) -> None:
    """What the process does: a reply to each request, until there are none."""
    call = getattr(importlib.import_module(module), function)
    requests = sys.stdin.buffer
    while select.select([requests], [], [], float(idle_seconds))[0] and (head := requests.read(_REQUEST.size)):
        seconds, memory, length = _REQUEST.unpack(head)
        data = requests.read(length)
        begin, end = os.pipe()
        if not (child := os.fork()):
            with open(end, "wb") as out:
                os.dup2(2, 1)  # what parsers print is no reply
                out.write(_result(call, data, seconds, memory))
            os._exit(0)
        os.close(end)
        with open(begin, "rb") as pipe:
            reply = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == -signal.SIGXCPU:
            reply = json.dumps((None, f"too large: to read it takes over {seconds} s")).encode()
        elif status:
            reply = json.dumps((None, f"the process that reads it ended with {status}")).encode()
        sys.stdout.buffer.write(_REPLY.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()


def _result(call: Any, data: bytes, seconds: int, memory: int) -> bytes:
    """(result, None) or (None, what is wrong) as JSON."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    is_limited = sys.platform == "linux"  # elsewhere the limit has no effect, or cannot be set
    if is_limited:
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    try:
        return json.dumps((call(data), None)).encode()
    except BaseException as error:
        if is_limited:  # what was read is still held, and to tell what happened takes memory
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            problem = f"too large: to read it takes over {memory >> 20} MB of memory"
        elif isinstance(error, ValueError):
            problem = str(error)
        return json.dumps((None, problem)).encode()


if __name__ == "__main__":
    _main(*sys.argv[1:])
