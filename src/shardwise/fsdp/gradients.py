"""Loss and gradient, by what each device does with its rows."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardwise import marks
from shardwise import tree as trees
from shardwise.fsdp.gathering import How, Use, all_gather, cast, gather_with_transpose, scatter
from shardwise.fsdp.storage import Sharded, check_axis, rebuild


def value_and_grad(
    loss,
    mesh,
    axis="fsdp",
    replicate=(),
    stage=3,
    microbatches=1,
    dtype=None,
    reduce_dtype=None,
    has_aux=False,
):
    """A function of `(params, batch, *args)`: the loss over the whole batch, and its gradient.

    `loss(params, batch, *args)` is written for one device. It returns `(total, count)`, whose
    quotient over all devices is the result, exact for every padding, or a scalar, a mean over
    rows. With `has_aux` it returns that and a tree, which is summed over devices (and
    microbatches). `params` is `Sharded`, and so is the gradient; the rows of `batch` are cut over
    `replicate` and `axis`. `args` are the same on every device, but typed PRNG keys among them are
    folded with the device's number: dropout then differs from device to device, as from row to row.

    A stacked array is gathered at `marks.use`, one layer at a time. If the layer is rematerialised
    (`jax.checkpoint` around the body that calls `use`), it is gathered again in the backward pass,
    3Ψ(n-1)/n bytes in all; if not, the gathered layers are kept, for 2Ψ(n-1)/n.

    Args:
      replicate: mesh axes over which the shards are copied (hybrid sharding); gradients are summed
        over them too.
      stage: 3 as above; 2 gathers all before the loss and scatters the gradients of each
        microbatch; 1 sums the microbatches' gradients whole, and scatters once.
      microbatches: parts of each device's rows, one after the other.
      dtype: in which weights are gathered and used; default their own.
      reduce_dtype: in which gradients are reduced; default the gathered dtype.

    Raises, when called:
      ValueError: an axis that the mesh lacks, parameters of another mesh or axis, rows that do not
        divide, a stacked array that never meets `use` or meets it twice.
      TypeError: `params` is not `Sharded`, or the loss returns something else.
    """
    for name in (axis, *replicate):
        check_axis("fsdp.value_and_grad", mesh, name)
    if stage not in (1, 2, 3) or microbatches < 1:
        raise ValueError(
            f"fsdp.value_and_grad: stage={stage}, microbatches={microbatches}; expected stage 1, "
            f"2 or 3, and at least 1 microbatch."
        )
    device = _Device(loss, axis, replicate, stage, microbatches, dtype, reduce_dtype, has_aux)
    rows = (*replicate, axis)

    def run(params, batch, *args):
        _check_params(params, mesh, axis)
        _check_rows(batch, math.prod(mesh.shape[name] for name in rows) * microbatches)
        specs = [s.spec(axis) for s in params.layout]
        manual = jax.shard_map(
            functools.partial(device, params),
            mesh=mesh,
            in_specs=(specs, P(rows), P()),
            out_specs=(P(), P(), specs),
            check_vma=False,  # every sum over devices is written out, in _Device
        )
        value, aux, grads = manual(jax.tree.leaves(params.tree), batch, args)
        grads = dataclasses.replace(params, tree=rebuild(params, grads))
        return ((value, aux) if has_aux else value), grads

    return run


def pad(batch, n, mask="mask"):
    """`batch` with masked rows added, up to a multiple of `n` rows.

    Raises:
      ValueError: `batch` is not a dict with a mask, whose zeros make the added rows count nothing.
    """
    if not isinstance(batch, dict) or mask not in batch:
        raise ValueError(
            f"fsdp.pad: expected a dict with {mask!r}, by which the loss counts only real rows; "
            f"got {sorted(batch) if isinstance(batch, dict) else type(batch).__name__}."
        )
    missing = -len(batch[mask]) % n
    return jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), batch)


@dataclasses.dataclass(frozen=True)
class _Device:
    """The loss and gradient of one device's rows, and every sum over devices."""

    loss: Any
    axis: str
    replicate: tuple
    stage: int
    microbatches: int
    dtype: Any
    reduce_dtype: Any
    has_aux: bool

    def __call__(self, params, shards, batch, args):
        args = jax.tree.map(self._fold, args)
        hows = [self._how(s) for s in params.layout]
        inputs = shards
        if self.stage < 3:  # gather once for all microbatches; nothing is left for `use` to do
            inputs = _each(all_gather, shards, hows)
        part = functools.partial(self._part, params, hows, args)
        (total, count, aux), grads = self._over_microbatches(part, inputs, batch)
        if self.stage == 1:
            grads = _each(scatter, grads, hows)
        everyone = (*self.replicate, self.axis)
        total, count, aux = jax.lax.psum((total, count, aux), everyone)
        count = jnp.maximum(count, 1)  # a batch of nothing but padding has loss 0
        grads = [self._sum(g, how) / count for g, how in zip(grads, hows, strict=True)]
        grads = [g.astype(x.dtype) for g, x in zip(grads, shards, strict=True)]
        return total / count, aux, grads

    def _part(self, params, hows, args, inputs, batch):
        """Sums and gradients of one microbatch; reduced over `axis` in stages 2 and 3."""
        use = Use(params.layout, hows, params.mesh.shape[self.axis], self.dtype)

        def total(inputs):
            each = zip(inputs, hows, params.layout, strict=True)
            arrays = [self._given(x, how, stored) for x, how, stored in each]
            bound = use if self.stage == 3 else lambda weights: weights
            with use.explained(), marks.bind(use=bound):
                out = self.loss(rebuild(params, arrays), batch, *args)
            out, aux = out if self.has_aux else (out, ())
            total, count = _total_and_count(out, len(jax.tree.leaves(batch)[0]))
            return total, (count, aux)

        (value, (count, aux)), grads = jax.value_and_grad(total, has_aux=True)(inputs)
        if self.stage == 3:
            use.check_all_met()
        if self.stage == 2:
            grads = _each(scatter, grads, hows)
        return (value, count, aux), [g.astype(jnp.promote_types(g.dtype, "float32")) for g in grads]

    def _over_microbatches(self, part, inputs, batch):
        if self.microbatches == 1:
            return part(inputs, batch)
        m = self.microbatches

        def split(x):
            return jnp.swapaxes(x.reshape(x.shape[0] // m, m, *x.shape[1:]), 0, 1)

        parts = jax.tree.map(split, batch)
        shapes = jax.eval_shape(part, inputs, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        add = functools.partial(jax.tree.map, jnp.add)
        return jax.lax.scan(lambda sums, b: (add(sums, part(inputs, b)), None), zeros, parts)[0]

    def _how(self, stored):
        if stored.cut is None:
            return None
        size = stored.shape[stored.cut]
        reduce_dtype = self.reduce_dtype or self.dtype
        return How(self.axis, stored.cut, size, stored.padded, self.dtype, reduce_dtype)

    def _given(self, x, how, stored):
        """What the loss receives: a stacked array in its shards, for `use`; any other whole."""
        if self.stage == 3 and stored.stacked:
            return x
        if self.stage == 3 and how is not None:
            return gather_with_transpose(x, how, x.dtype)
        return cast(x, self.dtype)

    def _sum(self, grad, how):
        """Over the devices that hold copies: for an array that is not cut, all of them."""
        axes = self.replicate if how is not None else (*self.replicate, self.axis)
        return jax.lax.psum(grad, axes) if axes else grad

    def _fold(self, x):
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            return x
        for name in (*self.replicate, self.axis):
            x = jax.random.fold_in(x, jax.lax.axis_index(name))
        return x


def _each(function, arrays, hows):
    """The function on each array that is cut."""
    pairs = zip(arrays, hows, strict=True)
    return [x if how is None else function(x, how) for x, how in pairs]


def _total_and_count(out, rows):
    if isinstance(out, tuple) and len(out) == 2 and all(jnp.ndim(x) == 0 for x in out):
        return out
    if not isinstance(out, tuple) and jnp.shape(out) == ():
        return out * rows, jnp.float32(rows)  # a mean over rows, of which devices have equally many
    shapes = jax.tree.map(jnp.shape, out)
    raise TypeError(
        f"fsdp.value_and_grad: the loss returned {shapes}; expected (total, count), two scalars, "
        f"or one scalar, a mean over rows. For more outputs, return (that, tree) with has_aux=True."
    )


def _check_params(params, mesh, axis):
    if not isinstance(params, Sharded):
        raise TypeError(
            f"fsdp.value_and_grad: the parameters are a {type(params).__name__}; expected what "
            f"fsdp.shard returns."
        )
    for x, s in zip(jax.tree.leaves(params.tree), params.layout, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"fsdp.value_and_grad: {s.path} is {x.dtype}, which has no gradient; pass keys and "
                f"counters in the batch or as further arguments."
            )
    if (params.mesh, params.axis) != (mesh, axis):
        raise ValueError(
            f"fsdp.value_and_grad: the parameters are sharded along {params.axis!r} of "
            f"{dict(params.mesh.shape)}, and this function is for {axis!r} of {dict(mesh.shape)}; "
            f"shard them for the same mesh, devices and axis."
        )


def _check_rows(batch, parts):
    for path, x in trees.leaves(batch):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] % parts:
            raise ValueError(
                f"fsdp.value_and_grad: {path or 'the batch'} of shape {jnp.shape(x)} does "
                f"not split into {parts} parts (devices times microbatches) along its rows; add "
                f"masked rows, with fsdp.pad(batch, {parts}) and a loss of (total, count)."
            )
