"""An optax transformation on arrays that lie on several stages, equal to one device's.

It is traced once, on the whole tree; `shardwise.pipeline.spreading` runs each equation where its
operands lie.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.pipeline.placing import Piece, Pipelined, laid, state_layout
from shardwise.pipeline.spreading import Spread


def init(tx: Any, params: Pipelined) -> Pipelined:
    """The state of the optax transformation `tx`, each array where its parameter is.

    Raises:
      ValueError: as `update`.
    """
    _check_pipelined("init", params=params)

    def layouts(shapes):
        return [state_layout(shapes[0], params)]

    return Spread(lambda params: (tx.init(params),), (params,), layouts)((params,))[0]


def update(
    tx: Any, grads: Pipelined, opt_state: Pipelined, params: Pipelined, **extra: Any
) -> tuple[Pipelined, Pipelined]:
    """`tx.update`, equal to one device's: (updates, opt_state), each where its parameter is.

    The memory of `grads` and of the old `opt_state` is taken over (donated): use neither again.
    `extra` are further arguments of the transformation, such as `value=`: `Pipelined` trees, or
    trees of whole arrays and numbers. If several stages hold a parameter whole, the first
    updates it and sends the others the result. Otherwise what crosses stages is scalars.

    Raises:
      ValueError: an operation that combines arrays of several stages, or rows of one that lies in
        rows, other than by a sum, maximum, minimum, product, and, or; a function in `extra`.
      TypeError: gradients, parameters or a state that are not `Pipelined`.
    """
    _check_pipelined("update", grads=grads, opt_state=opt_state, params=params)
    further = tuple(_whole(name, x, params.meshes) for name, x in extra.items())
    inputs = grads, opt_state, params, *further
    kinds = tuple((tree.layout, tree.structure, tree.meshes) for tree in inputs)
    updates, state = program(tx, tuple(extra), kinds)(inputs)
    return _copied(updates), state


@functools.lru_cache(maxsize=16)
def program(tx: Any, names: tuple[str, ...], kinds: tuple) -> Spread:
    """The update as programs of the stages, for trees of these (layout, structure, meshes)."""
    inputs = tuple(Pipelined({}, *kind) for kind in kinds)
    params = inputs[2]

    def function(grads, opt_state, params, *further):
        return tx.update(grads, opt_state, params, **dict(zip(names, further, strict=True)))

    def layouts(shapes):
        updates, state = shapes
        return [_updates_layout(updates, params), state_layout(state, params)]

    return Spread(function, inputs, layouts, donated=2)


def _updates_layout(updates, params):
    """The layout of the updates: that of the parameters, in the dtypes that the updates have."""
    if jax.tree.structure(updates) != params.structure:
        return state_layout(updates, params)
    pieces = zip(
        jax.tree.leaves(updates), params.layout, state_layout(updates, params), strict=True
    )
    return tuple(
        piece._replace(dtype=x.dtype) if piece.shape == x.shape else other
        for x, piece, other in pieces
    )


def _whole(name, tree, meshes):
    """A further argument on every stage."""
    if isinstance(tree, Pipelined):
        return tree
    everywhere = tuple((stage, None) for stage in range(len(meshes)))
    layout, leaves = [], []
    for x in jax.tree.leaves(tree):
        if callable(x):
            raise ValueError(
                f"pipeline.update: {name}= is a function of whole parameters, which lie on several "
                f"stages; a transformation that calls it, such as one with a line search, has no "
                f"pipelined form. Use one without, such as optax.lbfgs(1e-2, linesearch=None)."
            )
        homes = everywhere if jnp.ndim(x) else everywhere[:1]
        layout.append(Piece(f"{len(layout)}", jnp.shape(x), jnp.result_type(x), homes, P()))
        leaves.append(x)
    return laid(leaves, layout, jax.tree.structure(tree), meshes)


def _copied(updates):
    """The updates, on each of its stages for a parameter that several stages hold whole."""
    tree = dict(updates.tree)
    for piece in updates.layout:
        first = piece.homes[0][0]
        x = tree[piece.path][first]
        for stage, _ in piece.homes if not piece.in_rows else ():
            laid = NamedSharding(updates.meshes[stage], piece.spec)
            tree[piece.path] = tree[piece.path] | {stage: jax.device_put(x, laid)}
    return Pipelined(tree, updates.layout, updates.structure, updates.meshes)


def _check_pipelined(who, **given):
    for name, tree in given.items():
        if not isinstance(tree, Pipelined):
            remedy = "init(tx, params)" if name == "opt_state" else "place(params, function, batch)"
            raise TypeError(
                f"pipeline.{who}: {name} is a {type(tree).__name__}; expected a Pipelined tree. "
                f"Make it with pipeline.{remedy}."
            )
