"""A decoder's parameters and its optimizer's state, read as plain numbers from their shapes."""

import functools

import jax
from flax import nnx

from shardwise import tree as trees
from shardwise.costs.arrays import Array, Arrays
from shardwise.layouts import matrices
from shardwise.model import Config, Decoder
from shardwise.train import Optimizer

ADAMW = Optimizer()


@functools.lru_cache(maxsize=1024)
def of_decoder(config: Config, optimizer: Optimizer = ADAMW) -> Arrays:
    """The `Arrays` of `model.Decoder`; a ValueError for an update that multiplies matrices."""
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    parameters = tuple(
        Array(x.path, x.shape, x.axes or (None,) * len(x.shape), x.array.dtype.itemsize)
        for x in trees.read(shapes)
    )
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    state = jax.eval_shape(optimizer.transformation().init, plain)
    if _multiplies(optimizer):
        raise ValueError(
            "plan: the optimizer's update multiplies matrices, which layouts gather whole for it; "
            "that is not planned. Plan with an optimizer whose update does not, such as adamw."
        )
    found = []
    for (path, x), owner in zip(trees.leaves(state), trees.owners(state, plain), strict=True):
        like = parameters[owner.index] if owner else None
        if like is None or owner.shape != x.shape:
            stacked = bool(like and like.stacked and owner.axes and owner.axes[0] == 0)
            like = Array(path, x.shape, (trees.LAYERS,) * stacked + (None,) * (x.ndim - stacked), 0)
        found.append(like._replace(itemsize=x.dtype.itemsize))
    return Arrays(parameters, tuple(found))


@functools.cache
def _multiplies(optimizer):
    """Whether its update multiplies matrices: asked once, with an array of each number of axes that
    a decoder's have, each large enough to be factored.
    """
    tx = optimizer.transformation()
    each = [jax.ShapeDtypeStruct((256,) * n, "float32") for n in range(1, 5)]
    return matrices.multiplies(tx.update, each, jax.eval_shape(tx.init, each), each)
