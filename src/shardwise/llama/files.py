"""Files of weights: a process reads what its devices need; process 0 writes, layer by layer."""

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardwise import rules, tree
from shardwise.llama import names
from shardwise.llama.names import WEIGHTS
from shardwise.model import Config, Decoder
from shardwise.processes.system import together

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATING = ("F64", "F32", "BF16", "F16")


def load(
    folder: str | Path, config: Config | None = None, rule: Any = None, mesh: Mesh | None = None
) -> tuple[Config, nnx.State]:
    """(config, params) of a folder, the state of a `model.Decoder`, laid out over `mesh` by `rule`.

    `config` is by default that of `llama.config(folder)`: bfloat16 stays bfloat16. One that is
    given has the same sizes; its `param_dtype` is what weights become. Without a mesh all lies on
    the default device. A process reads once what its devices need, and holds at a time no more
    than their part of one parameter. A tied head becomes one of its own, as `tied=False` has it.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: safetensors is not installed.
      ValueError: what `llama.config` raises; a config of other sizes or parts; missing or other
        names or shapes; a rule without a mesh, or a mesh without one; what the rule raises.
    """
    if (rule is None) != (mesh is None):
        raise ValueError("llama.load: give both rule= and mesh=, or neither for one device.")
    theirs = names.config(folder)
    config = theirs if config is None else config
    names.check_dense(config)
    names.check_same(folder, config, theirs)
    abstract = nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    placed = [None] * len(WEIGHTS)
    if mesh is not None:
        placed = jax.tree.leaves(rules.shardings(rule, abstract, mesh))
    with _opened(folder) as found:
        weights = _checked(folder, config, found)
        read = [
            _parameter(config, weights[path], found, leaf, sharding)
            for (path, leaf), sharding in zip(tree.leaves(abstract), placed, strict=True)
        ]
    return config, jax.tree.unflatten(jax.tree.structure(abstract), read)


def _checked(folder, config, found):
    """{path: weight} as the files have them: with tied embeddings the head is the embedding."""
    weights, sizes = dict(WEIGHTS), names.sizes(config)
    if names.read(folder).get("tie_word_embeddings"):
        weights["head/kernel"] = WEIGHTS["head/kernel"]._replace(name=names.EMBEDDING)
        found.pop(names.HEAD, None)
    wanted = {n: list(w.shape(sizes)) for w in weights.values() for n in w.names(config)}
    told = {
        name: array.get_shape() if array.get_dtype() in _FLOATING else array.get_dtype()
        for name, array in found.items()
        # Older files have what rotary positions are computed from, which follows from the config.
        if not name.endswith(".rotary_emb.inv_freq")
    }
    names.check_arrays(folder, told, wanted)
    return weights


def _parameter(config, weight, found, leaf, sharding):
    """One parameter on its devices."""
    each, sizes, read = [found[name] for name in weight.names(config)], names.sizes(config), {}

    def part(index):
        asked = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
        if asked not in read:
            read[asked] = _part(weight, each, asked, sizes, leaf.dtype)
        return read[asked]

    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _part(weight, each, asked, sizes, dtype):
    """The entries `asked`, (start, stop) for each axis, of a parameter, filled layer by layer."""
    taken = dict(zip(weight.ours, asked, strict=True))
    first, last = taken.pop("l", (0, 1))
    runs = []  # for each axis of a file's array (places in ours, its slice); of cut heads, of each
    for outer, *inner in weight.theirs.split():
        (start, stop), size = taken[outer], math.prod(sizes[letter] for letter in inner)
        low, high = taken[inner[0]] if inner else (0, size)
        heads = ((i - start, slice(i * size + low, i * size + high)) for i in range(start, stop))
        whole = [(slice(None), slice(start * size, stop * size))]
        pairs, rest = heads if high - low < size else whole, [slice(None)] * len(inner)
        runs.append([((at, *rest), theirs) for at, theirs in pairs])
    out = np.empty([stop - start for start, stop in asked], dtype)
    layers, order = out if weight.stacked else out[None], "{1}->{0}".format(*weight.orders)
    for i in range(first, last):
        layer = np.einsum(order, layers[i - first])  # a view, from "ehd" to "hde"
        for run in itertools.product(*runs):
            ours, theirs = zip(*run, strict=True)
            part = layer[sum(ours, ())]
            part[...] = each[i][theirs].reshape(part.shape)
    return out


def _library():
    try:
        import safetensors.numpy
    except ImportError:
        how = "pip install 'shardwise[safetensors]'"
        raise ImportError(f"llama: needs safetensors: {how}") from None
    return safetensors


@contextlib.contextmanager
def _opened(folder):
    """{name: the array in its file}, of which slices are read as they are asked for."""
    folder, files, found = Path(folder), [_SINGLE], {}
    if (folder / _INDEX).exists():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    with contextlib.ExitStack() as stack:
        for name in files:
            if not (folder / name).exists() or Path(name).name != name:
                there = sorted(p.name for p in folder.glob("*.*") if p.name != names.CONFIG)
                raise FileNotFoundError(
                    f"llama: no {folder / name}. There are "
                    f"{', '.join(there[: names.SHOWN]) or 'no other files'}; weights are read from "
                    f"{_SINGLE}, or from the files that {_INDEX} names."
                )
            file = stack.enter_context(_library().safe_open(folder / name, framework="np"))
            found |= {name: file.get_slice(name) for name in file.keys()}
        yield found


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
      ValueError: a decoder that is no Llama: with experts, latent attention, `value_dim`, biases, a
        tied head or `qk_norm`, or with other `norms` or `activation` than by default; parameters
        that are not the config's; dtypes that differ or that the format lacks; a field that the
        config decides; `shard_bytes` below 1.
      OSError: what went wrong while writing, on process 0; a RuntimeError on the others.
    """
    folder, writes = Path(folder), jax.process_index() == 0
    leaves = dict(tree.leaves(params))
    with together("llama.save"):
        dtype = _dtype(leaves, config)
        plan = _planned(config, dtype.itemsize, shard_bytes)
        text = names.text(config, dtype.name, dict(fields or {}))
        _library()
        if writes:
            there = [folder / names.CONFIG, folder / _INDEX, *folder.glob("*.safetensors")]
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
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _dtype(leaves, config):
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
                # Said to be of PyTorch, whose axes these are: transformers asks.
                _library().numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        except Exception as error:  # raised when the others wait for this process no more
            failed = error
    if failed:
        raise failed


def _gathered(leaf, weight, layer):
    """The file's array, whole in each process: "ehd" -> "hde" -> "hd e"."""
    x = leaf if layer is None else leaf[layer]
    if not getattr(x, "is_fully_addressable", True):
        x = multihost_utils.process_allgather(x, tiled=True)
    merged, own = weight.orders
    x = np.einsum(f"{own}->{merged}", np.asarray(x))
    # safetensors writes memory as it lies, whatever the strides say.
    return np.ascontiguousarray(x.reshape(weight.shape(dict(zip(merged, x.shape, strict=True)))))
