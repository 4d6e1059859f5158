"""Every process of vLLM reads this at its start: it ends with the process that has started it. That
of a test may be killed, and vLLM's own processes would live until they ask for it. To the kernel
the parent is the thread that has started it: one that ends takes its processes with it. Python's
resource tracker is left out: it ends by itself, after it has removed the names that are left."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if "resource_tracker" not in " ".join(sys.orig_argv):
    end_with_parent()
os.register_at_fork(after_in_child=end_with_parent)
