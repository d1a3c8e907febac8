"""The state that a run holds between steps, and the keys that seed and step decide alone.

Nothing of the keys has to be saved, and no mesh, process or resume changes them.
"""

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardwise import checkpoint, layouts
from shardwise.layouts import Layout
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


def create(layout: Layout, make: Callable, tx: Any, seed: int) -> tuple:
    """(params, opt_state), each array born where it lives, by one program of a key.

    On CPU it is not optimized, since it runs once: that takes two thirds of the compiler's time.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    born = jax.jit(lambda key: layouts.init(layout, make, tx, key), compiler_options=options)
    return born(key_of_seed(seed))


def abstract(layout: Layout, make: Callable, tx: Any, seed: int) -> tuple:
    """The shapes with shardings of what `create` makes; no arrays are held."""
    params = jax.eval_shape(make, key_of_seed(seed))
    shapes = params, jax.eval_shape(tx.init, params)
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        shapes,
        layouts.shardings(layout, params, tx),
    )


def mean(params: Any, opt_state: Any, decay: float) -> Any:
    """The mean of the parameters that `averaged` keeps in the state, corrected, laid out as they.

    Only the form and the dtypes of `params` count.
    """
    by = correction(decay, opt_state.inner.count)
    return jax.tree.map(lambda x, p: (x / by).astype(p.dtype), opt_state.inner.sum, params)


def saved(folder: Folder) -> dict[str, Any] | None:
    """The facts of the newest whole checkpoint, None where there is none."""
    if not folder.checkpoints.exists() or checkpoint.latest(folder.checkpoints) is None:
        return None
    return checkpoint.restore(folder.checkpoints, {"run": None})["run"]
