"""Run as a program: one operation of a cache's life, killed before and behind every system call.

    life_cycle.py NAME SCENE STRIDE FIRST

Kills at stop FIRST, FIRST + STRIDE and so on. After each death a survivor does what the next
process would: it opens the cache with the same configuration and finds it sound, with every page
that was ready and was not to go, and can write new ones. Whoever lived in the cache all the time
must not have noticed. Then the last one leaves, the dead are swept, and nothing may be left. Prints
its counts; status 77: no tracing here.

A process of its own, because it forks: it has no threads and is attached to nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from crash import tracing
from crash.life_scenes import SCENES, SHM, Scene, Site, fill, verify

from lightcache import Cache, Detached
from lightcache.shm import Segment, sweep


def in_order(life: Callable[[], object]) -> NoReturn:
    """What a forked child does, which never returns into its parent's code."""
    status = 1
    try:
        life()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# ---------------------------------------------------------------- somebody who lives there


@dataclass(frozen=True)
class Resident:
    """A child that is attached all the time."""

    orders: int
    answers: int

    def ask(self, what: str) -> str:
        """`look`: does it find its pages; `leave`: close and end."""
        os.write(self.orders, what.encode() + b"\n")
        return os.read(self.answers, 100).decode()


def _look(cache: Cache) -> str:
    try:
        verify(cache)
    except Detached:
        return "detached"
    return "all there"


def _live(at: Site, orders: int, answers: int) -> None:
    cache = at.open(role="resident")
    fill(cache)
    os.write(answers, b"in")
    with os.fdopen(orders, "r") as lines:
        for line in lines:
            said = "left"
            if line == "leave\n":
                cache.close()
            else:
                said = _look(cache)
            os.write(answers, said.encode())


@contextlib.contextmanager
def resident(at: Site) -> Iterator[Resident]:
    """In before the body, told to leave behind it."""
    order_out, order_in = os.pipe()
    answer_out, answer_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(order_in)
        in_order(lambda: _live(at, order_out, answer_in))
    os.close(order_out)
    os.close(answer_in)
    here = Resident(order_in, answer_out)
    try:
        assert os.read(answer_out, 2) == b"in", "the resident did not come in"
        yield here
        assert here.ask("leave") == "left", "the resident could not leave"
    finally:
        os.close(order_in)
        os.close(answer_out)
        status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the resident ended with {status}"


# ---------------------------------------------------------------- the run


def by_another(function: Callable[[Site], None], at: Site) -> None:
    """Done by a process that ends in order, so that this one stays as it is."""
    pid = os.fork()
    if pid == 0:
        in_order(lambda: function(at))
    assert os.waitpid(pid, 0)[1] == 0, f"{getattr(function, '__name__', function)} failed"


def clean_up(at: Site, scene: Scene) -> None:
    """The last one leaves; the dead are swept; nothing may be left, in the pool's folder neither:
    what no segment names there is lost for ever."""
    Segment.unlink(at.name)
    sweep(prefix=at.name)
    if scene.apart:
        left = sorted(path.name for path in at.folder.iterdir())
        assert not left, f"left behind in the pool's folder: {left}"
        at.folder.rmdir()
    left = sorted(path.name for path in SHM.iterdir() if at.name in path.name)
    assert not left, f"left behind: {left}"


def one_death(at: Site, scene: Scene, stop: int) -> bool:
    """False: the operation has fewer stops."""
    if scene.apart:
        at.folder.mkdir()
    by_another(scene.before, at)
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(resident(at)) if scene.lived_in else None
        reached = tracing.kill_at(
            stop, lambda: scene.prepare(at), lambda ready: scene.act(at, ready)
        )
        if here:
            found = here.ask("look")
            assert found == "all there" or (found == "detached" and not scene.kept), found
        by_another(scene.after, at)
    clean_up(at, scene)
    return reached


def main() -> int:
    """See the module."""
    name, scene = sys.argv[1], SCENES[sys.argv[2]]
    stride, stop = map(int, sys.argv[3:])
    at, deaths, more = scene.site(name), 0, True
    signal.alarm(1200)  # a hang ends the run
    try:
        while more:
            more = one_death(at, scene, stop)
            deaths += 1
            stop += stride
    except tracing.NotPermitted as error:
        print(error, file=sys.stderr)
        return 77
    except AssertionError as error:
        print(f"{sys.argv[2]}, killed at stop {stop}: {error}", file=sys.stderr)
        return 1
    print(f"stops {stop - stride} deaths {deaths}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
