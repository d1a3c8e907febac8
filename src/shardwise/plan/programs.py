"""A proposed layout as the program that it stands for: a Layout, and the decoder's step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from shardwise import context, layouts, marks, model
from shardwise.context.gathering import in_tiles
from shardwise.context.kernels import LANES
from shardwise.model import Config, Decoder
from shardwise.plan.roles import Roles


def has_kernel(roles: Roles, sequence: int) -> bool:
    """Whether Pallas' splash kernel can do the attention: to whole sequences, in its tiles."""
    return roles.context == 1 and sequence % LANES == 0


def layout(roles: Roles, config: Config, mesh: Mesh, kernel: bool = False) -> layouts.Layout:
    """The layout on a mesh that has, for each role above 1, an axis of the same name.

    With `kernel`, which is for TPUs alone, attention is Pallas' splash kernel.
    """
    taken = {role: role for role in roles.sizes} or {"data": "data"}
    narrow = jnp.dtype(config.dtype) != jnp.dtype(config.param_dtype)
    return layouts.Layout(
        mesh,
        **taken,
        sequence=roles.tensor > 1,
        attention="zigzag",
        kernel=context.splash() if kernel else None,
        microbatches=roles.microbatches,
        dtype=config.dtype if narrow else None,
        remat=layouts.offload if roles.offload else None,
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """The decoder for a layout: `create(key)`, `loss(params, batch)`, `has_aux` and a `batch`."""

    config: Config
    create: Callable[..., Any]
    loss: Callable[..., Any]
    has_aux: bool
    batch: dict[str, Any]


def program(
    roles: Roles, config: Config, batch: int, sequence: int, kernel: bool = False
) -> Program:
    """The `Program` of a layout; attention's scores are in tiles, but for a context or a kernel."""
    again = roles.remat and not roles.offload  # else the layout does it
    config = dataclasses.replace(config, remat=again, stages=roles.stage)
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]
    has_aux = bool(config.experts)
    loss = functools.partial(model.loss, graphdef=graphdef)
    if has_aux:  # balanced over each row, so that microbatches are the same function
        loss = functools.partial(model.routed_loss, graphdef=graphdef, over="rows")
    shape = batch, sequence
    ints, floats = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    fields = {"tokens": ints, "targets": ints, "mask": floats}
    if roles.context == 1 and not kernel:
        loss = _tiled(loss)
    return Program(config, functools.partial(_create, config), loss, has_aux, fields)


def _create(config, key):
    return nnx.state(Decoder(config, nnx.Rngs(params=key)))


def _tiled(loss):
    @functools.wraps(loss.func)
    def run(params, batch, key=None):
        with marks.bind(attend=_attend):
            return loss(params, batch, key)

    return run


def _attend(q, k, v, places, mask=marks.causal):
    return in_tiles(q, k, v, places, places, mask)
