"""Commands out and answers in over one connection, each byte of them by a deadline.

The client library makes the connection; what goes over it afterwards is sent and read here. Its own
reader waits anew for each piece of an answer, however few bytes come, and copies a page four times.
Here a page goes from the socket to where it is wanted, and from where it lies to the socket.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from lightcache.errors import StorageError
from lightcache.storage.arguments import Deadline
from lightcache.storage.remote import trailer
from lightcache.storage.remote.redis.words import ServerError

Answer = Any
"""int, bytes, None, a list of them, or a ServerError."""
_CHUNK = 1 << 14
_LONGEST = 1 << 20  # bytes of an answer that is no page: a server that says more is none
_AGES = 1e6  # seconds: the most that a socket waits


class Wire:
    """The two directions of a connection. Whatever it raises, the connection is of no use then."""

    def __init__(self, server: str) -> None:
        """Not connected yet.

        Args:
            server: what errors call it.
        """
        self._server = server
        self._socket: Any = None
        self._deadline = Deadline(0.0)
        self._kept = bytearray(_CHUNK)
        self._view = memoryview(self._kept)
        self._start = self._end = 0

    def by(self, deadline: Deadline) -> None:
        """Whatever comes now is to be done by then."""
        self._deadline = deadline

    @property
    def stale(self) -> bool:
        """Whether the server has closed it, or said something that nobody asked for."""
        if self._socket is None or self._start < self._end:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # ---- what the library wants of a parser: it uses it while it makes a connection

    def on_connect(self, connection: Any) -> None:
        """The library has a socket, and is about to introduce us."""
        self._socket = connection._sock
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        """It has none any more."""
        self._socket = None

    def can_read(self, timeout: float) -> bool:
        """Whether there is something to be read; does not wait."""
        del timeout
        return self.stale

    def read_response(self, **how: Any) -> Answer:
        """An answer; errors are the library's."""
        del how
        from redis.exceptions import ResponseError

        answer = self.answer()
        return ResponseError(answer.words) if isinstance(answer, ServerError) else answer

    # ---- out

    def send(self, *parts: bytes | memoryview) -> None:
        """All of them.

        Raises:
            StorageError: not in time, or the connection is gone.
        """
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[self._within("sent", lambda rest=left: self._socket.send(rest)) :]

    # ---- in

    def ask(self, *parts: bytes) -> Answer:
        """Send a command and read its answer.

        Raises:
            ServerError: the answer is one.
            StorageError: not in time, or the connection is gone.
        """
        self.send(command(*parts))
        answer = self.answer()
        if isinstance(answer, ServerError):
            raise answer
        return answer

    def answer(self) -> Answer:
        """The next one; an error of the server is returned, for others may follow.

        Raises:
            StorageError: not in time, the connection is gone, or no answer of such a server.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return self._number(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(self._server, rest.decode(errors="replace"))
        if kind == b"$":
            length = self._number(line)
            return None if length < 0 else self._bytes(length)
        if kind == b"*":
            return [self.answer() for _ in range(self._number(line))]
        raise self._strange(line)

    def page(self, view: memoryview) -> tuple[int, bytes] | ServerError | None:
        """The answer to GET: fills the view with the beginning of the value.

        Returns:
            Bytes of the value, and its trailer; the view is full if it has the length of page and
            trailer, and undefined otherwise. None: there is no value.
        """
        line = self._line()
        if line[:1] == b"-":
            return ServerError(self._server, line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise self._strange(line)
        length = self._number(line)
        if length < 0:
            return None
        beside = b""
        if length == len(view) + trailer.BYTES:
            self._fill(view)
            beside = self._take(trailer.BYTES)
        else:
            self._skip(length)
        self._end_of_value()
        return length, beside

    # ---- bytes

    def _number(self, line: bytes) -> int:
        try:
            found = int(line[1:])
        except ValueError:
            raise self._strange(line) from None
        return found

    def _bytes(self, length: int) -> bytes:
        if length > _LONGEST:
            raise self._strange(b"$%d" % length)
        found = self._take(length)
        self._end_of_value()
        return found

    def _end_of_value(self) -> None:
        if (found := self._take(2)) != b"\r\n":
            raise self._strange(found)

    def _line(self) -> bytes:
        while (at := self._kept.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == _CHUNK:
                raise self._strange(bytes(self._kept[:40]))
            self._more()
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        if not line:
            raise self._strange(line)
        return line

    def _more(self) -> None:
        """At least one byte more behind those that are kept."""
        if self._start:
            rest = bytes(self._view[self._start : self._end])
            self._kept[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive(self._view[self._end :])

    def _take(self, length: int) -> bytes:
        found = bytearray(length)
        self._fill(memoryview(found))
        return bytes(found)

    def _skip(self, length: int) -> None:
        nowhere = memoryview(bytearray(min(length, _LONGEST)))
        while length:
            part = nowhere[: min(length, len(nowhere))]
            self._fill(part)
            length -= len(part)

    def _fill(self, view: memoryview) -> None:
        kept = min(len(view), self._end - self._start)
        view[:kept] = self._view[self._start : self._start + kept]
        self._start += kept
        if kept < len(view) <= 64:  # an end of a value: what comes behind it comes along
            self._more()
            self._fill(view[kept:])
            return
        view = view[kept:]
        while view:
            view = view[self._receive(view) :]

    def _receive(self, view: memoryview) -> int:
        count: int = self._within("answered", lambda: self._socket.recv_into(view))
        if not count:
            raise StorageError(f"{self._server}: it closed the connection")
        return count

    def _within(self, what: str, work: Any) -> Any:
        """One system call, which ends with the deadline."""
        late = f"{self._server}: not {what} in time"
        left = self._deadline.left
        if not left:
            raise StorageError(late)
        try:
            self._socket.settimeout(min(left, _AGES))
            return work()
        except TimeoutError:
            raise StorageError(late) from None
        except OSError as error:
            raise StorageError(f"{self._server}: the connection is gone: {error}") from error

    def _strange(self, line: bytes) -> StorageError:
        return StorageError(
            f"{self._server}: expected an answer of Redis or Valkey, found {line[:40]!r}; is it "
            "another server, or does it want TLS?"
        )


def command(*parts: bytes) -> bytes:
    """As it is sent."""
    pieces = [b"*%d\r\n" % len(parts)]
    pieces += [b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]
    return b"".join(pieces)


def around_value(
    before: Sequence[bytes], length: int, after: Sequence[bytes]
) -> tuple[bytes, bytes]:
    """What is sent before and behind a value of so many bytes, of a command that has one."""
    pieces = [b"*%d\r\n" % (len(before) + 1 + len(after))]
    pieces += [b"$%d\r\n%b\r\n" % (len(part), part) for part in before]
    pieces.append(b"$%d\r\n" % length)
    return b"".join(pieces), b"\r\n" + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in after
    )


__all__ = ["Answer", "Wire", "around_value", "command"]
