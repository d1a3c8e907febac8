"""Gathering an array where it is used; its transpose, which reduces the gradient."""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import jax

from shardwise import tree as trees
from shardwise.fsdp.storage import pad_axis


class How(NamedTuple):
    """How one array is gathered, and its gradient reduced."""

    axis: str
    cut: int
    size: int
    padded: int
    dtype: Any
    reduce_dtype: Any


def cast(x, dtype):
    """In the dtype asked for, if one is."""
    return x if dtype is None else x.astype(dtype)


def all_gather(x, how):
    """The array whole, in the dtype asked for and without its padding."""
    x = jax.lax.all_gather(cast(x, how.dtype), how.axis, axis=how.cut, tiled=True)
    return jax.lax.slice_in_dim(x, 0, how.size, axis=how.cut)


def scatter(grad, how):
    """The transpose: padded again, summed over the devices, to each its own part."""
    grad = pad_axis(cast(grad, how.reduce_dtype), how.cut, how.padded)
    return jax.lax.psum_scatter(grad, how.axis, scatter_dimension=how.cut, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_with_transpose(x, how, dtype):
    """`all_gather`, whose gradient is reduced in the dtype asked for, and returned in `dtype`."""
    return all_gather(x, how)


gather_with_transpose.defvjp(
    lambda x, how, dtype: (all_gather(x, how), None),
    lambda how, dtype, _, grad: (scatter(grad, how).astype(dtype),),
)


class Use:
    """`marks.use` within one trace: gathers a layer's weights, and knows which it has met."""

    def __init__(self, layout, hows, n, dtype):
        self.stacked = [(s, how) for s, how in zip(layout, hows, strict=True) if s.stacked]
        self.n, self.dtype, self.met = n, dtype, set()

    def __call__(self, weights):
        if not self.stacked:
            return weights
        leaves = [self._layer(path, x) for path, x in trees.leaves(weights)]
        return jax.tree.unflatten(jax.tree.structure(weights), leaves)

    def _layer(self, path, x):
        """One array of one layer: found by its path within the stack, and its shape."""
        shared = [_common(s.path, path) for s, _ in self.stacked]
        if path and not any(shared):
            return x  # no array of the stack
        owners = [one for one, k in zip(self.stacked, shared, strict=True) if k == max(shared)]
        found = [(s, how) for s, how in owners if s.local_shape(self.n)[1:] == x.shape]
        if not found:
            if any(s.shape[1:] == x.shape for s, _ in owners):
                raise ValueError(
                    f"fsdp: {path} of shape {x.shape} is whole already: marks.use is called twice "
                    f"on the same weights; call it once, in the layer's body."
                )
            return x
        if len({how for _, how in found}) > 1:
            paths = ", ".join(s.path for s, _ in found)
            raise ValueError(
                f"fsdp: {path or 'an array'} of shape {x.shape} may be a layer of any of {paths}; "
                f"give marks.use the dict or state that holds it, so that its path tells."
            )
        how = found[0][1]
        self.met.update(s.path for s, _ in found)
        if how is None:
            return cast(x, self.dtype)
        return gather_with_transpose(x, how._replace(cut=how.cut - 1), x.dtype)

    def missing(self):
        return [s.path for s, how in self.stacked if how is not None and s.path not in self.met]

    @contextlib.contextmanager
    def explained(self):
        """An error of the loss is explained where it received shards that nobody gathered."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if self.missing() and self.n > 1 and not str(error).startswith("fsdp"):
                raise ValueError(f"{self._unmet()} (The loss failed: {error})") from error
            raise

    def check_all_met(self):
        if self.missing():
            raise ValueError(self._unmet())

    def _unmet(self):
        return (
            f"fsdp: stacked, and never given to marks.use: {', '.join(self.missing())}. Call "
            f"`weights = marks.use(weights)` in the layer's body, or leave these out of stacked=."
        )


def _common(path, other):
    """How many components two paths share at their ends."""
    pairs = zip(reversed(path.split("/")), reversed(other.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
