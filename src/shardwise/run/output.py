"""Standard output that may go away under a run: a terminal that closes, a full disk, no reader."""

import contextlib
import os
import sys
from typing import Any


class Output:
    """Standard output, which ends nothing when it cannot be written any more.

    The error is said once on standard error; from then on what is printed is dropped.
    """

    def write(self, text: str) -> int:
        with self._forgiving():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with self._forgiving():
            sys.stdout.flush()

    def isatty(self) -> bool:
        return not sys.stdout.closed and sys.stdout.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    @contextlib.contextmanager
    def _forgiving(self):
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it was closed here
            # What is still held back would fail again when the program ends.
            sys.stdout = open(os.devnull, "w")
            with contextlib.suppress(OSError):
                os.dup2(sys.stdout.fileno(), 1)
            with contextlib.suppress(OSError, AttributeError, ValueError):
                print(f"run: no more output ({error}); it goes on.", file=sys.stderr, flush=True)


def open_closed() -> None:
    """Open stdout and stderr where they are missing: else a file takes their number and output."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w")
            with contextlib.suppress(OSError):
                os.fstat(number)
                number = nowhere.fileno()  # some file has it already
            if number != nowhere.fileno():
                os.dup2(nowhere.fileno(), number)
            setattr(sys, name, nowhere)


OUT = Output()
