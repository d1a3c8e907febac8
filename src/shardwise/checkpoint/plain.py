"""Plain data as JSON that gives back exactly what went in."""

import base64
import json
import zlib
from typing import Any


def to_json(name: str, item: Any) -> Any:
    """The item as JSON can hold it: Grain's positions are dicts of numbers, or bytes.

    Raises:
      ValueError: it cannot, or would give back something else (tuples, keys that are no strings).
    """
    if isinstance(item, bytes):
        return {"base64": base64.b64encode(item).decode()}
    if isinstance(item, dict) and item.keys() == {"base64"}:
        raise ValueError(
            f"checkpoint.save: item {name!r} is a dict with the one key 'base64', which stands for "
            f"bytes; give it another key beside that."
        )
    _check(name, item, ())
    return item


def from_json(item: Any) -> Any:
    """The item that `to_json` was given."""
    if isinstance(item, dict) and item.keys() == {"base64"}:
        return base64.b64decode(item["base64"])
    return item


def digest(item: Any) -> int:
    """A checksum of what JSON holds, whatever the order of its keys."""
    return zlib.crc32(json.dumps(item, sort_keys=True).encode())


def _check(name, item, where):
    if item is None or type(item) in (bool, int, float, str):
        return
    if type(item) is list:
        parts = enumerate(item)
    elif type(item) is dict and all(type(key) is str for key in item):
        parts = item.items()
    else:
        at = f" at {'/'.join(map(str, where))}" if where else ""
        told = f"a dict with the keys {list(item)[:5]}" if isinstance(item, dict) else f"{item!r}"
        raise ValueError(
            f"checkpoint.save: item {name!r} holds no arrays and is not JSON: {told}{at}, of type "
            f"{type(item).__name__}, would not come back as it is. Expected arrays, or plain "
            f"numbers, strings, lists and dicts whose keys are strings."
        )
    for key, part in parts:
        _check(name, part, (*where, key))
