"""A TCP proxy between a client and the server of a test: it pauses, delays, cuts and damages.

    with Proxy(port) as proxy:  # or Proxy("/run/server.sock")
        proxy.answers.pause(after=1000)  # the client has a thousand bytes, and no more come
        ...
        proxy.answers.resume()

Faults are of one way, `requests` (to the server) or `answers` (from it), and of all connections
together; they are counted from the moment of the call.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

CHUNK = 1 << 16
LIMIT = 60.0  # seconds in which whatever the proxy waits for must have happened


class Way:
    """One direction. All faults may be set at any time, by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0
        self._passed = 0  # sent on as well
        self._hold_at: int | None = None
        self._cut_at: int | None = None
        self._damage_at: int | None = None
        self._delay = 0.0
        self._ended = False

    def pause(self, after: int = 0) -> None:
        """So many bytes more pass, then nothing does until `resume`; connections stay open."""
        with self._changed:
            self._hold_at = self._taken + after

    def resume(self) -> None:
        """What was held passes."""
        with self._changed:
            self._hold_at = None
            self._changed.notify_all()

    def delay(self, seconds: float) -> None:
        """Every chunk (64 KiB at most) comes so much later."""
        with self._changed:
            self._delay = seconds

    def cut_after(self, nbytes: int) -> None:
        """So many bytes more pass, then the connection of the next one is closed; once."""
        with self._changed:
            self._cut_at = self._taken + nbytes

    def corrupt_after(self, nbytes: int) -> None:
        """So many bytes more pass, then one whose bits are all turned round; once."""
        with self._changed:
            self._damage_at = self._taken + nbytes

    @property
    def passed(self) -> int:
        """Bytes so far."""
        with self._changed:
            return self._passed

    def wait(self, nbytes: int, limit: float = LIMIT) -> None:
        """Until so many bytes have passed, from the first one on."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._passed >= nbytes, limit)
            assert there, f"{self._passed} bytes passed, not {nbytes}"

    # ---- for the proxy

    def take(self, data: memoryview) -> bytes | None:
        """The beginning of this that is to pass now, perhaps later; None: close the connection."""
        with self._changed:
            if self._delay:
                self._changed.wait_for(lambda: self._ended, self._delay)
            self._changed.wait_for(lambda: self._ended or self._room(data) > 0 or self._cuts())
            if self._cuts():
                self._cut_at = None
                return None
            if self._ended:
                return None
            part = self._damaged(bytes(data[: self._room(data)]))
            self._taken += len(part)
            return part

    def sent(self, nbytes: int) -> None:
        """They have passed."""
        with self._changed:
            self._passed += nbytes
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing passes any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _room(self, data: memoryview) -> int:
        stops = [at - self._taken for at in (self._hold_at, self._cut_at) if at is not None]
        return max(0, min([len(data), *stops]))

    def _cuts(self) -> bool:
        held = self._hold_at is not None and self._hold_at <= self._taken
        return self._cut_at is not None and self._cut_at <= self._taken and not held

    def _damaged(self, part: bytes) -> bytes:
        at = None if self._damage_at is None else self._damage_at - self._taken
        if at is None or not 0 <= at < len(part):
            return part
        self._damage_at = None
        return part[:at] + bytes([part[at] ^ 0xFF]) + part[at + 1 :]


class Proxy:
    """Listens on a port of loopback; every connection there is one more to the server."""

    def __init__(self, server: int | str) -> None:
        """
        Args:
            server: a port of loopback, or the path of a Unix socket.
        """
        self._server = server
        self.requests, self.answers = Way(), Way()
        self.connections = 0
        """Accepted so far."""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.listen()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for way in (self.requests, self.answers):
            way.end()
        self.refuse()
        self.cut()
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a thread of the proxy does not end"

    def listen(self) -> None:
        """Accept connections, on the same port as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(lambda: self._accept(listener))

    def refuse(self) -> None:
        """Accept no more of them: whoever connects is refused."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts; close alone does not
            listener.close()

    def cut(self) -> None:
        """Close all connections."""
        with self._lock:
            ends = list(self._open)
        for end in ends:
            _shut(end)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            if self._listener is not listener:  # `cut` may have missed these two
                _shut(client)
                _shut(server)
            self._start(lambda a=client, b=server: self._both(a, b))  # type: ignore[misc]

    def _connect(self) -> socket.socket:
        if isinstance(self._server, int):
            return socket.create_connection(("127.0.0.1", self._server), LIMIT)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._server)
        except OSError:
            server.close()
            raise
        return server

    def _both(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.settimeout(None)
        back = threading.Thread(target=self._pump, args=(server, client, self.answers), daemon=True)
        back.start()
        self._pump(client, server, self.requests)
        back.join()
        with self._lock:
            self._open -= {client, server}
        for end in (client, server):
            end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if not _pass(memoryview(data), sink, way):
                    break
        for end in (source, sink):
            _shut(end)


def _pass(data: memoryview, sink: socket.socket, way: Way) -> bool:
    while data:
        part = way.take(data)
        if part is None:
            return False
        sink.sendall(part)
        way.sent(len(part))
        data = data[len(part) :]
    return True


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


__all__ = ["Proxy", "Way"]
