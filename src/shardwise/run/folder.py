"""The run folder: where what lies, its settings, and files that are written whole or not at all."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax

from shardwise.checkpoint.items import address


class Folder:
    """The folder of a run, which process 0 writes; a ValueError where something else lies there.

    settings.json        every setting, as the run last started
    metrics.jsonl        a line of JSON for each step that is done
    evaluations.jsonl    one for each evaluation
    hashes.jsonl         one for each step whose arrays were hashed
    metrics.png          loss and throughput, drawn
    checkpoints/         Orbax, one folder for each saved step
    processes/0.json     what each process notes: process, pid, host, step, doing, time, line
    batches/12.npz       the batch of a bad step
    """

    def __init__(self, path: str | os.PathLike):
        self.path = on_disk(path).expanduser().absolute()
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.hashes = self.path / "hashes.jsonl"
        self.lines = self.metrics, self.evaluations, self.hashes
        self.checkpoints = self.path / "checkpoints"
        folders = [self.path, *(self.path / x for x in ("checkpoints", "processes", "batches"))]
        for place in (*folders, self.path / "settings.json", *self.lines):
            if place.exists() and place.is_dir() != (place in folders):
                found, wanted = ("a file", "a folder")[:: 1 if place in folders else -1]
                raise ValueError(
                    f"run: {place} is {found}, and a run has {wanted} there. Move it away, or name "
                    f"another run folder."
                )

    def settings(self) -> dict[str, Any] | None:
        """The settings as `settings.flat` gave them when the run last started, or None."""
        file = self.path / "settings.json"
        if not file.exists():
            return None
        try:
            found = json.loads(file.read_bytes())
            if not isinstance(found, dict):
                raise ValueError(f"it holds {found!r:.60}; expected an object of settings by name")
        except ValueError as error:
            raise ValueError(f"run: {file} is no JSON of settings ({error}).") from None
        return found

    def write_settings(self, values: dict[str, Any]) -> None:
        """Write the settings, in process 0."""
        if jax.process_index() == 0:
            write(self.path / "settings.json", json.dumps(values, indent=1) + "\n")


def on_disk(path: str | os.PathLike) -> Path:
    """The path of a run folder; a ValueError where it is an address, or Orbax cannot save there."""
    if re.match(r"\w[\w.+-]+:/", str(path)):  # a Path has lost a slash
        raise ValueError(
            f"run: {path} is an address, and a run folder lies on a disk that all processes see: "
            f"lines are added to its files. Mount the bucket (Cloud Storage FUSE, mountpoint-s3), "
            f"and name the folder there."
        )
    address(path)
    return Path(path)


def write(file: Path, text: str) -> None:
    """Write all of the text, or nothing: what was there stays until the new is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
