"""A forked child that is stopped at every system call of one operation, and killed at one of them.

Between two system calls a process changes nothing but its own memory and the shared one. What the
life of a segment consists of (names, sizes, byte locks) changes by system calls alone, so stopping
before and behind each of them sees every state that a death can leave there. What changes by stores
is stepped instruction by instruction elsewhere (stepper.c).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

_TRACEME, _SYSCALL, _CONT, _SETOPTIONS = 0, 24, 7, 0x4200
_OPTIONS = 0x1 | 0x100000  # TRACESYSGOOD: a system call's stop is SIGTRAP | 0x80; EXITKILL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class NotPermitted(Exception):
    """This machine does not let a process trace its child."""


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) == -1:
        raise NotPermitted(f"ptrace {request}: {os.strerror(ctypes.get_errno())}")


def _child(prepare: Callable[[], object], act: Callable[[object], object]) -> None:
    status = 1
    try:
        ready = prepare()
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        kept = act(ready)
        os.kill(os.getpid(), signal.SIGSTOP)
        del kept
        status = 0
    except NotPermitted:
        status = 77
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int) -> int:
    """The signal that the child has stopped with."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSTOPPED(status):
        return os.WSTOPSIG(status)
    code = os.waitstatus_to_exitcode(status)
    if code == 77:
        raise NotPermitted("PTRACE_TRACEME was refused")
    raise AssertionError(f"the victim ended by itself, with status {code}")


def _bury(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), f"a killed victim ended with {status}"


def kill_at(stop: int, prepare: Callable[[], object], act: Callable[[object], object]) -> bool:
    """Fork, prepare, and kill the child at the `stop`-th stop of `act`; each system call has two,
    one before and one behind it. False: `act` was over before; then it is killed behind its end.

    Raises:
        NotPermitted: there is no tracing here.
    """
    pid = os.fork()
    if pid == 0:
        _child(prepare, act)
    signals = _wait(pid)
    assert signals == signal.SIGSTOP, f"the victim stopped with signal {signals}"
    _ptrace(_SETOPTIONS, pid, _OPTIONS)
    for _ in range(stop + 1):
        _ptrace(_SYSCALL, pid)
        signals = _wait(pid)
        if signals == signal.SIGSTOP:
            _bury(pid)
            return False
        assert signals == signal.SIGTRAP | 0x80, f"the victim got signal {signals}"
    _bury(pid)
    return True
