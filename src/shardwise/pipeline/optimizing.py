"""An optax transformation on arrays that lie on several stages, equal to one device's.

It is traced once, on the whole tree; `shardwise.pipeline.spreading` runs each equation where its
operands lie.
"""

import jax
from jax.sharding import NamedSharding

from shardwise.pipeline.placing import Pipelined, state_layout
from shardwise.pipeline.spreading import Spread

_KNOWN = {}


def init(tx, params):
    """The state of the optax transformation `tx`, each array where its parameter is.

    Raises:
      ValueError: as `update`.
    """
    shapes = jax.eval_shape(tx.init, params.abstract())
    empty = Pipelined({}, state_layout(shapes, params), jax.tree.structure(shapes), params.meshes)
    return Spread(lambda params: (tx.init(params),), (params,), (empty,))((params,))[0]


def update(tx, grads, opt_state, params):
    """`tx.update`, equal to one device's: (updates, opt_state), each where its parameter is.

    Of a parameter that several stages hold whole, the first updates it and sends the others the
    result. Otherwise what crosses stages is scalars.

    Raises:
      ValueError: an operation that combines arrays of several stages, or rows of one that lies in
        rows, other than by a sum, maximum, minimum or product.
    """

    trees = grads, opt_state, params
    key = (tx, *((tree.layout, tree.structure, tree.meshes) for tree in trees))
    if key not in _KNOWN:
        _KNOWN[key] = Spread(tx.update, trees, (params, opt_state))
    updates, state = _KNOWN[key](trees)
    return _copied(updates), state


def _copied(updates):
    """Updates of what several stages hold whole, on each of them."""
    tree = dict(updates.tree)
    for piece in updates.layout:
        first = piece.homes[0][0]
        x = tree[piece.path][first]
        for stage, _ in piece.homes if not piece.in_rows else ():
            laid = NamedSharding(updates.meshes[stage], piece.spec)
            tree[piece.path] = tree[piece.path] | {stage: jax.device_put(x, laid)}
    return Pipelined(tree, updates.layout, updates.structure, updates.meshes)
