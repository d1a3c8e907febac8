"""The data that `Data` names: a folder, a glob, an array of tokens, or the standard library."""

import glob
import zlib
from pathlib import Path

import grain
import numpy as np

from shardwise import data
from shardwise.run.settings import Data


def documents(source: Data, split: str = "train") -> tuple[np.ndarray, ...]:
    """The documents of a split: nine files in ten train; of one alone, the first nine tenths.

    Raises:
      ValueError: both text and tokens; an array that is none of token numbers.
      FileNotFoundError: nothing there.
    """
    if source.text is not None and source.tokens is not None:
        raise ValueError("run: give data.text or data.tokens, and not both.")
    if source.tokens is not None:
        return (_tokens(source.tokens, split),)
    return data.corpus(split) if source.text is None else _files(source.text, split)


def rows(source: Data, sequence: int, seed: int, split: str = "train") -> grain.MapDataset:
    """Endless shuffled rows of a split, as `data.rows` makes them; validation is never shuffled."""
    shuffled = seed if split == "train" else None
    return data.rows(documents(source, split), sequence, shuffled, source.packed)


def fingerprint(source: Data) -> int:
    """A checksum of what a run is trained on, so that it does not go on with other data."""
    if source.tokens is None:
        return data.checksum(documents(source))
    array = np.load(source.tokens, mmap_mode="r")
    ends = np.concatenate([array[: 2**18], array[-(2**18) :]])
    return zlib.crc32(np.ascontiguousarray(ends).tobytes(), array.size % 2**32)


def vocabulary(source: Data) -> int:
    """The size of the vocabulary: one more than the largest token."""
    if source.tokens is None:
        return data.VOCAB
    array = np.load(source.tokens, mmap_mode="r")
    return 1 + max(int(array[i : i + 2**24].max()) for i in range(0, array.size, 2**24))


def _tokens(file, split):
    if not Path(file).is_file():
        raise FileNotFoundError(f"run: no file {file}; data.tokens names a .npy of token numbers.")
    array = np.load(file, mmap_mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.size < 20:
        raise ValueError(
            f"run: {file} is {array.dtype}{list(array.shape)}; expected token numbers in one "
            f"dimension, 20 at least."
        )
    return _share(array, split)


def _files(text, split):
    path = Path(text).expanduser()
    found = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    found = found or [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in found if file.is_file() and file.stat().st_size > 1]
    if not files:
        raise FileNotFoundError(
            f"run: no files at {text}; data.text names a folder, a file, or a glob in quotes."
        )
    texts = {file: np.frombuffer(file.read_bytes(), np.uint8) for file in files}
    held = [file for file in files if zlib.crc32(file.name.encode()) % 10 == 0]
    if not held or len(held) == len(files):
        return tuple(part for x in texts.values() if (part := _share(x, split)).size > 1)
    return tuple(x for file, x in texts.items() if (file in held) == (split == "validation"))


def _share(array, split):
    """The split's share of one array: the first nine tenths, or the last tenth."""
    at = max(2, array.size * 9 // 10)
    return array[:at] if split == "train" else array[at:]
