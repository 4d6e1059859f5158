"""Clients that are killed while they hold something. Run in processes of their own."""

from __future__ import annotations

import signal
import sys

from support.keys import prompt

from lightcache import PageIndex


def hold_and_wait(name: str, device: bool) -> None:
    """Publish a prompt of 2 pages and pin it, reserve another of 3; then sleep to be killed."""
    index = PageIndex.attach(name, role="doomed", device=device)
    with index.reserve(prompt(1, 2)) as new:
        new.publish()
    held = index.match(prompt(1, 2)), index.reserve(prompt(2, 3))
    print("holding", flush=True)
    signal.pause()
    del held


if __name__ == "__main__":
    hold_and_wait(sys.argv[1], sys.argv[2] == "device")
