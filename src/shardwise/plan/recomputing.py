"""The least of what JAX keeps that must be stored, where a compiler recomputes what is cheap."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from scipy.sparse import csgraph, csr_array

from shardwise.jaxprs import Step
from shardwise.pipeline.rows import ENTRYWISE

# These compute nothing: they say where an entry comes from.
MOVING = frozenset(
    """broadcast_in_dim concatenate expand_dims iota pad reshape rev slice split squeeze
    transpose""".split()
)
CHEAP = ENTRYWISE | MOVING
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
AT_WORK = PRODUCTS | {"scan", "while"}
LARGEST = 2**30  # scipy's capacities are of 32 bits


class Stored(NamedTuple):
    """A variable, the number of the step that makes it, and the bytes that are stored of it."""

    variable: Any
    step: int
    bytes: int


def stored(program: Sequence[Step], outputs: Sequence[Any]) -> list[Stored]:
    """The smallest set of variables from which the outputs follow by cheap steps, in bytes.

    `program` and `outputs` are what `jaxprs.steps` makes of a trace; what comes first
    there comes first. Cheap is what works entry by entry, which a compiler fuses into what reads
    it: it is done again in the backward pass rather than kept. The program's inputs are there
    anyway. By a minimum cut between what is not cheap, such as products, sums and loops, and the
    outputs; as PyTorch's compiler chooses what to save (its min-cut partitioner). A product that is
    made wider, as logits are for their softmax, is stored wide: the compiler takes the one step for
    a part of the other.
    """
    made_by = {v: step for step in program for v in step.outputs}
    kept = {v for v in outputs if not isinstance(v, Literal) and v in made_by}
    variables = _behind(kept, made_by)
    if not variables:
        return []
    sizes = _sizes(program, variables, made_by)
    number = {v: i for i, step in enumerate(program) for v in step.outputs}
    chosen = _cut(variables, sizes, made_by, kept)
    return sorted((Stored(v, number[v], sizes[v]) for v in chosen), key=lambda s: s.step)


def origin(program: Sequence[Step], v: Any) -> Any:
    """The variable, not cheap, of as many entries as `v`, from which `v` follows entry by entry."""
    made_by = {out: step for step in program for out in step.outputs}
    while v in made_by and made_by[v].name in CHEAP:
        inside = (u for u in made_by[v].inputs if not isinstance(u, Literal) and u in made_by)
        same = [u for u in inside if u.aval.size == v.aval.size]
        if not same:
            break
        v = same[0]
    return v


def size(v: Any) -> int:
    """The bytes of a variable."""
    return v.aval.size * v.aval.dtype.itemsize


def _sizes(program: Sequence[Step], variables: Sequence[Any], made_by: dict[Any, Step]) -> dict:
    """The bytes of each variable, as it is stored."""
    found = {v: size(v) for v in variables}
    for step in program:
        v = step.inputs[0] if step.name == "convert_element_type" else None
        if v is not None and not isinstance(v, Literal) and v in found:
            if made_by[v].name in PRODUCTS and jnp.issubdtype(v.aval.dtype, jnp.inexact):
                found[v] = max(found[v], size(step.outputs[0]))
    return found


def _behind(kept: Collection[Any], made_by: dict[Any, Step]) -> list[Any]:
    """The variables kept, and those from which these follow by cheap steps."""
    found, waiting = dict.fromkeys(kept), list(kept)
    while waiting:
        step = made_by[waiting.pop()]
        for v in step.inputs if step.name in CHEAP else ():
            if not isinstance(v, Literal) and v in made_by and v not in found:
                found[v] = None
                waiting.append(v)
    return list(found)


def _cut(
    variables: list[Any], sizes: dict[Any, int], made_by: dict[Any, Step], kept: Collection[Any]
) -> list[Any]:
    """The variables of the minimum cut.

    Each variable is two nodes, with an edge of its size between them; no other can be cut.
    """
    number = {v: i for i, v in enumerate(variables)}
    n = len(variables)
    source, sink = 2 * n, 2 * n + 1
    unit = max(1, sum(sizes.values()) // LARGEST + 1)
    edges = {(i, n + i): -(-sizes[v] // unit) for v, i in number.items()}
    never = sum(edges.values()) + 1
    for v, i in number.items():
        step = made_by[v]
        if step.name not in CHEAP:
            edges[source, i] = never
        else:
            inside = (u for u in step.inputs if not isinstance(u, Literal) and u in number)
            edges.update(((n + number[u], i), never) for u in inside)
        if v in kept:
            edges[n + i, sink] = never
    rows, columns = np.array(list(edges), np.int32).T
    shape = (2 * n + 2, 2 * n + 2)
    graph = csr_array((np.array(list(edges.values()), np.int32), (rows, columns)), shape)
    left = graph - csgraph.maximum_flow(graph, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = set(csgraph.breadth_first_order(left, source, return_predecessors=False).tolist())
    return [v for v, i in number.items() if i in reached and n + i not in reached]
