"""The run folder: settings, metrics, checkpoints, and notes of what each process is doing."""

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import jax

from shardwise.checkpoint.items import address


class Folder:
    """The folder of a run. Process 0 writes it, but for the notes: each process writes its own.

    settings.json        every setting, as the run last started
    metrics.jsonl        a line of JSON for each step that is done
    evaluations.jsonl    one for each evaluation
    metrics.png, .svg    loss and throughput, drawn
    checkpoints/         Orbax, one folder for each saved step
    processes/0.json     process, pid, host, step, doing, time, line
    batches/12.npz       the batch of a bad step

    Raises ValueError where something else lies in one of these places.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = on_disk(path).expanduser().absolute()
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.checkpoints = self.path / "checkpoints"
        folders = [self.path, *(self.path / x for x in ("checkpoints", "processes", "batches"))]
        for place in (*folders, self.path / "settings.json", self.metrics, self.evaluations):
            if place.exists() and place.is_dir() != (place in folders):
                found, wanted = ("a file", "a folder")[:: 1 if place in folders else -1]
                raise ValueError(
                    f"run: {place} is {found}, and a run has {wanted} there. Move it away, or name "
                    f"another run folder."
                )

    def settings(self) -> dict[str, Any] | None:
        """The settings as `stored.flat` gave them when the run last started, or None.

        Raises:
          ValueError: the file is none of ours.
        """
        file = self.path / "settings.json"
        if not file.exists():
            return None
        try:
            found = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"run: {file} is no JSON ({error}); is this a run folder?") from None
        if not isinstance(found, dict):
            raise ValueError(
                f"run: {file} holds {found!r:.60}; expected an object of settings by name. Is this "
                f"a run folder?"
            )
        return found

    def write_settings(self, values: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            write(self.path / "settings.json", json.dumps(values, indent=1) + "\n")

    def notes(self) -> list[dict[str, Any]]:
        """The last note of each process, as a dict."""
        files = sorted((self.path / "processes").glob("*.json"), key=lambda p: int(p.stem))
        return [json.loads(file.read_text()) for file in files]


def on_disk(path: str | os.PathLike) -> Path:
    """The path of a run folder.

    Raises:
      ValueError: it is an address, such as gs://bucket/run; a `Path` of one has lost a slash. Or
        no checkpoint can lie there, by `checkpoint.save`.
    """
    if re.match(r"\w[\w.+-]+:/", str(path)):
        raise ValueError(
            f"run: {path} is an address, and a run folder lies on a disk that all processes see: "
            f"lines are added to its files. Mount the bucket (Cloud Storage FUSE, mountpoint-s3), "
            f"and name the folder there."
        )
    address(path)
    return Path(path)


class Note:
    """The note of what one process is doing, for those who watch it from outside."""

    def __init__(self, folder: Folder, index: int):
        self._file = folder.path / "processes" / f"{index}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self.index, self.step, self.doing, self.line = index, 0, "starting", ""
        self._who = {"process": index, "pid": os.getpid(), "host": socket.gethostname()}
        self.say("starting")

    def say(self, doing: str, step: int | None = None, line: str | None = None) -> None:
        self.doing = doing
        self.step = self.step if step is None else step
        self.line = self.line if line is None else line
        self.time = time.time()
        state = {"step": self.step, "doing": doing, "time": self.time, "line": self.line}
        write(self._file, json.dumps(self._who | state) + "\n")


def write(file: Path, text: str) -> None:
    """Write all of the text, or nothing: what was there stays until the new is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text)
        os.replace(new, file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
