"""Loss and gradient, by what each device does with its rows."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective
from shardwise.fsdp.gathering import How, Use, all_gather, cast, gather_with_transpose, scatter
from shardwise.fsdp.storage import Sharded, check_axis, path_of, rebuild

SUMMED = {"sum", "mean", "max"}  # auxiliary outputs that are whole on every device


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
    aux="sum",
):
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    `loss(params, batch, *args)` is written for one device; it takes `key=` too where one is given,
    and returns an `objective.Mean`, exact for every padding, or a scalar, a mean over rows. With
    `has_aux` it returns that and a tree; `aux` says how those of devices and microbatches become
    one: "sum", "mean", "max" or "concatenate" (whose rows stay cut), or a prefix tree of these.
    `params` is `Sharded`, and so is the gradient; the rows of `batch` are cut over `replicate` and
    `axis`, and `args` are the same on every device. A loss whose rows look at each other is another
    function when they are divided: see `shardwise.objective`, also for keys and microbatches.

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
      ValueError, TypeError: what `objective.trace` says of a loss in several parts.
    """
    for name in (axis, *replicate):
        check_axis("fsdp.value_and_grad", mesh, name)
    if stage not in (1, 2, 3) or microbatches < 1:
        raise ValueError(
            f"fsdp.value_and_grad: stage={stage}, microbatches={microbatches}; expected stage 1, "
            f"2 or 3, and at least 1 microbatch."
        )
    device = _Device(loss, axis, replicate, stage, microbatches, dtype, reduce_dtype, has_aux, aux)
    rows = (*replicate, axis)

    def run(params, batch, *args, key=None):
        _check_params(params, mesh, axis)
        _check_rows(batch, math.prod(mesh.shape[name] for name in rows) * microbatches)
        specs = [s.spec(axis) for s in params.layout]
        shapes = []  # of the auxiliary outputs, which are known once the loss is traced
        manual = jax.shard_map(
            functools.partial(device, params, shapes),
            mesh=mesh,
            in_specs=(specs, P(rows), P(rows), P(), P()),
            out_specs=(P(), (P(), P(rows)), specs),
            check_vma=False,  # every sum over devices is written out, in _Device
        )
        numbers = objective.numbers(batch)
        value, parts, grads = manual(jax.tree.leaves(params.tree), batch, numbers, args, key)
        grads = dataclasses.replace(params, tree=rebuild(params, grads))
        return ((value, _merged(*parts, *shapes)) if has_aux else value), grads

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
    aux: Any

    def __call__(self, params, shapes, shards, batch, rows, args, key):
        hows = [self._how(s) for s in params.layout]
        inputs = shards
        if self.stage < 3:  # gather once for all microbatches; nothing is left for `use` to do
            inputs = _each(all_gather, shards, hows)
        use = Use(params.layout, hows, params.mesh.shape[self.axis], self.dtype)
        division = objective.Division(
            together=functools.partial(jax.lax.psum, axis_name=self._everyone),
            fold=self._fold,
            each=lambda grads: _each(scatter, grads, hows) if self.stage == 2 else grads,
        )
        value, aux, grads = objective.mean_and_grads(
            functools.partial(self._loss, params, hows, use),
            inputs,
            *(objective.split(tree, self.microbatches) for tree in (batch, rows)),
            args,
            key,
            has_aux=self.has_aux,
            aux=self.aux,
            division=division,
        )
        if self.stage == 3:
            use.check_all_met()
        if self.stage == 1:
            grads = _each(scatter, grads, hows)
        grads = [self._sum(g, how) for g, how in zip(grads, hows, strict=True)]
        grads = [g.astype(x.dtype) for g, x in zip(grads, shards, strict=True)]
        return value, self._over_devices(aux, shapes), grads

    @property
    def _everyone(self):
        return (*self.replicate, self.axis)

    def _loss(self, params, hows, use, inputs, batch, *args, **key):
        """The user's loss on what this device has; `use` gathers the rest."""
        each = zip(inputs, hows, params.layout, strict=True)
        arrays = [self._given(x, how, stored) for x, how, stored in each]
        bound = use if self.stage == 3 else lambda weights: weights
        with use.explained(), marks.bind(use=bound):
            return self.loss(rebuild(params, arrays), batch, *args, **key)

    def _over_devices(self, aux, shapes):
        """(leaves that are whole everywhere, leaves of rows, which stay cut); how, in `shapes`."""
        ways = objective.ways(self.aux, aux)
        shapes += [ways, jax.tree.structure(aux)]
        pairs = list(zip(jax.tree.leaves(aux), ways, strict=True))
        whole = [objective.reduced_over(x, w, self._everyone) for x, w in pairs if w in SUMMED]
        return whole, [x for x, w in pairs if w not in SUMMED]

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

    def _fold(self, key):
        for name in self._everyone if key is not None else ():
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key


def _merged(whole, rows, ways, structure):
    """The tree of auxiliary outputs, of its leaves in two groups."""
    groups = iter(whole), iter(rows)
    leaves = [next(groups[0] if way in SUMMED else groups[1]) for way in ways]
    return jax.tree.unflatten(structure, leaves)


def _each(function, arrays, hows):
    """The function on each array that is cut."""
    pairs = zip(arrays, hows, strict=True)
    return [x if how is None else function(x, how) for x, how in pairs]


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
    for keys, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] % parts:
            raise ValueError(
                f"fsdp.value_and_grad: {path_of(keys) or 'the batch'} of shape {jnp.shape(x)} does "
                f"not split into {parts} parts (devices times microbatches) along its rows; add "
                f"masked rows: fsdp.pad(batch, {parts}), and a loss that returns objective.Mean."
            )
