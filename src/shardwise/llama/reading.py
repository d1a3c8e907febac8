"""Reading: each process takes from the files what its own devices need, a parameter at a time."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from shardwise import rules, tree
from shardwise.llama import names
from shardwise.llama.names import WEIGHTS
from shardwise.model import Config, Decoder

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATING = ("F64", "F32", "BF16", "F16")


def load(
    folder: str | Path, config: Config | None = None, rule: Any = None, mesh: Mesh | None = None
) -> tuple[Config, nnx.State]:
    """(config, params) of a folder, the state of a `model.Decoder`, laid out over `mesh` by `rule`.

    `config` is by default that of `llama.config(folder)`: bfloat16 stays bfloat16. One that is
    given has the same sizes; its `param_dtype` is what weights become. Without a mesh all lies on
    the default device. A process reads once what its devices need, of head_dim all, and holds at a
    time no more than their part of one parameter. Tied embedding and head become two parameters.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: safetensors is.
      ValueError: what `llama.config` raises; a config of other sizes; missing or unexpected names,
        other shapes; a rule without a mesh or a mesh without a rule; what the rule raises.
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
    read, unmerged, within = [], [], []  # of each file's array
    for outer, *inner in weight.theirs.split():
        (start, stop), sides = taken[outer], [sizes[letter] for letter in inner]
        read.append(slice(start * math.prod(sides), stop * math.prod(sides)))
        unmerged += [stop - start, *sides]
        within += [slice(None), *(slice(*taken[letter]) for letter in inner)]
    out = np.empty([stop - start for start, stop in asked], dtype)
    layers, order = out if weight.stacked else out[None], "{}->{}".format(*weight.orders)
    for i in range(first, last):  # from "hd e" to "hde" to "ehd"
        part = each[i][tuple(read)].reshape(unmerged)[tuple(within)]
        layers[i - first] = np.einsum(order, part)
    return out


def library() -> Any:
    """The module safetensors."""
    try:
        import safetensors
    except ImportError:
        how = "pip install 'shardwise[safetensors]'"
        raise ImportError(f"llama: needs safetensors: {how}") from None
    return safetensors


@contextlib.contextmanager
def _opened(folder):
    """{name: the array in its file}, of which slices are read as they are asked for."""
    folder, index, found = Path(folder), None, {}
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
    with contextlib.ExitStack() as stack:
        for name in [_SINGLE] if index is None else sorted(set(index.values())):
            if not (folder / name).exists() or Path(name).name != name:
                there = sorted(p.name for p in folder.glob("*.*") if p.name != names.CONFIG)
                told = "" if index is None else f", which {INDEX} names"
                raise FileNotFoundError(
                    f"llama: no {folder / name}{told}. There are "
                    f"{', '.join(there[: names.SHOWN]) or 'no other files'}; weights are read from "
                    f"{_SINGLE}, or from the files that {INDEX} names."
                )
            file = stack.enter_context(library().safe_open(folder / name, framework="np"))
            found |= {name: file.get_slice(name) for name in file.keys()}
        if index is not None:
            there = [dict.fromkeys(each, "there") for each in (found, index)]
            names.check_arrays(folder / INDEX, *there)
        yield found
