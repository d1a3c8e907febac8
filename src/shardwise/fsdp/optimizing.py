"""Any optax transformation on sharded parameters, by leaving the update to the compiler."""

from typing import Any

import jax
import jax.numpy as jnp

from shardwise import tree as trees
from shardwise.fsdp.matrices import whole_in_products
from shardwise.fsdp.planning import choose, leaves_of
from shardwise.fsdp.storage import Sharded, pairs_of, rebuild, store, unpad


def init(tx: Any, params: Sharded) -> Sharded:
    """The state of the optax transformation `tx` for `Sharded` params, `Sharded` like them."""
    _check_sharded("init", params=params)

    def create(params):
        state = tx.init(unpad(params))
        return store(state, state_layout(state, params), params.mesh, params.axis)

    return jax.jit(create)(params)


def update(
    tx: Any, grads: Sharded, opt_state: Sharded, params: Sharded, **extra: Any
) -> tuple[Sharded, Sharded]:
    """`tx.update` on the true shapes: (updates, opt_state), both `Sharded`; call it inside jit.

    `extra` are further arguments of the transformation, such as `value=`; trees that are `Sharded`
    among them reach it in their true shapes. Matrices that it multiplies, as Muon does, are
    gathered once each: it sends as many bytes as they have, and they are whole on every device
    meanwhile, in the work as well. All else is left to the compiler.

    Raises:
      TypeError: gradients, parameters or a state that are not `Sharded`.
    """
    _check_sharded("update", grads=grads, opt_state=opt_state, params=params)

    extra = jax.tree.map(lambda x: unpad(x) if _is_sharded(x) else x, extra, is_leaf=_is_sharded)

    def whole(grads, opt_state, params):
        return tx.update(unpad(grads), unpad(opt_state), unpad(params), **extra)

    updates, state = whole_in_products(whole, params.mesh, grads, opt_state, params)
    stored = store(updates, params.layout, params.mesh, params.axis)
    return stored, store(state, state_layout(state, params), params.mesh, params.axis)


def state_layout(state: Any, params: Sharded) -> tuple:
    """How an optimizer's state is kept: what has its parameter's shape is kept as that is."""
    shapes = [jax.ShapeDtypeStruct(s.shape, x.dtype) for x, s in pairs_of(params)]
    owners, layout = trees.owners(state, rebuild(params, shapes)), []
    for (path, x, _), owner in zip(leaves_of(state, None), owners, strict=True):
        kept = params.layout[owner.index] if owner else None
        if owner and owner.shape == jnp.shape(x):
            layout.append(kept._replace(path=path))
        else:
            stacked = bool(owner and kept.stacked and owner.axes and owner.axes[0] == 0)
            layout.append(choose(path, jnp.shape(x), stacked, params.parts, 0))
    return tuple(layout)


def _is_sharded(x):
    return isinstance(x, Sharded)


def _check_sharded(who, **given):
    for name, tree in given.items():
        if not _is_sharded(tree):
            remedy = "fsdp.init(tx, params)" if name == "opt_state" else "fsdp.place(params, mesh)"
            raise TypeError(
                f"fsdp.{who}: {name} is a {type(tree).__name__}; expected a Sharded tree. Make it "
                f"with {remedy}."
            )
