"""Batches of real text: the source code of Python's own standard library, as bytes.

On every machine, with no download and no tokenizer: a token is a byte, the vocabulary is 256.
Python versions differ in their library, so the numbers that come out of it differ too.
"""

import functools
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

VOCAB = 256
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@functools.cache
def corpus(split: str = "train") -> tuple[np.ndarray, ...]:
    """A tuple of the documents, each uint8 [bytes], of a split: "train" or "validation".

    Raises:
      ValueError: `split` is another string.
      FileNotFoundError: this Python has no source files of its library (a zipped one).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_modules(root))
    if not files:
        raise FileNotFoundError(
            f"data: no .py files in {root}. The corpus is the source of Python's standard "
            f"library; use a Python that ships it unzipped."
        )
    return documents([root / p for p in files], [p.as_posix() for p in files], split)


def documents(
    files: Sequence[Path], names: Sequence[str], split: str = "train"
) -> tuple[np.ndarray, ...]:
    """A tuple of the documents of a split, the uint8 [bytes] of each of its files.

    `files` are paths, and `names` a string for each, whose checksum alone decides the file's split:
    one in ten is for "validation", the rest for "train".
    Where that leaves a split without files, each file is cut: its first nine tenths are for "train"
    and the rest for "validation". Documents of fewer than two bytes are left out.

    Raises:
      ValueError: `split` is another string.
    """
    validates = _validates(split)
    held_out = [zlib.crc32(name.encode()) % 10 == 0 for name in names]
    is_by_file = len(set(held_out)) > 1
    if is_by_file:
        chosen = zip(files, held_out, strict=True)
        files = [file for file, held in chosen if held == validates]
    texts = (np.frombuffer(file.read_bytes(), np.uint8) for file in files)
    parts = texts if is_by_file else (share(text, split) for text in texts)
    return tuple(part for part in parts if part.size > 1)


def share(array: np.ndarray, split: str) -> np.ndarray:
    """The split's share of one document [n]: for "train" the first nine tenths, or the rest."""
    at = max(2, array.size * 9 // 10)
    return array[at:] if _validates(split) else array[:at]


def _validates(split):
    if split not in ("train", "validation"):
        raise ValueError(f"data: split is {split!r}; expected 'train' or 'validation'.")
    return split == "validation"


def _modules(root):
    """The paths of modules, from the root; folders that are left out, full ones, are not opened."""
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - _LEFT_OUT
        place = Path(folder).relative_to(root)
        yield from (place / name for name in files if name.endswith(".py"))


class Batches(Iterator):
    """An iterator of batches by Grain, whose saved position names the data that it belongs to.

    Positions count global batches: any number of processes may go on from one. `batches` is Grain's
    iterator, and `source` a dict of plain data that names what it reads.
    """

    def __init__(self, batches: Iterator, source: dict[str, Any]):
        self._batches, self._source = batches, source

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The position as plain data, of Grain's iterator, beside the `source`."""
        return {"position": self._batches.get_state(), "source": dict(self._source)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position; a ValueError if it is one in other batches, by their `source`."""
        saved, here = (isinstance(state, dict) and state.get("source")) or {}, self._source
        if differ := [name for name in {**here, **saved} if saved.get(name) != here.get(name)]:
            told = "; ".join(f"{n} was {saved.get(n)!r} and is {here.get(n)!r}" for n in differ)
            raise ValueError(
                f"data: this is a position in other batches: {told}. Make the iterator as it was "
                f"made, or start anew."
            )
        self._batches.set_state(state["position"])


def batches(
    batch: int,
    seq_len: int,
    seed: int = 0,
    split: str = "train",
    process_index: int = 0,
    process_count: int = 1,
    packed: bool = False,
) -> Batches:
    """`Batches`, an endless, shuffled, deterministic iterator, whose position can be saved.

    Every document is cut into windows of `seq_len` predictions; its last window is padded. One
    batch is a dict of NumPy arrays [batch / process_count, seq_len]:
      tokens:  int32, the bytes to predict from;
      targets: int32, the byte that follows each of them;
      mask:    float32, 1 where the target is real and 0 on padding.

    If `packed`, documents follow one another without padding, the mask is 0 on a document's last
    token, and two arrays more tell them apart:
      documents: int32, the number in its row of each token's document;
      positions: int32, the token's place in its document, or in what of it the row has.

    `batch` is the global batch, of whose rows process p of n takes every n-th, from row p on.

    Raises:
      ValueError: sizes below 1, a batch that processes do not divide, no such split or process.
      FileNotFoundError: as `corpus`.
    """
    whole = min(batch, seq_len, process_count) >= 1 and batch % process_count == 0
    if not whole or not 0 <= process_index < process_count:
        raise ValueError(
            f"data.batches: batch={batch}, seq_len={seq_len}, process_count={process_count} and "
            f"process_index={process_index}: expected sizes of 1 or more, as batch, that of all "
            f"processes together, a multiple of process_count, and process_index below that."
        )
    each = rows(corpus(split), seq_len, seed, packed)
    mine = each[process_index::process_count].batch(batch // process_count)
    few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    source = {"split": split, "batch": int(batch), "seq_len": int(seq_len), "seed": int(seed)}
    source |= {"corpus": checksum(corpus(split))} | ({"packed": True} if packed else {})
    return Batches(iter(mine.to_iter_dataset(few)), source)


def rows(
    documents: tuple[np.ndarray, ...], seq_len: int, seed: int | None = 0, packed: bool = False
) -> grain.MapDataset:
    """A `grain.MapDataset` of rows of documents, by number: endless, shuffled anew in each epoch.

    Documents are arrays int [tokens] of token numbers. Row i is a dict as a batch's in `batches`,
    of arrays [seq_len]. With seed=None rows are in order.
    """
    count, window = _windows(documents, seq_len, packed)
    each = grain.MapDataset.range(count)
    each = each if seed is None else each.shuffle(seed=seed)
    # Endless for all purposes; Grain's own endless repeat overflows on batch 1.
    return each.repeat(2**20).map(window)


def _windows(documents, seq_len, packed):
    """(number of windows, the function that makes the i-th): each of one document, or of all."""
    starts = np.cumsum([0, *(text.size for text in documents)])
    # One document may be larger than memory: an array in a file is read where it is needed.
    texts = (np.concatenate(documents),) if packed and len(documents) > 1 else documents
    before = np.cumsum([0, *(-(-(text.size - 1) // seq_len) for text in texts)])

    def window(i):
        which = np.searchsorted(before, i, side="right") - 1
        at = (i - before[which]) * seq_len
        real = texts[which][at : at + seq_len + 1]
        text = np.zeros(seq_len + 1, np.int32)
        text[: real.size] = real
        mask, told = np.arange(1, seq_len + 1) < real.size, {}
        if packed:  # of what pads the last window, the number is one more
            place = np.arange(at, at + seq_len + 1)
            document = np.searchsorted(starts, place, side="right") - 1
            mask &= document[1:] == document[:-1]
            first = np.maximum(starts[document], at)
            told["documents"] = (document - document[0])[:-1].astype(np.int32)
            told["positions"] = (place - first)[:-1].astype(np.int32)
        return {"tokens": text[:-1], "targets": text[1:], "mask": mask.astype(np.float32), **told}

    return int(before[-1]), window


def checksum(documents: tuple[np.ndarray, ...]) -> int:
    """A checksum (CRC-32, an int) of documents of bytes, and of where each of them ends."""
    found = 0
    for text in documents:
        found = zlib.crc32(text, zlib.crc32(b"%d " % text.size, found))
    return found
