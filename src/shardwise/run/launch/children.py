"""Processes that this one has started: their output line by line, their ends, and no orphan."""

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.run.reports import OUT

LEASH = Path(__file__).with_name("leash.py")
REMEMBERED = 20  # lines of each process
LONGEST = 2**20  # bytes of a line; a longer one is shown in pieces
DRAINING = 100  # reads of a dead process's pipe, which another that escaped may hold open


class Child:
    """A process with a session of its own: a terminal's Ctrl-C reaches only who started it.

    `code` is its return code as in `subprocess`, None while it runs; `lines` are its last ones, and
    `raised` the last line of its last traceback, which the runtime's own words may follow.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]):
        self.index = index
        self.lines = collections.deque(maxlen=REMEMBERED)
        self.raised = ""
        self._in_traceback = False
        self.signalled = False
        self.started = time.monotonic()
        self._begun = b""  # of a line that has not ended
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Python holds back what it prints to a pipe, and loses it when it is killed.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        self.pid = self._process.pid
        self.pipe = self._process.stdout

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def send(self, number: int) -> None:
        """Send the process a signal, unless it is gone."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it ended since we last looked
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and what it has started."""
        if self.code is None:
            # It ended since we last looked; of one that was not yet waited for, macOS says EPERM.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether the process ended since the last call; what it had started is then killed."""
        if self.code is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, self.pid, flags) is None:
            return False
        self.kill()  # the rest of its group, before its number can be another's
        self._process.wait()
        return True

    def take(self) -> bool:
        """Print what the process has written; return False at the end of its output."""
        block = os.read(self.pipe.fileno(), 2**16)
        *whole, self._begun = (self._begun + block).split(b"\n")
        if self._begun and (not block or len(self._begun) > LONGEST):
            whole, self._begun = [*whole, self._begun], b""
        for line in whole:
            if line.startswith(b"[Gloo] Rank"):  # a line for each peer and each group of devices
                continue
            text = line.decode(errors="backslashreplace")
            self.lines.append(text)
            if self._in_traceback and text[:1].strip():  # the first that is not indented
                self.raised, self._in_traceback = text, False
            self._in_traceback |= text == "Traceback (most recent call last):"
            show(f"[{self.index}] {text}")
        return bool(block)

    def close(self) -> None:
        """Kill the process if it runs, wait for it, and close its pipe."""
        self.kill()
        self._process.wait()
        self.pipe.close()


class Children:
    """Processes `first` and so on. Leaving the context kills those that run."""

    def __init__(self, first: int = 0):
        self.all: list[Child] = []
        self._first = first
        self._pipes = selectors.DefaultSelector()

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *failure) -> None:
        for child in self.all:
            child.kill()
        for child in self.all:
            child.close()
        self._pipes.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next process."""
        child = Child(self._first + len(self.all), command, environment)
        self.all.append(child)
        self._pipes.register(child.pipe, selectors.EVENT_READ, child)

    def running(self) -> list[Child]:
        """The processes whose end has not been seen."""
        return [child for child in self.all if child.code is None]

    def pass_on(self, number: int) -> None:
        """Send a signal to each process that has had none."""
        for child in self.running():
            if not child.signalled:
                child.signalled = True
                child.send(number)

    def kill(self) -> None:
        """Kill all processes that run."""
        for child in self.running():
            child.kill()

    def wait(self, seconds: float) -> list[Child]:
        """Print what arrives, for some seconds at most; return who ended, their output printed."""
        self._read(seconds)
        ended = [child for child in self.all if child.has_ended()]
        for _ in range(DRAINING):
            if not any(key.data in ended for key in self._pipes.get_map().values()):
                break
            self._read(0.02)
        # Of several that end at once, one that aborts does so because another is gone.
        return sorted(ended, key=lambda child: child.code == -signal.SIGABRT)

    def _read(self, seconds: float) -> None:
        if not self._pipes.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._pipes.select(seconds):
            if not key.data.take():
                self._pipes.unregister(key.data.pipe)


def show(line: str) -> None:
    """Print a line, also where the terminal cannot show all of its characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=OUT, flush=True)
