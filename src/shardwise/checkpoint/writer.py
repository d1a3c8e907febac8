"""The one writer of each directory: a thread, a step, and (by a lock) a program at a time."""

import contextlib
import errno
import os
import re
import shutil
import socket
import threading
import warnings
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from shardwise.checkpoint.chunks import registry
from shardwise.checkpoint.items import is_bucket
from shardwise.checkpoint.steps import Steps
from shardwise.processes.system import together

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_NAME = ".shardwise-lock"
_writers = {}  # address: Writer, of what this process has saved
_registering = threading.Lock()


class Lock:
    """A lock on a local directory, which the operating system takes back when this process ends.

    It is a lock of the process (POSIX's), hence not inherited by forked children that outlive it.
    Where another has it, the error begins with `who` and says what the other `does` there, and
    `advice`.
    """

    def __init__(self, where: str, who: str, does: str, advice: str):
        self._path = os.path.join(where, _NAME)
        self._told = who, does, advice
        self._file = None

    def take(self) -> None:
        """Take the lock, unless this process has it.

        Raises:
          RuntimeError: another process has it.
        """
        if self._held():
            return
        self.close()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        file = open(self._path, "a+")  # closing it gives the lock back
        try:
            _lock(file, self._path, *self._told)
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def close(self) -> None:
        """Give the lock back, which lets others in."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _held(self):
        """Whether this process has locked the file that now has the lock's name."""
        if self._file is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        return False


def _lock(file, path, who, does, advice):
    try:
        if fcntl is None:
            raise OSError(errno.ENOLCK, "no POSIX locks")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            warnings.warn(
                f"{who}: {os.path.dirname(path)} cannot be locked ({error}); make sure that no "
                f"other program writes there.",
                stacklevel=2,
            )
            return
        file.seek(0)
        raise RuntimeError(
            f"{who}: another program ({file.read() or 'unknown'}) {does} "
            f"{os.path.dirname(path)}. {advice}."
        ) from None


class Writer:
    """A writer of steps to one directory, each in the background, which deletes those not kept.

    A local directory stays locked from the first save on until `wait`.
    """

    def __init__(self, where: str):
        self._where = where
        self._turn = threading.RLock()  # Orbax deadlocks when two threads save
        advice = (
            "Save to another directory, or end that one first; it may also call checkpoint.wait"
        )
        told = "checkpoint.save", "saves to", f"{advice}, which lets others in"
        self._lock = None if is_bucket(where) else Lock(where, *told)
        self._keep, self._manager = None, None
        self.compared = False  # whether replicas in several processes have been

    def save(self, step: int, keep: int | None, arguments: dict, metadata: dict) -> None:
        """Start saving; a save that is still under way is waited for first.

        Raises:
          ValueError: there is a newer step, or a folder that is none of ours.
          RuntimeError: another program saves there.
          Exception: what went wrong while writing the step before.
        """
        with self._turn:
            try:
                self._finish()
                with together("checkpoint.save"):
                    self._enter()
                self._open(keep)
                with together("checkpoint.save"):
                    self._check(step)
                # Orbax's own schedule would skip some steps in silence.
                composite = ocp.args.Composite(**arguments)
                self._manager.save(step, args=composite, force=True, custom_metadata=metadata)
            except BaseException:
                self._leave()
                raise

    def wait(self) -> None:
        """Block until all is on disk, and let other programs save here."""
        with self._turn:
            try:
                self._finish()
            finally:
                self._leave()

    def finish(self) -> None:
        """Block until all is on disk; the directory stays locked."""
        with self._turn:
            self._finish()

    def _finish(self):
        if self._manager is not None:
            self._manager.wait_until_finished()

    def _enter(self):
        """Lock the directory, and delete what dead processes left unfinished in it."""
        if self._lock is None or jax.process_index() > 0:
            return
        self._lock.take()
        for path in Path(self._where).iterdir():
            if re.fullmatch(r"\d+\.orbax-checkpoint-tmp.*", path.name):
                shutil.rmtree(path)

    def _leave(self):
        if self._lock is not None:
            self._lock.close()

    def _open(self, keep):
        if self._manager is not None and keep != self._keep:
            self._manager.close()
            self._manager = None
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, step_name_format=Steps()
            )
            self._manager = ocp.CheckpointManager(
                self._where, options=options, handler_registry=registry()
            )
            self._keep = keep

    def _check(self, step):
        manager = self._manager
        manager.reload()  # another process may have written there, or deleted
        newest = manager.latest_step()
        if newest is not None and step <= newest:
            told = "is saved already" if step in manager.all_steps() else f"is behind step {newest}"
            raise ValueError(
                f"checkpoint.save: step {step} {told} in {self._where}. Steps only grow: save "
                f"{newest + 1} or later, or use another directory."
            )
        # On a bucket a save that was cut off has its step's own name.
        if self._lock is not None and (manager.directory / str(step)).exists():
            raise ValueError(
                f"checkpoint.save: {manager.directory / str(step)} is there already and is no "
                f"checkpoint. Save another step, or to another directory."
            )


def writer_of(where: str) -> Writer:
    """The one writer of this address."""
    with _registering:
        return _writers.setdefault(where, Writer(where))


def writers(where: str | None = None) -> list[Writer]:
    """The writers that have saved, to this address or to any."""
    with _registering:
        return [writer for place, writer in _writers.items() if where in (None, place)]
