"""The TCP proxy of the tests of storages beyond one machine: it does to bytes what it says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.proxy import Proxy

LIMIT = 60.0


@contextlib.contextmanager
def echoing(listener: socket.socket) -> Iterator[None]:
    """A server that sends back what it gets, one connection after the other."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                with end, contextlib.suppress(OSError):
                    while data := end.recv(4096):
                        end.sendall(data)

    listener.listen()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(LIMIT)
        assert not thread.is_alive()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    with echoing(listener), Proxy(listener.getsockname()[1]) as found:
        yield found


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), LIMIT)


def receive(end: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or what came before the connection ended, in order or by a reset."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while len(got) < nbytes and (part := end.recv(nbytes - len(got))):
            got += part
    return got


def test_bytes_pass(proxy: Proxy) -> None:
    data = bytes(range(256)) * 1000
    with connect(proxy) as end:
        end.sendall(data)
        assert receive(end, len(data)) == data
    proxy.requests.wait(len(data))
    assert proxy.connections == 1


def test_it_pauses_behind_so_many_bytes_and_goes_on(proxy: Proxy) -> None:
    with connect(proxy) as end:
        proxy.answers.pause(after=3)
        end.sendall(b"abcdef")
        assert receive(end, 3) == b"abc"
        proxy.requests.wait(6)
        proxy.answers.wait(3)
        assert proxy.answers.passed == 3
        proxy.answers.resume()
        assert receive(end, 3) == b"def"


@pytest.mark.parametrize("way", ["requests", "answers"])
def test_it_cuts_behind_so_many_bytes(proxy: Proxy, way: str) -> None:
    getattr(proxy, way).cut_after(2)
    with connect(proxy) as end:
        end.sendall(b"abcdef")
        assert receive(end, 6) in ((b"ab",) if way == "answers" else (b"", b"ab"))
    with connect(proxy) as end:  # once
        end.sendall(b"abcdef")
        assert receive(end, 6) == b"abcdef"


def test_it_damages_one_byte(proxy: Proxy) -> None:
    proxy.requests.corrupt_after(1)
    with connect(proxy) as end:
        end.sendall(b"abc")
        assert receive(end, 3) == b"a\x9dc"
        end.sendall(b"abc")
        assert receive(end, 3) == b"abc"


def test_it_delays(proxy: Proxy) -> None:
    proxy.answers.delay(0.001)
    with connect(proxy) as end:
        end.sendall(b"abc")
        assert receive(end, 3) == b"abc"


def test_it_refuses_and_listens_again(proxy: Proxy) -> None:
    with connect(proxy) as end:
        end.sendall(b"abc")
        assert receive(end, 3) == b"abc"
        proxy.refuse()
        proxy.cut()
        assert receive(end, 1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        proxy.listen()
        with connect(proxy) as again:
            again.sendall(b"abc")
            assert receive(again, 3) == b"abc"


def test_it_ends_while_it_holds_bytes(proxy: Proxy) -> None:
    proxy.answers.pause()
    with connect(proxy) as end:
        end.sendall(b"abc")
        proxy.requests.wait(3)
        proxy.__exit__(None, None, None)
        assert receive(end, 3) == b""


def test_a_server_that_is_not_there_is_an_end(tmp_path: Path) -> None:
    with Proxy(str(tmp_path / "none")) as proxy, connect(proxy) as end:
        assert receive(end, 1) == b""


def test_it_passes_to_a_unix_socket(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    with echoing(listener), Proxy(str(tmp_path / "s")) as proxy, connect(proxy) as end:
        end.sendall(b"abc")
        assert receive(end, 3) == b"abc"
