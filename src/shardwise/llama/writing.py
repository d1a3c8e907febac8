"""Writing: one layer's weight at a time to the host, one file at a time to the folder."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwise import tree
from shardwise.llama import names
from shardwise.llama.names import WEIGHTS, Weight
from shardwise.llama.reading import INDEX, library
from shardwise.model import Config
from shardwise.processes.system import together


def save(
    folder: str | Path,
    params: Any,
    config: Config,
    shard_bytes: int = 5 * 10**9,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of a `model.Decoder`, however it is laid out, in its own dtype.

    A file holds at most `shard_bytes`, or one array that is larger. All processes call this, hold
    one file's arrays at a time, and process 0 writes, the index last: a folder in which writing
    broke off is no model. `fields` are added to `config.json`: what the decoder does not know, such
    as max_position_embeddings or eos_token_id.

    Raises:
      FileExistsError: the folder has a model already.
      ImportError: safetensors is not installed.
      ValueError: a decoder with experts; parameters that are not the config's; dtypes that differ
        or that the format lacks; a field that the config decides; `shard_bytes` below 1.
      OSError: what went wrong while writing, on process 0; a RuntimeError on the others.
    """
    folder, writes = Path(folder), jax.process_index() == 0
    leaves = dict(tree.leaves(params))
    with together("llama.save"):
        dtype = _checked(leaves, config)
        plan = _planned(config, dtype.itemsize, shard_bytes)
        text = names.text(config, dtype.name, dict(fields or {}))
        library()
        if writes:
            there = [folder / names.CONFIG, folder / INDEX, *folder.glob("*.safetensors")]
            if there := [path.name for path in there if path.exists()]:
                raise FileExistsError(
                    f"llama.save: {folder} has {', '.join(there[:3])} already; choose a new folder."
                )
            folder.mkdir(parents=True, exist_ok=True)
    with together("llama.save"):
        _write(folder, plan, leaves, writes)
        if writes:
            (folder / names.CONFIG).write_text(text)
            total = sum(x.nbytes for x in leaves.values())
            places = {name: file for file, entries in plan.items() for name, *_ in entries}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _checked(leaves, config):
    """The dtype of all parameters."""
    names.check_dense(config)
    sizes = names.sizes(config)
    wanted = {path: tuple(sizes[letter] for letter in w.ours) for path, w in WEIGHTS.items()}
    found = {path: tuple(np.shape(x)) for path, x in leaves.items()}
    names.check_arrays("params are no state of a model.Decoder of this config", found, wanted)
    dtypes = {x.dtype for x in leaves.values()}
    if len(dtypes) > 1 or min(dtypes).name not in names.DTYPES:
        raise ValueError(
            f"llama.save: parameters of {', '.join(sorted(d.name for d in dtypes))}; expected one "
            f"of {', '.join(names.DTYPES)} for all."
        )
    return dtypes.pop()


def _planned(config, itemsize, shard_bytes):
    """{file: [(name, path, layer or None)] of its arrays}, layer after layer."""
    if shard_bytes < 1:
        raise ValueError(f"llama.save: shard_bytes={shard_bytes}; expected 1 or more.")
    stacked = [(path, weight) for path, weight in WEIGHTS.items() if weight.stacked]
    layers = [(w.name.format(i), path, i) for i in range(config.layers) for path, w in stacked]
    first, *last = [(w.name, path, None) for path, w in WEIGHTS.items() if not w.stacked]
    sizes, shards, room = names.sizes(config), [], 0
    for entry in (first, *layers, *last):
        size = itemsize * math.prod(WEIGHTS[entry[1]].shape(sizes))
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= size
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, 1)}


def _write(folder, plan, leaves, writes):
    failed = None
    for file, entries in plan.items():
        arrays = {n: _gathered(leaves[path], WEIGHTS[path], layer) for n, path, layer in entries}
        try:
            if writes and not failed:
                _write_file(folder / file, arrays)
        except Exception as error:  # raised when the others wait for this process no more
            failed = error
    if failed:
        raise failed


def _write_file(path, arrays):
    from safetensors.numpy import save_file

    # Said to be of PyTorch, whose axes these are: transformers asks.
    save_file(arrays, path, metadata={"format": "pt"})


def _gathered(leaf, weight: Weight, layer):
    """The file's array, whole in each process: "ehd" -> "hde" -> "hd e"."""
    x = leaf if layer is None else leaf[layer]
    if not getattr(x, "is_fully_addressable", True):
        x = multihost_utils.process_allgather(x, tiled=True)
    merged, own = weight.orders
    x = np.einsum(f"{own}->{merged}", np.asarray(x))
    # safetensors writes memory as it lies, whatever the strides say.
    return np.ascontiguousarray(x.reshape(weight.shape(dict(zip(merged, x.shape, strict=True)))))
