"""Pages as strings of a Redis or Valkey server.

A value is a page and its trailer in one string. `SET name value NX` stores it atomically; if two
machines write the same page, one stores it. Commands are sent ahead of the answers, so the server
sends the next page while the checksum of this one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lightcache.errors import StorageError
from lightcache.storage.common import CLOSING, Deadline
from lightcache.storage.executor import READ, WRITE, Executor
from lightcache.storage.protocol import ReadStatus, StorageSpec, WriteStatus
from lightcache.storage.remote.base import (
    TRAILER_BYTES,
    Read,
    RemoteStorage,
    Wrote,
    judge_page,
    make_trailer,
)
from lightcache.storage.remote.redis.wire import (
    Connections,
    RedisOptions,
    ServerError,
    Wire,
    around_value,
    command,
)

T = TypeVar("T")
AHEAD = 4 << 20  # bytes of pages requested before the first has arrived
_MOST_AHEAD = 64  # pages
_BATCH = 1000  # names of one SCAN or UNLINK
_BULK = 512 << 20  # maximum bytes of a value, if the server does not tell


class RedisStorage(RemoteStorage):
    """Pages of one spec in one database of a server. Any thread may use it."""

    def __init__(self, options: RedisOptions, spec: StorageSpec) -> None:
        """Connects, unless `required` is no.

        Raises:
            ConfigError: a file named in the URL cannot be read.
            StorageError: no client library; or the server cannot be reached, refuses us, or does
                not take pages of this size.
        """
        super().__init__(spec)
        self.scheme = options.scheme
        self.options = options
        self._connections = Connections(options, options.connections + 1)
        self._keeping = [b"EX", b"%d" % options.ttl] if options.ttl else []
        self._ahead = min(_MOST_AHEAD, max(2, AHEAD // spec.page_bytes))
        try:
            if options.required:
                self._check_server(Deadline(options.connect_timeout))
            self._lanes = Executor(options.connections, "redis")
            self._lanes.start()
        except RuntimeError as error:  # the system starts no more threads
            self._connections.close()
            raise StorageError(f"{self.scheme}: {error}; give fewer connections=") from error
        except BaseException:
            self._connections.close()
            raise

    def __repr__(self) -> str:
        return f"RedisStorage({self.options.shown!r})"

    def _check_server(self, deadline: Deadline) -> None:
        with self._connections.one(deadline) as wire:
            wire.ask(b"PING")
            facts = _allowed(wire, b"INFO", b"server") or b""
            limit = _allowed(wire, b"CONFIG", b"GET", b"proto-max-bulk-len")
        for mode in (b"cluster", b"sentinel"):
            if b"redis_mode:" + mode in facts:
                raise StorageError(
                    f"{self.options.shown}: expected one server, found a {mode.decode()}, which is "
                    "not supported"
                )
        most = int(limit[1]) if limit else _BULK
        if self.spec.page_bytes + TRAILER_BYTES > most:
            raise StorageError(
                f"{self.options.shown}: expected room for pages of {self.spec.page_bytes} bytes, "
                f"found proto-max-bulk-len {most}; raise it"
            )

    # ---- see `RemoteStorage`

    def _exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        with self._connections.one(deadline) as wire:
            wire.send(b"".join([command(b"EXISTS", self._named(name)) for name in names]))
            answers = [wire.answer() for _ in names]
        for answer in answers:
            if isinstance(answer, ServerError):
                raise answer
        return [bool(answer) for answer in answers]

    def _fetch(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        verb = b"GETEX" if self._keeping else b"GET"

        def ask(wire: Wire, i: int) -> None:
            wire.send(command(verb, self._named(names[i]), *self._keeping))

        def take(wire: Wire, i: int) -> Read:
            return self._taken(names[i], views[i], wire.page(views[i]))

        found, why = self._each(len(names), ask, take, READ, deadline)
        return [each or (ReadStatus.FAILED, why) for each in found]

    def _taken(
        self, name: bytes, view: memoryview, answer: tuple[int, bytes] | ServerError | None
    ) -> Read:
        if answer is None:
            return ReadStatus.ABSENT, ""
        if isinstance(answer, ServerError):
            if answer.kind == "WRONGTYPE":
                return ReadStatus.CORRUPT, f"corrupt: page {name.hex()} is no string: {answer}"
            return ReadStatus.FAILED, str(answer)
        length, trailer = answer
        if not trailer:
            expected = len(view) + TRAILER_BYTES
            why = f"corrupt: page {name.hex()} is stored in {length} bytes, not {expected}"
            return ReadStatus.CORRUPT, why
        return judge_page(name, view, trailer)

    def _put(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Wrote]:
        after = [b"NX", *self._keeping]

        def send(wire: Wire, i: int) -> None:
            before = [b"SET", self._named(names[i])]
            trailer = make_trailer(names[i], views[i])
            head, tail = around_value(before, len(views[i]) + len(trailer), after)
            wire.send(head, views[i], trailer + tail)

        def take(wire: Wire, i: int) -> Wrote:
            answer = wire.answer()
            if answer is None:
                return WriteStatus.PRESENT, ""
            if isinstance(answer, ServerError):
                full = answer.kind == "OOM"
                return WriteStatus.REFUSED if full else WriteStatus.FAILED, str(answer)
            return WriteStatus.STORED, ""

        found, why = self._each(len(names), send, take, WRITE, deadline)
        return [each or (WriteStatus.FAILED, why) for each in found]

    def _remove(self, names: Sequence[bytes], deadline: Deadline) -> int:
        removed = 0
        with self._connections.one(deadline) as wire:
            for first in range(0, len(names), _BATCH):
                part = names[first : first + _BATCH]
                removed += wire.ask(b"UNLINK", *(self._named(name) for name in part))
        return removed

    def _remove_all(self, deadline: Deadline) -> int:
        """Scans the names of the whole database."""
        removed, cursor = 0, b"0"
        ours = self.object_name(b"").encode() + b"*"
        with self._connections.one(deadline) as wire:
            while True:
                cursor, names = wire.ask(b"SCAN", cursor, b"MATCH", ours, b"COUNT", b"%d" % _BATCH)
                if names:
                    removed += wire.ask(b"UNLINK", *names)
                if cursor == b"0":
                    return removed

    def _release(self) -> None:
        self._lanes.close(CLOSING)
        self._connections.close()

    # ---- batches

    def _named(self, name: bytes) -> bytes:
        return self.object_name(name).encode()

    def _each(
        self,
        count: int,
        send: Callable[[Wire, int], None],
        take: Callable[[Wire, int], T],
        kind: int,
        deadline: Deadline,
    ) -> tuple[list[T | None], str]:
        """Send `count` commands over all connections, and take the answers. The first keys are sent
        first, as later ones are useless without them.

        Returns:
            The answer to each command, None where there is none, and the reason for that.

        Raises:
            StorageError: no answer arrived, although there was time.
        """
        results: list[T | None] = [None] * count
        errors: list[Exception] = []
        ways = min(self.options.connections, count)

        def piece(first: int) -> Callable[[], None]:
            mine = range(first, count, ways)

            def run() -> None:
                try:
                    with self._connections.one(deadline) as wire:
                        self._share(wire, mine, send, take, results)
                except Exception as error:
                    errors.append(error)

            return run

        try:
            self._lanes.run([piece(first) for first in range(ways)], kind, deadline)
            why = str(errors[0]) if errors else ""
            if deadline.passed:
                return results, f"{deadline.reason}: {why}" if why else deadline.reason
            if errors and not any(results):
                raise errors[0]
            return results, why
        finally:  # their tracebacks would keep views alive until garbage is collected
            errors.clear()

    def _share(
        self,
        wire: Wire,
        mine: Sequence[int],
        send: Callable[[Wire, int], None],
        take: Callable[[Wire, int], T],
        results: list[T | None],
    ) -> None:
        """One connection's share. Answers received before it broke are taken."""
        sent = taken = 0
        failure: StorageError | None = None
        while taken < sent or sent < len(mine):
            if sent < len(mine) and sent - taken < self._ahead:
                try:
                    send(wire, mine[sent])
                except StorageError as error:
                    failure, mine = error, mine[:sent]
                else:
                    sent += 1
            else:
                results[mine[taken]] = take(wire, mine[taken])
                taken += 1
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # as in `_each`


def _allowed(wire: Wire, *parts: bytes) -> bytes | list[bytes] | None:
    """The answer; None: the server refuses the command."""
    try:
        answer: bytes | list[bytes] | None = wire.ask(*parts)
        return answer
    except ServerError:
        return None


__all__ = ["AHEAD", "RedisStorage"]
