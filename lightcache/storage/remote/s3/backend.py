"""Pages as objects of an S3-compatible store.

An object is a page with its trailer behind it, so one GET brings both and one PUT stores both: it
is there whole or not at all, since a store takes an object when all of it has come. Nothing is ever
uploaded in parts. Its length comes before its bytes, and an object of another length is not read.

One thing a store does not say: whether a name that it removed was there. `delete` asks before.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError, StorageError
from lightcache.storage.arguments import Deadline
from lightcache.storage.protocol import ReadStatus, StorageSpec, WriteStatus
from lightcache.storage.remote import trailer
from lightcache.storage.remote.base import Read, RemoteStorage, Wrote
from lightcache.storage.remote.s3.flights import Job, Requests
from lightcache.storage.remote.s3.options import Place
from lightcache.storage.remote.s3.words import absent, explain

_opened_by: int | None = None  # the process that opened one first: its threads are in no child
MOST = (5 << 30) - trailer.BYTES  # of a page: what S3 takes in one request


class S3Storage(RemoteStorage):
    """See above. The calling thread alone touches buffers; see `flights`."""

    scheme = "s3"

    def __init__(self, place: Place, spec: StorageSpec) -> None:
        """Connects to nobody yet.

        Raises:
            ConfigError: pages are too large, or the URL names a file of certificates that is none.
            StorageError: no client is installed, or it refuses the configuration.
        """
        if spec.page_bytes > MOST:
            found = f"found {spec.page_bytes}"
            raise ConfigError(f"s3: expected pages of {MOST} bytes at most, {found}")
        super().__init__(spec)
        self.place = place
        self.asking = place.requests
        self._body = spec.page_bytes + trailer.BYTES
        # Bodies that were sent. Fresh memory is what costs: 1.5 ms for a page of 2 MiB and its
        # checksum, which alone takes 0.15.
        self._spare: list[npt.NDArray[np.uint8]] = []
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise StorageError(
                "s3: the package obstore is not installed; pip install 'lightcache[s3]'"
            ) from error
        if place.ca and _version(obstore) < (0, 11):
            found = getattr(obstore, "__version__", "one that does not say which it is")
            raise StorageError(
                f"s3: ca= needs the package obstore 0.11 or later, found {found}; "
                "pip install --upgrade obstore"
            )
        client = place.client
        global _opened_by
        if _opened_by not in (None, os.getpid()):
            raise StorageError(
                "s3: the process that forked us has opened one, and the client's threads are not "
                "here; start processes by spawn"
            )
        _opened_by = os.getpid()
        self._client: Any = obstore
        try:
            self._store: Any = S3Store(
                place.bucket,
                prefix=place.prefix or None,
                config=place.config,  # type: ignore[arg-type]
                client_options=client,  # type: ignore[arg-type]
                retry_config=place.retrying,  # type: ignore[arg-type]
            )
        except Exception as error:
            raise StorageError(f"s3: {place}: {explain(error)}") from None
        try:
            self._requests = Requests(place.requests, "lightcache-s3")
        except RuntimeError as error:
            raise StorageError(f"s3: {error}; end some threads of this process") from error
        # For who forgets to close it: requests must not go on into an interpreter that ends.
        self._ended = weakref.finalize(self, self._requests.close)

    def ask(self) -> None:
        """See that the store answers, and that we may read there; not with `wait=0`.

        Raises:
            StorageError: says what is wrong.
        """
        if not self.place.wait:
            return
        deadline = Deadline(self.place.wait)
        name = f"lightcache/{self.spec.name}/absent"
        try:
            self._requests.one(lambda: self._client.get_async(self._store, name), deadline)
        except StorageError:
            raise StorageError(
                f"s3: {self.place}: no answer within {self.place.wait:g} s; see that the store is "
                "up, that credentials are set, or open it all the same by wait=0"
            ) from None
        except Exception as error:
            if not absent(error, told=True):
                raise StorageError(f"s3: {self.place}: {self._why(error, opening=True)}") from None

    # ---- what a backend does

    def _exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        there: dict[int, bool] = {}
        jobs = (
            (i, functools.partial(self._client.head_async, self._store, self.object_name(name)))
            for i, name in enumerate(names)
        )
        for i, result in self._requests.each(jobs, deadline):
            if isinstance(result, BaseException) and not absent(result, told=False):
                raise StorageError(f"s3: {self.place}: {explain(result)}") from None
            there[i] = not isinstance(result, BaseException)
        if len(there) < len(names):
            raise StorageError(f"s3: {self.place}: no answer")
        return [there[i] for i in range(len(names))]

    def _fetch(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        found: dict[int, Read] = {}
        failed: list[str] = []  # what one request met with, the next will: no more of them begin

        def jobs() -> Iterator[Job]:
            for i, name in enumerate(names):
                if failed:
                    return
                yield i, functools.partial(self._get, name)

        for i, result in self._requests.each(jobs(), deadline):
            found[i] = self._take(names[i], views[i], result)
            if found[i][0] is ReadStatus.FAILED:
                failed.append(found[i][1])
        rest = failed[0] if failed else deadline.reason
        return [found.get(i, (ReadStatus.FAILED, rest)) for i in range(len(names))]

    async def _get(self, name: bytes) -> Any:
        """The object; or its length, if that is wrong."""
        answer = await self._client.get_async(self._store, self.object_name(name))
        length = answer.meta["size"]
        return await answer.buffer_async() if length == self._body else length

    def _take(self, name: bytes, view: memoryview, result: Any) -> Read:
        if isinstance(result, BaseException):
            if absent(result, told=True):
                return ReadStatus.ABSENT, ""
            return ReadStatus.FAILED, f"s3: {self.place}: {self._why(result)}"
        length = result if isinstance(result, int) else len(result)
        if length != self._body:
            what = f"corrupt: page {name.hex()} is an object of {length} bytes"
            return ReadStatus.CORRUPT, f"{what}, not {self._body}"
        body = np.frombuffer(result, np.uint8)
        np.copyto(np.frombuffer(view, np.uint8), body[: len(view)])
        return trailer.judge(name, view, body[len(view) :].tobytes())

    def _put(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Wrote]:
        found: dict[int, Wrote] = {}
        failed: list[str] = []

        def jobs() -> Iterator[Job]:
            for i, name in enumerate(names):
                if failed:
                    return
                try:
                    body = self._whole(name, views[i])
                except MemoryError:
                    failed.append(f"s3: no memory for a page of {len(views[i])} bytes")
                    return
                yield i, functools.partial(self._send, name, body)

        for i, result in self._requests.each(jobs(), deadline):
            found[i] = self._stored(result)
            if found[i][0] is WriteStatus.FAILED:
                failed.append(found[i][1])
        rest = failed[0] if failed else deadline.reason
        return [found.get(i, (WriteStatus.FAILED, rest)) for i in range(len(names))]

    def _whole(self, name: bytes, view: memoryview) -> Any:
        """Page and trailer in memory of their own: a request that is cancelled may read on."""
        try:
            body = self._spare.pop()
        except IndexError:
            body = np.empty(self._body, np.uint8)
        np.copyto(body[: len(view)], np.frombuffer(view, np.uint8))
        beside = trailer.make(name, body.data[: len(view)])
        body[len(view) :] = np.frombuffer(beside, np.uint8)
        return body

    async def _send(self, name: bytes, body: Any) -> Any:
        """The body again: nobody reads it any more, since the store said that it has all of it."""
        mode = "create" if self.place.conditional else "overwrite"
        where = self.object_name(name)
        await self._client.put_async(self._store, where, body, mode=mode, use_multipart=False)
        return body

    def _stored(self, result: Any) -> Wrote:
        if not isinstance(result, BaseException):
            if len(self._spare) < self.place.requests:
                self._spare.append(result)
            return WriteStatus.STORED, ""
        if isinstance(result, self._client.exceptions.AlreadyExistsError):
            return WriteStatus.PRESENT, ""
        return WriteStatus.FAILED, f"s3: {self.place}: {self._why(result)}"

    def _remove(self, names: Sequence[bytes], deadline: Deadline) -> int:
        there = self._exists(names, deadline)
        gone = [self.object_name(name) for name, known in zip(names, there, strict=True) if known]
        if gone:
            self._ask(lambda: self._client.delete_async(self._store, gone), deadline)
        return len(gone)

    def _remove_all(self, deadline: Deadline) -> int:
        removed: int = self._ask(self._remove_listed, deadline)
        return removed

    async def _remove_listed(self) -> int:
        removed = 0
        async for part in self._client.list(self._store, f"lightcache/{self.spec.name}"):
            await self._client.delete_async(self._store, [each["path"] for each in part])
            removed += len(part)
        return removed

    def _disconnect(self) -> None:
        self._requests.close()
        self._ended.detach()
        self._spare.clear()
        self._store = None  # with it go its connections

    # ---- around requests

    def _ask(self, begin: Any, deadline: Deadline) -> Any:
        try:
            return self._requests.one(begin, deadline)
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"s3: {self.place}: {self._why(error)}") from None

    def _why(self, error: BaseException, *, opening: bool = False) -> str:
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
            return "404, but not as a store says it; see that the endpoint is one of S3"
        return explain(error) + ("; or open it all the same by wait=0" if opening else "")


def _version(library: Any) -> tuple[int, ...]:
    """Its first two numbers; (0,): it does not say."""
    found = re.match(r"(\d+)\.(\d+)", str(getattr(library, "__version__", "")))
    return tuple(map(int, found.groups())) if found else (0,)


__all__ = ["S3Storage"]
