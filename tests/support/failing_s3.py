"""A small server of S3's protocol that fails as it is told: what a real one does on a bad day.

Objects stand in a dict. It knows GET, HEAD and PUT of an object and removing several, lists
nothing, and checks no signatures.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIMIT = 60.0  # seconds in which whatever it waits for must have happened
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"

Fault = Callable[["Handler"], None]


def refuse(status: int, code: str, message: str = "") -> Fault:
    """An error as S3 tells it; without a body where the request was a HEAD."""

    def fault(handler: Handler) -> None:
        handler.read_body()
        handler.answer(status, ERROR.format(code, message).encode())

    return fault


def cut(after: int) -> Fault:
    """So many bytes of the object, then the connection is closed."""

    def fault(handler: Handler) -> None:
        handler.partly(after)
        handler.close_connection = True

    return fault


def lengthen(by: int) -> Fault:
    """A length that is not that of the bytes; the connection ends behind them."""

    def fault(handler: Handler) -> None:
        data = handler.server.objects[handler.path_only]
        handler.answer(200, data, length=len(data) + by)
        handler.close_connection = True

    return fault


def garbage(handler: Handler) -> None:
    """Something that is not HTTP."""
    handler.read_body()
    handler.wfile.write(b"\x00\x01 what is this \xff" * 8)
    handler.close_connection = True


def web_page(handler: Handler) -> None:
    """A server that is no store."""
    handler.read_body()
    handler.answer(404, b"<html><h1>Not found</h1></html>")


def hold(after: int) -> Fault:
    """So many bytes of the object; the others when the server is told to `release`."""

    def fault(handler: Handler) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):  # the client may have left before
            data = handler.partly(after)
        handler.server.held.release()
        assert handler.server.released.wait(LIMIT)
        try:
            handler.wfile.write(data[after:])
        except OSError:  # the client is gone, as it may
            handler.close_connection = True
        handler.server.late.release()

    return fault


def until_gone(after: int) -> Fault:
    """So many bytes of the object, and no more: counts it when the client leaves."""

    def fault(handler: Handler) -> None:
        with contextlib.suppress(ConnectionError):  # it may have left before it has any of them
            handler.partly(after)
            handler.connection.settimeout(LIMIT)
            assert not handler.connection.recv(1), "it asks for more"
        handler.close_connection = True
        handler.server.gone.release()

    return fault


class Handler(BaseHTTPRequestHandler):
    """Of one connection."""

    protocol_version = "HTTP/1.1"
    server: FailingS3

    @property
    def path_only(self) -> str:
        return self.path.partition("?")[0]

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, data: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 12:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def partly(self, nbytes: int) -> bytes:
        """The object's length, and so many of its bytes; of one that is not there, nothing."""
        self.read_body()
        data = self.server.objects.get(self.path_only, b"")
        if not nbytes and self.command != "GET":
            return b""
        self.answer(200, data[:nbytes], length=len(data))
        self.wfile.flush()
        return data

    def _serve(self) -> None:
        server = self.server
        with server.lock:
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            self._serve_one()
        finally:
            with server.lock:
                server.under_way -= 1

    def _serve_one(self) -> None:
        server = self.server
        with server.lock:
            server.seen.append(self.command)
            fault = server.faults.get(self.command)
            if fault is not None and server.times.get(self.command) is not None:
                server.times[self.command] -= 1
                if not server.times[self.command]:
                    del server.faults[self.command], server.times[self.command]
        if fault is not None:
            fault(self)
        elif self.command == "PUT":
            data = self.read_body()
            if "If-None-Match" in self.headers and self.path_only in server.objects:
                self.answer(412, ERROR.format("PreconditionFailed", "").encode())
                return
            server.objects[self.path_only] = data
            self.answer(200)
        elif self.command == "POST":
            names = re.findall(r"<Key>(.*?)</Key>", self.read_body().decode())
            for name in names:
                server.objects.pop(f"{self.path_only.rstrip('/')}/{name}", None)
            gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        elif self.path_only in server.objects:
            self.answer(200, server.objects[self.path_only])
        else:
            self.answer(404, ERROR.format("NoSuchKey", "").encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815


class FailingS3(ThreadingHTTPServer):
    """Listens on a port of loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.seen: list[str] = []
        """Methods, in order."""
        self.under_way = self.most = 0
        """Requests now, and the most there were."""
        self.faults: dict[str, Fault] = {}
        self.times: dict[str, int] = {}
        self.held, self.late = threading.Semaphore(0), threading.Semaphore(0)
        self.gone = threading.Semaphore(0)
        self.released = threading.Event()

    def fail(self, method: str, fault: Fault, times: int | None = None) -> None:
        """From now on, for so many requests or all of them."""
        with self.lock:
            self.faults[method] = fault
            if times is not None:
                self.times[method] = times

    def heal(self) -> None:
        """No faults any more."""
        with self.lock:
            self.faults.clear()
            self.times.clear()

    def count(self, method: str) -> int:
        """Requests so far."""
        with self.lock:
            return self.seen.count(method)

    def url(self, **options: object) -> str:
        """Of a bucket there."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"s3://bucket/t?endpoint=http://127.0.0.1:{self.server_port}{more}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none."""


@contextlib.contextmanager
def failing() -> Iterator[FailingS3]:
    """A server that runs."""
    with FailingS3() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join(LIMIT)


__all__ = [
    "FailingS3",
    "cut",
    "failing",
    "garbage",
    "hold",
    "lengthen",
    "refuse",
    "until_gone",
    "web_page",
]
