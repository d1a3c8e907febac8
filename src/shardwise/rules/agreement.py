"""Agreement of processes that must do the same: what one of them cannot do, all hear of."""

import contextlib
import json
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

_TEXT = 2048  # bytes of what each process tells of itself when they differ


@contextlib.contextmanager
def together(who: str) -> Iterator[dict[str, str]]:
    """Raise at the end of the block, in every process, if one raised in it or they differ.

    The block fills the dict that it is given with what must be equal, {name: text}. Every process
    has to come here. With one process nothing is compared.

    Raises:
      RuntimeError: another process raised in the block.
      ValueError: processes differ, with what each of them has.
    """
    facts, error = {}, None
    try:
        yield facts
    except Exception as raised:
        error = raised
    if jax.process_count() > 1:
        _compare(who, facts, error)
    if error is not None:
        raise error


def of_all(values: np.ndarray) -> np.ndarray:
    """The arrays of all processes, of one shape and of 32 bits at most, stacked."""
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values))


def _compare(who, facts, error):
    mine = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    all_of = of_all(np.array([error is not None, mine], np.uint32))
    failed = all_of[:, 0].astype(bool)
    if not failed.any() and len(set(all_of[:, 1])) == 1:
        return
    told = _exchange(repr(error) if error is not None else _told(facts))
    if error is not None:
        return
    if failed.any():
        process = int(failed.argmax())
        raise RuntimeError(f"{who}: process {process} cannot, so none does: {told[process]}")
    raise ValueError(
        f"{who}: the processes differ. "
        + "; ".join(f"Process {p} has {text}" for p, text in enumerate(told))
    )


def _told(facts):
    """The facts in a few words: a long one as a checksum, which tells that it differs."""
    short = (
        (name, text if len(text) < 100 else f"{zlib.crc32(text.encode()):08x}")
        for name, text in facts.items()
    )
    return ", ".join(f"{name} {text}" for name, text in short)


def _exchange(text):
    mine = np.zeros(_TEXT, np.uint8)
    encoded = np.frombuffer(text.encode()[:_TEXT], np.uint8)
    mine[: encoded.size] = encoded
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in of_all(mine)]
