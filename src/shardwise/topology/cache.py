"""A cache of what the compiler said, kept on disk by a hash of what it was asked."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FORM = 1  # of an entry: raise it when an entry's content changes


def folder() -> Path:
    """The folder of the cache: $SHARDWISE_CACHE, or shardwise/ in the user's cache."""
    if chosen := os.environ.get("SHARDWISE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def key(request: Mapping[str, Any], versions: Mapping[str, str], module: str) -> str:
    """A hash of the program, where it is to run, the options and who compiles it."""
    asked = json.dumps([_FORM, request, versions], sort_keys=True)
    return hashlib.sha256(f"{asked}\n{module}".encode()).hexdigest()


def load(name: str) -> dict[str, Any] | None:
    """The entry of that name, or None where there is none that can be read."""
    try:
        return json.loads(_path(name).read_text())
    except (OSError, ValueError):
        return None


def save(name: str, entry: Mapping[str, Any]) -> None:
    """Write the entry at once: a reader finds all of it, or nothing."""
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(entry, file)
    os.replace(file.name, path)


def _path(name: str) -> Path:
    return folder() / "compiled" / f"{name}.json"
