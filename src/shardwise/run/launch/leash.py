"""A script that becomes a program, which the kernel kills when the process that started it is gone.

`python -I -S leash.py PID PROGRAM ARGUMENT...`, of which PID is the process that started it, runs
without this package. Elsewhere than on Linux it only becomes the program.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h; it outlives exec, and no signal handler sees SIGKILL

if __name__ == "__main__":
    starter, *program = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(starter):  # it died before the line above
            sys.exit(f"process {starter}, which started this one, is gone")
    os.execv(program[0], program)
