"""Processes that this one has started: their output line by line, their ends, and no orphan."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.run.notes import Seen
from shardwise.run.reports import say

_LEASH = Path(__file__).with_name("leash.py")
_REMEMBERED = 20  # lines of each process
_LONGEST = 2**20  # bytes of a line; a longer one is shown in pieces
_DRAINING = 2.0  # seconds for a dead process's pipe, which another that escaped may hold open


class Child:
    """A process with a session of its own: a terminal's Ctrl-C reaches only who started it.

    `code` is its return code as in `subprocess`, None while it runs; `seen` its notes; `lines` are
    the last that it printed, as shown, and `raised` ends its last traceback, which the runtime's
    own words may follow.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]):
        self.index, self.seen = index, Seen(time.monotonic())
        self.lines = collections.deque(maxlen=_REMEMBERED)
        self.code, self.raised, self.signalled, self._showing = None, "", False, False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Python holds back what it prints to a pipe, and loses it when it is killed.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        self.pid = self._process.pid
        # A thread of its own, so that a full pipe of ours holds up no signal.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, number: int) -> None:
        """Send the process a signal, unless it is gone."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it ended since we last looked
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and what it has started."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM
                os.killpg(self.pid, signal.SIGKILL)

    def is_stopped(self) -> bool:
        """Whether the operating system has stopped it (SIGSTOP, a debugger); on Linux only."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return self.code is None and state in "Tt"
        return False

    def has_ended(self) -> bool:
        """Whether the process ended since the last call; what it had started is then killed."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.code is not None or os.waitid(os.P_PID, self.pid, flags) is None:
            return False
        self.close()  # with the rest of its group, before its number can be another's
        return True

    def close(self) -> None:
        """Kill the process if it runs, wait for it, and for its output."""
        self.kill()
        self.code = self._process.wait()
        self._reader.join(_DRAINING)
        while self._showing and self._reader.is_alive():  # to a reader that takes its time
            self._reader.join(_DRAINING)

    def _read(self):
        """Print what the process writes, line by line."""
        in_traceback = False
        with self._process.stdout as pipe:
            for line in iter(lambda: pipe.readline(_LONGEST), b""):
                if line.startswith(b"[Gloo] Rank"):  # a line for each peer and group of devices
                    continue
                text = line.removesuffix(b"\n").decode(errors="backslashreplace")
                shown = f"[{self.index}] {text}"
                self.lines.append(shown)
                if in_traceback and text[:1].strip():  # the first that is not indented
                    self.raised, in_traceback = text, False
                in_traceback |= text == "Traceback (most recent call last):"
                self._showing = True
                say(shown)
                self._showing = False


def ended(children: Sequence[Child]) -> list[Child]:
    """The processes that ended since the last call, with all their output printed."""
    found = [child for child in children if child.has_ended()]
    # Of several that end at once, one that aborts does so because another is gone.
    return sorted(found, key=lambda child: child.code == -signal.SIGABRT)
