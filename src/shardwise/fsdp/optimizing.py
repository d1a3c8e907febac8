"""Any optax transformation on sharded parameters, by leaving the update to the compiler."""

import jax

from shardwise.fsdp.storage import choose, leaves_of, store, unpad


def init(tx, params):
    """The state of the optax transformation `tx` for `Sharded` params, `Sharded` like them."""

    def create(params):
        return _store_like(params, tx.init(unpad(params)))

    return jax.jit(create)(params)


def update(tx, grads, opt_state, params):
    """`tx.update` on the true shapes: (updates, opt_state), both `Sharded`; call it inside jit."""
    updates, state = tx.update(unpad(grads), unpad(opt_state), unpad(params))
    stored = store(updates, params.layout, params.mesh, params.axis)
    return stored, store(state, opt_state.layout, params.mesh, params.axis)


def _store_like(params, state):
    """An optimizer's state: what has a parameter's path and shape is kept as that is."""
    n, layout = params.mesh.shape[params.axis], []
    for path, x, _ in leaves_of(state, None):
        owners = [s for s in params.layout if path.endswith("/" + s.path)]
        owner = max(owners, key=lambda s: len(s.path), default=None)
        if owner is not None and owner.shape == x.shape:
            layout.append(owner._replace(path=path))
        else:
            layout.append(choose(path, x.shape, owner is not None and owner.stacked, n, 0))
    return store(state, tuple(layout), params.mesh, params.axis)
