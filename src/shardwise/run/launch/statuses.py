"""Exit statuses: of one process in words, and of all of them together."""

import signal
from collections.abc import Sequence

DONE, STOPPED = 0, 75  # 75: stopped by a signal, after saving
STUCK = 70  # a process saw by itself that it makes no progress
WELL = (DONE, STOPPED)


def named(number: int) -> str:
    """A signal's name and number, as in "SIGKILL (9)"."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:  # a real-time signal, of which not all have names
        return f"signal {number}"


def told(code: int) -> str:
    """The words for how a process ended, from what `subprocess` calls its return code."""
    if code < 0:
        return f"was killed by {named(-code)}"
    meaning = {
        DONE: " (done)",
        STOPPED: " (stopped by a signal, after saving)",
        STUCK: " (no progress)",
    }
    return f"exited with status {code}{meaning.get(code, '')}"


def overall(codes: Sequence[int]) -> int:
    """The status of a launcher whose processes ended with these codes, the first failure first.

    0 when all are done, 75 when all are done or stopped, else the first failure's: 128 + signal
    where a signal killed it.
    """
    for code in codes:
        if code not in WELL:
            return 128 - code if code < 0 else code
    return STOPPED if STOPPED in codes else DONE
