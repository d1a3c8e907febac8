"""A directory of steps: which there are, and their one writer, which a lock keeps alone."""

import contextlib
import os
import re
import shutil
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardwise.checkpoint.chunks import Handler
from shardwise.checkpoint.items import is_bucket
from shardwise.processes.system import of_all, together

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_LOCK = ".shardwise-lock"
_ADVICE = "Save to another directory, or end that one first, or have it call checkpoint.wait"


class Steps(type(ocp.path.step.standard_name_format())):
    """Orbax's names of steps; a folder with a number for a name is one only if Orbax wrote it."""

    def find_all(self, base_path: Any) -> Iterator[Any]:
        every = super().find_all(base_path)
        return (found for found in every if (found.path / "_CHECKPOINT_METADATA").exists())


def reader(where: str, items: dict[str, bool] | None = None) -> ocp.CheckpointManager:
    """Orbax's manager; `items` says of each item whether its metadata is to be read."""
    kinds = ocp.JsonCheckpointHandler, ocp.PyTreeCheckpointHandler
    handlers = items and {name: kinds[is_tree]() for name, is_tree in items.items()}
    options = ocp.CheckpointManagerOptions(create=False, step_name_format=Steps())
    return ocp.CheckpointManager(where, options=options, item_handlers=handlers or None)


def find(where: str, step: int | None) -> tuple[int, list[str]]:
    """The step to read (None: the newest that all processes see), and the names of its items."""
    with reader(where) as manager:
        with together("checkpoint.restore") as facts:
            facts["step"] = step
            if not manager.directory.exists():
                raise FileNotFoundError(
                    f"checkpoint.restore: no directory {manager.directory}; give the one saved to."
                )
            steps = sorted(manager.all_steps())
        # Processes may look while another program saves or deletes.
        common = sorted(set.intersection(*map(set, of_all(steps))))
        newest = common[-1] if common and step is None else step
        if newest in common and not isinstance(newest, bool):
            items = (manager.directory / str(newest)).iterdir()
            return int(newest), [path.name for path in items if path.is_dir()]
        cut_off = [p.name for p in manager.directory.iterdir() if ocp.utils.is_tmp_checkpoint(p)]
        raise FileNotFoundError(
            f"checkpoint.restore: no {'step' if step is None else f'step {step}'} is complete in "
            f"{manager.directory}. Complete steps: {common or 'none'}; incomplete, cut off while "
            f"saving: {sorted(cut_off) or 'none'}."
        )


class Lock:
    """A lock on a local directory, which the operating system takes back when this process ends: it
    is POSIX's, which forked children do not inherit. The error where another process has it begins
    with `who`, and says what that one `does` there, and `advice`.
    """

    def __init__(self, where: str, who: str, does: str, advice: str):
        self._where, self._who, self._does, self._advice = where, who, does, advice
        self._file = None

    def take(self) -> None:
        """Take the lock, unless this process has it; RuntimeError where another process has."""
        path = os.path.join(self._where, _LOCK)
        with contextlib.suppress(FileNotFoundError):  # the directory was deleted
            if self._file is not None and os.path.samefile(self._file.fileno(), path):
                return
        self.close()
        os.makedirs(self._where, exist_ok=True)
        self._file = open(path, "a+")  # closing it gives the lock back
        try:
            if fcntl is None:
                raise OSError("no POSIX locks")
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # as systems say it
            self._file.seek(0)
            other = f"another program ({self._file.read() or 'unknown'})"
            self.close()
            told = f"{self._who}: {other} {self._does} {self._where}. {self._advice}."
            raise RuntimeError(told) from None
        except OSError as error:
            told = f"{self._who}: {self._where} cannot be locked ({error}); make sure that no other"
            warnings.warn(f"{told} program writes there.", stacklevel=2)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def close(self) -> None:
        """Give the lock back, which lets others in."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Writer:
    """The writer of steps to one directory, which it locks from the first save on until `wait`."""

    def __init__(self, where):
        self._where = where
        self._turn = threading.RLock()  # Orbax deadlocks when two threads save
        self._lock = Lock(where, "checkpoint.save", "saves to", _ADVICE)
        self._manager = None  # of the step that is written
        self.compared = False  # whether replicas in several processes have been

    def save(self, step, keep, arguments, metadata):
        """Start saving, after a save that is still under way."""
        with self._turn:
            try:
                self.finish()
                with together("checkpoint.save"):
                    self._enter()
                self._manager = _manager(self._where, keep)
                with together("checkpoint.save"):
                    self._check(step)
                args = ocp.args.Composite(**arguments)
                # Orbax's own schedule would skip some steps in silence.
                self._manager.save(step, args=args, force=True, custom_metadata=metadata)
            except BaseException:
                self._lock.close()
                raise

    def wait(self):
        """Block until all is on disk, and let other programs save here."""
        with self._turn:
            try:
                self.finish()
            finally:
                self._lock.close()

    def finish(self):
        """Block until all is on disk; the directory stays locked."""
        with self._turn:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()

    def _enter(self):
        """Lock the directory, and delete what dead processes left unfinished in it."""
        if is_bucket(self._where) or jax.process_index() > 0:
            return
        self._lock.take()
        for path in Path(self._where).iterdir():
            if re.fullmatch(r"\d+\.orbax-checkpoint-tmp.*", path.name):
                shutil.rmtree(path)

    def _check(self, step):
        newest, folder = self._manager.latest_step(), self._manager.directory / str(step)
        if newest is not None and step <= newest:
            is_there = step in self._manager.all_steps()
            told = "is saved already" if is_there else f"is behind step {newest}"
            raise ValueError(
                f"checkpoint.save: step {step} {told} in {self._where}. Steps only grow: save "
                f"{newest + 1} or later, or use another directory."
            )
        # On a bucket a save that was cut off has its step's own name.
        if not is_bucket(self._where) and folder.exists():
            told = "is there already and is no checkpoint"
            raise ValueError(
                f"checkpoint.save: {folder} {told}. Save another step, or to another directory."
            )


def _manager(where, keep):
    """Orbax's manager for one save, which looks for the steps that are there by now."""
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(None, ocp.args.StandardSave, Handler)
    handlers.add(None, ocp.args.JsonSave, ocp.JsonCheckpointHandler)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, step_name_format=Steps())
    return ocp.CheckpointManager(where, options=options, handler_registry=handlers)
