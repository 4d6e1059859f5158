"""Children that fill something shared and children that drain it, and a storm that kills them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
SECONDS = float(os.environ.get("LIGHTCACHE_STORM_SECONDS", "5"))
ROUND = 5.0  # seconds of one storm: what came in it is kept in memory, a million messages or so
SHORT = 1.5  # of the storm in `make test`
STORMS = [
    pytest.param(0, SHORT, id="short"),
    *(
        pytest.param(number, min(SECONDS, ROUND), id=str(number), marks=pytest.mark.slow)
        for number in range(max(1, round(SECONDS / ROUND)))
    ),
]
DEADLINE = 60.0


def spawn(body: Callable[[], object]) -> int:
    """Run `body` in a child, which exits 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def ended_well(pid: int = -1) -> None:
    """Wait for a child, or any, which must have come to its end."""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Storm:
    """Children of both kinds, each replaced when it was killed."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        fill: Callable[[int, int], object],
        drain: Callable[[Path, int], object],
    ) -> None:
        """Args:
        fill: goes on until it is killed, given its number and a seed.
        drain: notes what comes in a file, given that and a seed.
        """
        self.folder, self.seed, self.fill, self.drain = folder, seed, fill, drain
        self.chance = random.Random(seed)
        self.started = 0
        self.paths: list[Path] = []
        self.living: dict[int, Path | None] = {}  # pid: the file of one that drains

    def start(self, filling: bool) -> None:
        """One more."""
        who = self.started
        self.started += 1
        path = None
        if filling:
            body = partial(self.fill, who, self.seed + who)
        else:
            path = self.folder / f"child{who}"
            path.touch()
            self.paths.append(path)
            body = partial(self.drain, path, self.seed + who)
        self.living[spawn(body)] = path

    def kill(self, pid: int) -> bool:
        """Whether it filled."""
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "it had ended by itself"
        assert os.WTERMSIG(status) == signal.SIGKILL
        return self.living.pop(pid) is None

    def run(self, seconds: float, most: int = 8000) -> int:
        """Kill and replace for so long, ten times at least, and until the children have noted
        some hundred lines, which takes longer on a busy machine; how often."""
        end, kills = time.monotonic() + seconds, 0
        while (time.monotonic() < end or kills < 10 or self.noted < 2000) and self.started < most:
            time.sleep(self.chance.uniform(0.01, 0.06))
            self.start(self.kill(self.chance.choice(list(self.living))))
            kills += 1
        return kills

    @property
    def noted(self) -> int:
        """Bytes of what came; the first line of a file may say where it begins."""
        return sum(max(0, path.stat().st_size - 10) for path in self.paths)

    def stop_filling(self) -> None:
        """Kill those who fill; the others wait for more."""
        for pid in [pid for pid, path in self.living.items() if path is None]:
            self.kill(pid)
