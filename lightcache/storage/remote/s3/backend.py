"""Pages as objects of an S3-compatible store.

An object is a page followed by its trailer: one GET fetches both, and one PUT stores both. A store
accepts an object only once all of it has arrived, and nothing is uploaded in parts, so a page is
stored whole or not at all. An object's length arrives before its bytes, and an object of another
length is not read.

A store does not tell whether a removed object existed, so `delete` asks first.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError, StorageError
from lightcache.storage.common import Deadline, Options
from lightcache.storage.protocol import ReadStatus, StorageSpec, WriteStatus
from lightcache.storage.remote.base import (
    TRAILER_BYTES,
    Read,
    RemoteStorage,
    Wrote,
    judge_page,
    make_trailer,
)

# ---- Errors of an S3-compatible store or its client, for people
#
# The client puts the whole answer into its errors, and the answer to a wrong signature quotes the
# request. So only the status, the code in the answer and the name of the underlying error are
# passed on.

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_KIND = re.compile(r"kind: ([A-Z][A-Za-z]{1,30})")
_SYSTEM = re.compile(r'message: "([^"\\]{1,100})"')
_CERTIFICATE = re.compile(r"InvalidCertificate\((?:\s*\w+\()*\s*(\w{1,60})")
_METADATA = re.compile(r"/latest/(api/token|meta-data/)")  # asked without credentials
CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_KEYS = f"the credentials are not accepted; look at {CREDENTIALS}"
_OTHER_REGION = "the bucket is in another region; say which by region="
_SLOWER = "the store asks for fewer requests; lower requests=, or spread the load over prefixes"
_RIGHTS = (
    "the credentials do not allow it: pages need s3:GetObject, s3:PutObject and s3:DeleteObject, "
    "and s3:ListBucket, without which an absent page is refused instead"
)
_REMEDIES = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the URL",
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "InvalidToken": _KEYS,
    "ExpiredToken": "the credentials have expired; renew them and open the storage again",
    "RequestTimeTooSkewed": "the clocks of this machine and the store differ; set this one right",
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "PermanentRedirect": _OTHER_REGION,
    "TemporaryRedirect": _OTHER_REGION,
    "IllegalLocationConstraintException": _OTHER_REGION,
    "SlowDown": _SLOWER,
    "ServiceUnavailable": _SLOWER,
    "NotImplemented": "the store cannot do this; try conditional=no and bulk_delete=no",
    "EntityTooLarge": "the store does not take pages of this size in one request",
    "QuotaExceeded": "the bucket is full; make room, or let a lifecycle rule do so",
}
_BY_STATUS = {
    "301": _OTHER_REGION,
    "401": _KEYS,
    "403": f"{_RIGHTS}; or they are wrong or have expired",
    "429": _SLOWER,
    "501": _REMEDIES["NotImplemented"],
    "503": _SLOWER,
}


def explain(error: BaseException) -> str:
    """The error, with the remedy if known."""
    text = str(error)
    if isinstance(error, TimeoutError) or "without LOCATION" in text:
        return _OTHER_REGION if "LOCATION" in text else "no answer in time"
    if "BadScheme" in text:
        return "the endpoint is of http and was not named in the URL; say endpoint=http://..."
    if _METADATA.search(text):
        return f"there are no credentials; set {CREDENTIALS}, or say anonymous=yes"
    if found := _first(_CERTIFICATE, text):
        return (
            f"the store's certificate is not accepted ({found}); name the authority that it comes "
            "from by ca=, and in the endpoint the host that it is of"
        )
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if status or code:
        return _join(f"{status} {code}".strip(), _REMEDIES.get(code) or _BY_STATUS.get(status, ""))
    below = _first(_SYSTEM, text) or _first(_KIND, text) or type(error).__name__
    return f"no proper answer ({below}); see that the store is up and the endpoint is right"


def absent(error: BaseException, *, told: bool) -> bool:
    """True if the store says that there is no such object.

    Args:
        told: the answer has a body, which distinguishes a missing object from a missing bucket or
            a server that is not a store. The answer to a HEAD has none.
    """
    if not isinstance(error, FileNotFoundError) or _METADATA.search(str(error)):
        return False
    return not told or _first(_CODE, str(error)) == "NoSuchKey"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found.group(1) if found else ""


def _join(what: str, remedy: str) -> str:
    return f"{what}: {remedy}" if remedy else what


# ---- URLs of S3-compatible stores, and the client's configuration

KNOWN = (
    *("endpoint", "region", "addressing", "requests", "retries"),
    *("conditional", "bulk_delete", "anonymous", "wait", "ca"),
)
_SECRET = re.compile(r"key|secret|token|password|credential|profile", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!_.*'()=-]+")
_REGION_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_AWAY = f"credentials do not belong in a URL; set {CREDENTIALS} in the environment"


@dataclass(frozen=True)
class Place:
    """The contents of a URL."""

    bucket: str
    prefix: str
    """Without slashes around it; may be empty."""
    endpoint: str
    """Empty: that of AWS for the region."""
    region: str
    """Empty: that of the environment, or us-east-1."""
    virtual: bool
    """The bucket is part of the host name."""
    requests: int
    """Maximum number of requests in flight."""
    retries: int
    """The client's retries of a request, within the time of the call."""
    conditional: bool
    """A PUT never replaces an existing page."""
    bulk_delete: bool
    anonymous: bool
    """Requests are not signed."""
    wait: float
    """Seconds in which the store must answer on opening; 0: it is not asked."""
    ca: str = ""
    """File of CA certificates to verify the store with, besides those of the system."""

    def __str__(self) -> str:
        where = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        return f"{where} at {self.endpoint}" if self.endpoint else where

    @property
    def config(self) -> dict[str, Any]:
        """The client's configuration. Over TLS a body is not hashed for the signature: that takes
        as long as sending it on a fast line, and TLS protects it already."""
        found: dict[str, Any] = {
            "virtual_hosted_style_request": self.virtual,
            "disable_bulk_delete": not self.bulk_delete,
            "unsigned_payload": not self.endpoint.startswith("http:"),
        }
        if self.endpoint:
            found["endpoint"] = self._address
        if self.region:
            found["region"] = self.region
        if self.anonymous:
            found["skip_signature"] = True
        return found

    @property
    def client(self) -> dict[str, Any]:
        """The options of its connections. The time of the call bounds a request.

        Raises:
            ConfigError: the file of certificates cannot be read, or has none.
        """
        found: dict[str, Any] = {
            "allow_http": self.endpoint.startswith("http:"),
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(hours=24),
            "pool_max_idle_per_host": str(self.requests),
            "pool_idle_timeout": timedelta(seconds=30),
        }
        if self.ca:
            found["root_certificate"] = self._certificates()
        return found

    @property
    def retrying(self) -> dict[str, Any]:
        """The options of its retries."""
        backoff = {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=2),
        }
        limit = timedelta(minutes=2)
        return {"max_retries": self.retries, "backoff": backoff, "retry_timeout": limit}

    def _certificates(self) -> bytes:
        try:
            found = Path(self.ca).read_bytes()
        except OSError as error:
            raise ConfigError(f"s3: ca: expected a file to read, found {error}") from None
        if b"-----BEGIN CERTIFICATE-----" not in found:
            raise ConfigError(f"s3: ca: expected certificates in PEM, found none in {self.ca}")
        return found

    @property
    def _address(self) -> str:
        scheme, _, rest = self.endpoint.partition("://")
        return f"{scheme}://{self.bucket}.{rest}" if self.virtual else self.endpoint


def parse(scheme: str, where: str, options: Mapping[str, str]) -> Place:
    """Parse "//bucket/prefix" and the options. Sends nothing.

    Raises:
        ConfigError: says what is wrong, without any text that may hold credentials.
    """
    if secret := sorted(name for name in options if _SECRET.search(name)):
        raise ConfigError(f"{scheme}: found {', '.join(secret)}: {_AWAY}")
    given = Options(scheme, options, KNOWN)
    bucket, prefix = _bucket(scheme, where)
    region = given.text("region")
    if region and not _REGION_NAME.fullmatch(region):
        raise ConfigError(f"{scheme}: region: expected one such as eu-west-1, found {region!r}")
    endpoint = _endpoint(scheme, given.text("endpoint")) if "endpoint" in given else ""
    if "ca" in given and endpoint.startswith("http:"):
        raise ConfigError(f"{scheme}: ca: expected an endpoint of https beside it, found http")
    return Place(
        bucket,
        prefix,
        endpoint,
        region,
        virtual=given.choice("addressing", ("path", "virtual")) == "virtual",
        requests=given.count("requests", 32, 1, 1024),
        retries=given.count("retries", 2, 0, 10),
        conditional=given.choice("conditional", ("yes", "no")) == "yes",
        bulk_delete=given.choice("bulk_delete", ("yes", "no")) == "yes",
        anonymous=given.choice("anonymous", ("no", "yes")) == "yes",
        wait=given.seconds("wait", 10.0),
        ca=given.text("ca"),
    )


def _bucket(scheme: str, where: str) -> tuple[str, str]:
    if "@" in where:
        raise ConfigError(f"{scheme}: expected a bucket, found an '@': {_AWAY}")
    bucket, _, prefix = where.removeprefix("//").partition("/")
    if not where.startswith("//") or not bucket:
        raise ConfigError(f"{scheme}: expected '{scheme}://bucket/prefix', found {where!r}")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{scheme}: expected the name of a bucket, 3 to 63 letters, digits and '.-', found "
            f"{bucket!r}; a server's address belongs to endpoint="
        )
    prefix = prefix.removesuffix("/")
    if prefix and not all(_PART.fullmatch(part) for part in prefix.split("/")):
        raise ConfigError(
            f'{scheme}: expected a prefix of letters, digits and "!_.*\'()=-" between single '
            f"slashes, found {prefix!r}"
        )
    return bucket, prefix


def _endpoint(scheme: str, text: str) -> str:
    if "@" in text:
        raise ConfigError(f"{scheme}: endpoint: expected no '@': {_AWAY}")
    try:
        found = urlsplit(text)
        right = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a bad port, an incomplete IPv6 address
        right = False
    if not right or found.path not in ("", "/") or found.query or found.fragment:
        raise ConfigError(
            f"{scheme}: endpoint: expected one such as http://127.0.0.1:9000, found {text!r}"
        )
    return text.rstrip("/")


# ---- Requests of an asynchronous client, for threads with a deadline
#
# An event loop in a thread of its own runs the requests. It never sees a caller's buffers: it sends
# bytes of our own memory and hands over the client's bytes, which the calling thread copies. So a
# late answer cannot touch a page, and a call returns when its time is up without waiting for the
# server. Its requests are cancelled afterwards.

ENDING = 10.0  # seconds for the loop to end: it only runs callbacks
Job = tuple[int, Callable[[], Awaitable[Any]]]
"""A number that identifies the result, and a function that begins the request, in the loop."""
Result = tuple[int, Any]
"""The number of a job, and its result or exception."""


class _Loop(asyncio.SelectorEventLoop):
    """A loop that knows which threads of the client are delivering a result.

    Until Python 3.14 a thread that asks for the interpreter's lock while the interpreter exits is
    ended on the spot, and a thread of Rust, which cannot be unwound, then aborts the process. A
    thread may wait for the lock within `call_soon_threadsafe`, whose result has been seen already.
    """

    def __init__(self) -> None:
        super().__init__()
        self._delivering: dict[object, None] = {}

    def call_soon_threadsafe(  # type: ignore[override]  # typed by a variadic of Python 3.11
        self,
        callback: Callable[..., object],
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        call = object()
        self._delivering[call] = None
        try:
            return super().call_soon_threadsafe(callback, *arguments, context=context)
        finally:
            # The last bytecode: a call here could give the lock away once more.
            del self._delivering[call]

    def delivered(self, timeout: float) -> bool:
        """Wait until no thread is delivering. Returns False if one still is."""
        deadline = Deadline(timeout)
        while self._delivering and not deadline.passed:
            time.sleep(0.001)  # gives the lock away; a signal by the last of them would need it
        return not self._delivering


class Requests:
    """Runs at most `at_once` requests at a time, of all calls together."""

    def __init__(self, at_once: int, name: str) -> None:
        """Starts the thread.

        Args:
            at_once: maximum number of requests in flight.
            name: the thread's name.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        self.at_once = at_once
        self._process = os.getpid()
        self._loop = _Loop()
        self._slots = asyncio.Semaphore(at_once)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system starts no more threads
            self._loop.close()
            raise

    def each(self, jobs: Iterator[Job], deadline: Deadline) -> Iterator[Result]:
        """Yield results as they arrive, until all are there or the time is up; then the other
        requests are cancelled. A job is taken from `jobs` when there is room for it, so a call has
        at most `at_once` results in memory, and `jobs` may end early. An exception of a request is
        yielded as its result, not raised.
        """
        call = _Call(self._loop, self._slots)
        try:
            yield from call.results(jobs, self.at_once, deadline)
        finally:
            call.drop()

    def one(self, begin: Callable[[], Awaitable[Any]], deadline: Deadline) -> Any:
        """The result of one request.

        Raises:
            StorageError: the time is up.
            Exception: raised by the request.
        """
        for _, result in self.each(iter([(0, begin)]), deadline):
            if isinstance(result, BaseException):
                raise result
            return result
        raise StorageError(deadline.reason)

    def close(self) -> None:
        """Cancel the requests and end the thread. Does nothing if called again, or in a forked
        child, which has no such thread.

        Raises:
            StorageError: it did not end; call again.
        """
        if self._process != os.getpid():
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is threading.current_thread():  # any thread may run the finalizer
            return
        self._thread.join(ENDING)
        if self._thread.is_alive() or not self._loop.delivered(ENDING):
            raise StorageError(f"close: requests did not end within {ENDING:g} s; close it again")

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_others())
        finally:
            self._loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class _Call:
    """The requests of one call. The calling thread uses `begin`, `results` and `drop`; the loop's
    thread uses the private methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: asyncio.Semaphore) -> None:
        self._loop, self._slots = loop, slots
        self._done: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = False

    def begin(self, job: Job) -> None:
        self._loop.call_soon_threadsafe(self._begin, *job)

    def results(self, jobs: Iterator[Job], at_once: int, deadline: Deadline) -> Iterator[Result]:
        under_way = 0
        while True:
            while under_way < at_once and not deadline.passed:
                job = next(jobs, None)
                if job is None:
                    break
                self.begin(job)
                under_way += 1
            if not under_way:
                return
            try:
                result = self._done.get(timeout=min(deadline.left, threading.TIMEOUT_MAX))
            except queue.Empty:
                if deadline.passed:
                    return
                continue
            under_way -= 1
            yield result

    def drop(self) -> None:
        """Cancel the requests; those not begun never begin."""
        self._loop.call_soon_threadsafe(self._drop)

    def _begin(self, number: int, begin: Callable[[], Awaitable[Any]]) -> None:
        if not self._dropped:
            task = self._loop.create_task(self._one(number, begin))
            self._tasks.add(task)  # the loop itself keeps no reference
            task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int, begin: Callable[[], Awaitable[Any]]) -> None:
        result: Any
        try:
            async with self._slots:
                result = await begin()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of the client is not an Exception
            result = error
        self._done.put((number, result))

    def _drop(self) -> None:
        self._dropped = True
        for task in self._tasks:
            task.cancel()


# ---- The storage

_opened_by: int | None = None  # the process that opened one first; children lack its threads
MOST = (5 << 30) - TRAILER_BYTES  # maximum page bytes: the limit of one S3 request


class S3Storage(RemoteStorage):
    """Pages in an S3 bucket. Only the calling thread touches buffers, see `Requests`."""

    scheme = "s3"

    def __init__(self, place: Place, spec: StorageSpec) -> None:
        """Does not connect yet.

        Raises:
            ConfigError: pages are too large, or the URL names a bad file of certificates.
            StorageError: no client is installed, or it refuses the configuration.
        """
        if spec.page_bytes > MOST:
            found = f"found {spec.page_bytes}"
            raise ConfigError(f"s3: expected pages of {MOST} bytes at most, {found}")
        super().__init__(spec)
        self.place = place
        self.asking = place.requests
        self._body = spec.page_bytes + TRAILER_BYTES
        # Buffers of sent bodies, for reuse: with fresh memory a page of 2 MiB and its checksum take
        # 1.5 ms, of which the checksum is 0.15.
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
        # If it is not closed: no request may run while the interpreter exits.
        self._ended = weakref.finalize(self, self._requests.close)

    def ask(self) -> None:
        """Check that the store answers and allows reads; skipped with `wait=0`.

        Raises:
            StorageError: it does not; the message says why.
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

    # ---- the backend's operations

    def _exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        present: dict[int, bool] = {}
        jobs = (
            (i, functools.partial(self._client.head_async, self._store, self.object_name(name)))
            for i, name in enumerate(names)
        )
        for i, result in self._requests.each(jobs, deadline):
            if isinstance(result, BaseException) and not absent(result, told=False):
                raise StorageError(f"s3: {self.place}: {explain(result)}") from None
            present[i] = not isinstance(result, BaseException)
        if len(present) < len(names):
            raise StorageError(f"s3: {self.place}: no answer")
        return [present[i] for i in range(len(names))]

    def _fetch(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        results: dict[int, Read] = {}
        failed: list[str] = []  # after one failure no more requests begin: they would fail too

        def jobs() -> Iterator[Job]:
            for i, name in enumerate(names):
                if failed:
                    return
                yield i, functools.partial(self._get, name)

        for i, result in self._requests.each(jobs(), deadline):
            results[i] = self._take(names[i], views[i], result)
            if results[i][0] is ReadStatus.FAILED:
                failed.append(results[i][1])
        rest = failed[0] if failed else deadline.reason
        return [results.get(i, (ReadStatus.FAILED, rest)) for i in range(len(names))]

    async def _get(self, name: bytes) -> Any:
        """The object, or its length if that is wrong."""
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
        return judge_page(name, view, body[len(view) :].tobytes())

    def _put(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Wrote]:
        results: dict[int, Wrote] = {}
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
            results[i] = self._stored(result)
            if results[i][0] is WriteStatus.FAILED:
                failed.append(results[i][1])
        rest = failed[0] if failed else deadline.reason
        return [results.get(i, (WriteStatus.FAILED, rest)) for i in range(len(names))]

    def _whole(self, name: bytes, view: memoryview) -> Any:
        """Copy page and trailer into our own memory: a cancelled request may still read it."""
        try:
            body = self._spare.pop()
        except IndexError:
            body = np.empty(self._body, np.uint8)
        np.copyto(body[: len(view)], np.frombuffer(view, np.uint8))
        trailer = make_trailer(name, body.data[: len(view)])
        body[len(view) :] = np.frombuffer(trailer, np.uint8)
        return body

    async def _send(self, name: bytes, body: Any) -> Any:
        """Send the body. Returns it for reuse, as the store has all of it."""
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
        present = self._exists(names, deadline)
        removed = [
            self.object_name(name) for name, known in zip(names, present, strict=True) if known
        ]
        if removed:
            self._ask(lambda: self._client.delete_async(self._store, removed), deadline)
        return len(removed)

    def _remove_all(self, deadline: Deadline) -> int:
        removed: int = self._ask(self._remove_listed, deadline)
        return removed

    async def _remove_listed(self) -> int:
        removed = 0
        async for part in self._client.list(self._store, f"lightcache/{self.spec.name}"):
            await self._client.delete_async(self._store, [each["path"] for each in part])
            removed += len(part)
        return removed

    def _release(self) -> None:
        self._requests.close()
        self._ended.detach()
        self._spare.clear()
        self._store = None  # closes its connections

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
    """The first two numbers of its version; (0,): unknown."""
    found = re.match(r"(\d+)\.(\d+)", str(getattr(library, "__version__", "")))
    return tuple(map(int, found.groups())) if found else (0,)


__all__ = ["Job", "Place", "Requests", "Result", "S3Storage", "absent", "explain", "parse"]
