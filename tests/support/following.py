"""A router's view of events, written from their description alone: no code of ours makes or reads
a message here."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

END = b"\xff" * 8


class Follower:
    """Subscribes, and keeps the blocks of one medium as the messages say."""

    def __init__(self, context: Any, endpoint: str, replay: str | None, topic: str = "") -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._context, self._replay, self._topic = context, replay, topic.encode()
        self.blocks: dict[Any, Any] = {}
        """The parent of each block."""
        self.tokens: dict[Any, tuple[int, ...]] = {}
        """The token ids of each block; empty: none were told."""
        self.next: int | None = None
        """The number of the message that must come; None: it knows nothing yet."""
        self.clears = self.snapshots = self.gaps = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self._socket.close(linger=0)

    def take(self, milliseconds: int = 20) -> int:
        """Messages that came within this time, or right after one another."""
        count = 0
        while self._socket.poll(0 if count else milliseconds):
            _, number, payload = self._socket.recv_multipart()
            count += 1
            sequence = int.from_bytes(number, "big")
            if self.next is None or sequence > self.next:
                self.gaps += self.next is not None
                self.ask()
            if self.next is None or sequence >= self.next:
                assert sequence == (self.next or sequence), "a gap that a request did not fill"
                self.apply(payload)
                self.next = sequence + 1
        return count

    def ask(self) -> None:
        """What was missed."""
        if self._replay is None:
            return
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay)
            first = self.next or 0
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                assert socket.poll(20_000), "no answer"
                empty, topic, number, payload = socket.recv_multipart()
                assert empty == b""
                if number == END:
                    return
                if not topic.startswith(self._topic):
                    continue
                sequence = int.from_bytes(number, "big")
                self.snapshots += sequence > first and self.next in (None, first)
                self.apply(payload)
                self.next = sequence + 1
        finally:
            socket.close(linger=0)

    def apply(self, payload: bytes) -> None:
        time, events, rank = msgpack.unpackb(payload)
        assert time > 0
        assert rank == 0
        for event in events:
            self.events.append(event)
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                self.tokens.clear()
                self.clears += 1
                continue
            assert event["medium"] == "CPU"
            if kind == "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.blocks[block], self.tokens[block]
            else:
                assert kind == "BlockStored"
                before, size = event["parent_block_hash"], event["block_size"]
                ids = event["token_ids"]
                assert len(ids) in (0, size * len(event["block_hashes"]))
                for number, block in enumerate(event["block_hashes"]):
                    assert block not in self.blocks, "told twice"
                    self.blocks[block] = before
                    self.tokens[block] = tuple(ids[number * size : (number + 1) * size])
                    before = block
