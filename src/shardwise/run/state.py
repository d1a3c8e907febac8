"""The state that a run holds between steps, and the keys that seed and step decide alone.

Nothing of the keys has to be saved, and no mesh, process or resume changes them.
"""

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import checkpoint, layouts, pipeline
from shardwise import tree as trees
from shardwise.run.folder import Folder
from shardwise.run.optimizers import correction


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run: `stopped` by a signal or done; `params` as the layout keeps them.

    `ema` is the decay of the parameters' `mean`, where one is kept.
    """

    folder: Path
    step: int
    loss: float
    stopped: bool
    params: Any
    opt_state: Any
    ema: float | None

    @property
    def mean(self) -> Any:
        """The bias-corrected mean of the parameters, laid out as they; None where none is kept."""
        return self.ema and mean(self.params, self.opt_state, self.ema)


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a stream: `stream(key, "dropout")` and `stream(key, "noise")` are independent."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def key_of_seed(seed: Any) -> jax.Array:
    """The key with which parameters are made."""
    return stream(jax.random.key(seed), "parameters")


def key_of_step(seed: Any, step: Any) -> jax.Array:
    """The key that the loss gets at a step."""
    return jax.random.fold_in(stream(jax.random.key(seed), "steps"), step)


def create(layout: Any, make: Callable, tx: Any, seed: int, loss: Callable, batch: Any) -> tuple:
    """(params, opt_state), each array born where it lives."""
    if layout.staged:  # by many programs
        return layouts.init(layout, make, tx, key_of_seed(seed), loss, batch)
    return _born(layout, make, tx)(key_of_seed(seed))


def _born(layout, make, tx):
    """The one program of a key that makes all parameters and optimizer state.

    On CPU it is not optimized, since it runs once: that takes two thirds of the compiler's time.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(lambda key: layouts.init(layout, make, tx, key), compiler_options=options)


def abstract(layout: Any, make: Callable, tx: Any, seed: int, loss: Callable, batch: Any) -> tuple:
    """The shapes with shardings of what `create` makes; no arrays are held."""
    if layout.staged:  # whose arrays are born by many programs
        made = create(layout, make, tx, seed, loss, batch)
        found = jax.tree.map(_abstract, made)
        for x in jax.tree.leaves(made):
            x.delete()
        return found
    params = jax.eval_shape(make, key_of_seed(seed))
    shapes = params, jax.eval_shape(tx.init, params)
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        shapes,
        layouts.shardings(layout, params, tx),
    )


def field(opt_state: Any, path: str) -> jax.Array:
    """One array of an optimizer's state, in whatever form the layout keeps it."""
    if isinstance(opt_state, pipeline.Pipelined):
        return next(iter(opt_state.tree[path].values()))
    return dict(trees.leaves(opt_state))[path]


def replaced(opt_state: Any, path: str, value: Any) -> Any:
    """The optimizer's state with another value of one scalar."""
    if isinstance(opt_state, pipeline.Pipelined):
        each = {s: jax.device_put(value, x.sharding) for s, x in opt_state.tree[path].items()}
        return dataclasses.replace(opt_state, tree=opt_state.tree | {path: each})
    found = [
        jax.device_put(jnp.asarray(value, x.dtype), x.sharding) if name == path else x
        for name, x in trees.leaves(opt_state)
    ]
    return jax.tree.unflatten(jax.tree.structure(opt_state), found)


def mean(params: Any, opt_state: Any, decay: float) -> Any:
    """The mean of the parameters that `averaged` keeps in the state, corrected, laid out as they.

    Only the form and the dtypes of `params` count. Inside jit, but for stages.
    """

    def one(x, param):
        return (x / by).astype(param.dtype)

    if isinstance(opt_state, pipeline.Pipelined):
        by = correction(decay, jax.device_get(field(opt_state, "inner/count")))
        sums = [p.path for p in opt_state.layout if p.path.startswith("inner/sum/")]
        paths = [piece.path for piece in params.layout]
        found = {
            path: jax.tree.map(one, opt_state.tree[other], params.tree[path])
            for path, other in zip(paths, sums, strict=True)
        }
        return dataclasses.replace(params, tree=found)
    by = correction(decay, opt_state.inner.count)
    return jax.tree.map(one, opt_state.inner.sum, params)


def save(folder: Folder, step: int, params: Any, opt_state: Any, facts: dict, keep: int) -> None:
    """Start saving; returns once the arrays may be donated."""
    items = {"params": params, "opt_state": opt_state, "run": {"step": step} | facts}
    checkpoint.save(folder.checkpoints, step, items, keep=keep)


def saved(folder: Folder) -> dict[str, Any] | None:
    """The facts of the newest whole checkpoint, None where there is none."""
    if not folder.checkpoints.exists() or checkpoint.latest(folder.checkpoints) is None:
        return None
    return checkpoint.restore(folder.checkpoints, {"run": None})["run"]


def restore(folder: Folder, step: int, params: Any, opt_state: Any) -> tuple[Any, Any]:
    """(params, opt_state) of a step, as `abstract` describes them."""
    target = {"params": params, "opt_state": opt_state}
    found = checkpoint.restore(folder.checkpoints, target, step)
    return found["params"], found["opt_state"]


def _abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
