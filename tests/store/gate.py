"""A TCP relay in front of a test server, which can fail like networks."""

from __future__ import annotations

import contextlib
import re
import socket
import threading


class Gate:
    """Listens on `port` and passes bytes on to the server at `upstream_port`.

    Attributes:
      cuts: how many more of the requests that match `cut` (a pattern of their first bytes) reach the server while its
        answer gets lost: the connection is closed in place of it.
      is_silent_after_cut: the server falls silent with the first lost answer.
    """

    cut = re.compile(rb"(PUT|POST) [^ ]*records")

    def __init__(self, upstream_port: int):
        self.cuts = 0
        self.is_silent_after_cut = False
        self._upstream = ("127.0.0.1", upstream_port)
        self._is_silent = False
        self._connections: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port = self._listener.getsockname()[1]

    def shut(self) -> None:
        """Refuses connections, and breaks existing ones."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which close alone would not
        self._listener.close()
        self._break()

    def silence(self) -> None:
        """Accepts connections and requests, and answers nothing."""
        self._is_silent = True
        self._break()

    def open(self) -> None:
        """Relays everything again, on new connections."""
        self._break()
        self._is_silent = False
        if self._listener.fileno() < 0:
            self._listener = self._listen(self.port)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _break(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._connections.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._is_silent:
                while client.recv(1 << 16):
                    pass
            else:
                with socket.create_connection(self._upstream) as server:
                    self._connections.add(server)
                    self._relay(client, server)
        self._connections.discard(client)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        is_cut = threading.Event()

        def requests() -> None:
            with contextlib.suppress(OSError):
                while data := client.recv(1 << 16):
                    if self.cuts and self.cut.match(data):
                        self.cuts -= 1
                        is_cut.set()
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)

        threading.Thread(target=requests, daemon=True).start()
        while data := server.recv(1 << 16):
            if is_cut.is_set() and not data.startswith(b"HTTP/1.1 100"):
                if self.is_silent_after_cut:
                    self.silence()
                break
            client.sendall(data)
        self._connections.discard(server)
        client.shutdown(socket.SHUT_RDWR)
