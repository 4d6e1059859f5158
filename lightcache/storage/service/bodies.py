"""What a task is, as a client says it to the storage service: bytes, checked strictly.

Integers are little-endian; times are CLOCK_MONOTONIC, which the processes of a node have in common.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from lightcache.namespaces import NAME_BYTES, Namespace
from lightcache.storage.protocol import Keys
from lightcache.storage.service.messages import Malformed

MOST_KEYS = 1 << 16
"""Of one task."""

_ASK = struct.Struct("<ddqQQIIIIHH")
_PUBLISH = struct.Struct("<ddQI")
_NO_TOKENS = -1


class _Has(IntFlag):
    """What else is said."""

    REQUEST = 1
    HOLD = 2
    TOKEN_IDS = 4


@dataclass(frozen=True)
class Ask:
    """Of `WRITE`, `PREFETCH` and `DEEPEST`."""

    end: float
    """When its time is up, by CLOCK_MONOTONIC."""
    timeout: float
    """Seconds that it had."""
    keys: Keys
    namespace: Namespace
    tokens: int | None = None
    """Of a write."""
    request: int | None = None
    """Of a write, of the client's."""
    start: int = 0
    """Of a prefetch."""
    most: int = 0
    """Of a `DEEPEST`."""
    hold: bool = False
    """Of a prefetch."""
    token_ids: npt.NDArray[np.uint32] | None = None
    """Of a write: those of all pages of the keys, one behind another."""

    def pack(self) -> bytes:
        """Its bytes."""
        space, ids = self.namespace, self.token_ids
        weights, tenant = space.weights.encode(), space.tenant.encode()
        has = _Has.HOLD if self.hold else _Has(0)
        has |= _Has(0) if self.request is None else _Has.REQUEST
        has |= _Has(0) if ids is None else _Has.TOKEN_IDS
        body = _ASK.pack(
            self.end,
            self.timeout,
            _NO_TOKENS if self.tokens is None else self.tokens,
            0 if self.request is None else self.request,
            space.ref,
            has,
            self.start,
            self.most,
            len(self.keys),
            len(weights),
            len(tenant),
        )
        keys = self.keys.astype("<u8", copy=False).tobytes()
        told = b"" if ids is None else ids.astype("<u4", copy=False).tobytes()
        return b"".join((body, weights, tenant, keys, told))

    @classmethod
    def unpack(cls, body: bytes) -> Ask:
        """Read one.

        Raises:
            Malformed: it is none.
        """
        if len(body) < _ASK.size:
            raise Malformed(f"{len(body)} bytes are no task")
        end, timeout, tokens, request, ref, has, start, most, keys, *lengths = _ASK.unpack_from(
            body
        )
        weights, tenant = lengths
        if math.isnan(end) or math.isnan(timeout) or tokens < _NO_TOKENS or has > sum(_Has):
            raise Malformed(f"end {end}, timeout {timeout}, {tokens} tokens, flags {has:#x}")
        if ref > 0xFFFFFFFF:
            raise Malformed(f"namespace {ref:#x}")
        at = _ASK.size + weights + tenant
        ids = len(body) - at - 16 * keys  # bytes
        if max(weights, tenant) > NAME_BYTES or keys > MOST_KEYS or ids < 0 or ids % 4:
            raise Malformed(f"{len(body)} bytes, {keys} keys, names of {weights} and {tenant}")
        if ids and not has & _Has.TOKEN_IDS:
            raise Malformed(f"{ids} bytes behind {keys} keys")
        try:
            names = [body[_ASK.size : at - tenant].decode(), body[at - tenant : at].decode()]
        except UnicodeDecodeError as error:
            raise Malformed(str(error)) from None
        found = np.frombuffer(body, "<u8", 2 * keys, at).astype(np.uint64).reshape(-1, 2)
        told = np.frombuffer(body, "<u4", ids // 4, at + 16 * keys).astype(np.uint32)
        return cls(
            end=end,
            timeout=timeout,
            keys=found,
            namespace=Namespace(names[0], names[1], ref),
            tokens=None if tokens == _NO_TOKENS else tokens,
            request=request if has & _Has.REQUEST else None,
            start=start,
            most=most,
            hold=bool(has & _Has.HOLD),
            token_ids=told if has & _Has.TOKEN_IDS else None,
        )


@dataclass(frozen=True)
class Publish:
    """Of `PUBLISH`."""

    end: float
    """As of an `Ask`."""
    timeout: float
    held: int
    """Number of the client's task that holds pages."""
    pages: int

    def pack(self) -> bytes:
        """Its bytes."""
        return _PUBLISH.pack(self.end, self.timeout, self.held, self.pages)

    @classmethod
    def unpack(cls, body: bytes) -> Publish:
        """Read one.

        Raises:
            Malformed: it is none.
        """
        if len(body) != _PUBLISH.size:
            raise Malformed(f"{len(body)} bytes say nothing of what to publish")
        end, timeout, held, pages = _PUBLISH.unpack(body)
        if math.isnan(end) or math.isnan(timeout):
            raise Malformed(f"end {end}, timeout {timeout}")
        return cls(end, timeout, held, pages)


__all__ = ["MOST_KEYS", "Ask", "Publish"]
