"""The notes that each process of a run leaves in the run folder, read from outside."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Note:
    """The last note of one process, of what it is doing; `time` is its own clock's."""

    process: int
    pid: int
    host: str
    step: int
    doing: str
    time: float
    line: str

    def told(self) -> str:
        """The step and what the process is doing, in words."""
        return f"step {self.step}, {self.doing}"


def read(folder: Path | None, pids: Mapping[int, int]) -> dict[int, Note]:
    """The note of each process, by index, written by these process ids: others are of earlier runs.

    Raises:
      ValueError: a file there that is no note.
    """
    found = {}
    for index, pid in pids.items():
        file = None if folder is None else folder / "processes" / f"{index}.json"
        if file is None or not file.exists():
            continue
        try:
            said = json.loads(file.read_text())
            note = Note(**{field.name: said[field.name] for field in fields(Note)})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no note of a process ({error!r})") from None
        if note.pid == pid:
            found[index] = note
    return found
