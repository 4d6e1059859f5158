"""Every process of vLLM reads this at its start: it ends with the process that has started it. That
of a test may be killed, and vLLM's own processes would live until they ask for it."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


end_with_parent()
os.register_at_fork(after_in_child=end_with_parent)
