"""Loss and gradient, by what each device does with its rows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardwise import marks, rules
from shardwise import mesh as meshes
from shardwise.fsdp.arrays import array_layouts, laid_out
from shardwise.fsdp.arrays import rule as rule_along
from shardwise.fsdp.gathering import How, all_gather, cast, gather, scatter
from shardwise.fsdp.using import late, numbered, reads, use_of
from shardwise.mesh import axes_of, check_axes
from shardwise.objective.gradients import mean_and_grads
from shardwise.objective.parts import Division, check_params, merged, split, ways
from shardwise.rules.rule import used_axes


def value_and_grad(
    loss: Callable,
    mesh: jax.sharding.Mesh,
    rule: rules.FSDPRule | str | tuple[str, ...] = "fsdp",
    replicate: Sequence[str] = (),
    columns: Sequence[str] = (),
    order: Callable[[int, int], Any] | None = None,
    zero: int = 3,
    microbatches: int = 1,
    dtype: Any = None,
    reduce_dtype: Any = None,
    has_aux: bool = False,
    aux: Any = "sum",
    apart: Callable[[Any, jax.sharding.Mesh], Any] | None = None,
    meanings: Mapping[str, Callable] | None = None,
    who: str = "fsdp.value_and_grad",
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    The loss is written for one device. `loss`, `has_aux`, `aux` and `microbatches` are as in
    `objective.value_and_grad`, except that the rows of an aux joined by "concatenate" stay cut.
    `params` lie as `rule` says (`rules.place(params, rule, mesh)`), and so does the gradient, in
    their dtypes. The function itself cuts the rows of the whole `batch`, however it lies, over
    `replicate` and the rule's axis. `args` are the same on every device.

    A stacked array, one that the rule takes for layers along axis 0 (`rules.FSDPRule`: by `stacked`
    or by the logical axes it carries; without both none is), is gathered at `marks.use`, one layer
    at a time, and until then must not be read. If the layer is rematerialised (`jax.checkpoint`
    around the body that calls `use`), it is gathered again in the backward pass; if not, the
    gathered layers are kept. Where these arrays have Ψ bytes when whole, a device of n sends
    3Ψ(n-1)/n bytes a microbatch in the first case, and 2Ψ(n-1)/n in the second. Another array is
    gathered at `use` too if all its readers call it, and else before the loss; the compiler makes
    the same of both, unless a layer is rematerialised.

    Other axes of the mesh are left to the compiler. Over each one of two devices or more some
    parameter is laid out (the rule's `over=`), or some activation, by a constraint in the loss or a
    meaning of `marks.constrain`.

    The function is jitted; within another jit it takes parameters to lie as `rule` says.

    Args:
      rule: how parameters are cut; or only a mesh axis, or several as one, to cut by `fsdp.rule`.
      apart: a rule, as `rules` has them, for axes of arrays that are never gathered, as those of
        experts: each device uses its part. It cuts them over mesh axes of `rule`, `replicate` or
        `columns`, and `rule` cuts them so too, as by `fsdp.rule(over=apart)`; default none.
      replicate: mesh axes over which shards are copied (hybrid sharding), and gradients summed too.
      columns: mesh axes over which the sequence is cut, axis 1 of each array of the batch that has
        two or more. Tokens then see each other in `marks.attend` alone, by a meaning that knows
        these axes; the loss has to return an `objective.Mean`.
      order: a function of (size, parts) that returns the order in which the sequence is cut, such
        as `context.zigzag`; default the sequence's own. The function itself permutes the batch.
      meanings: {mark: meaning} to bind for the loss, such as `{"attend": context.ring("context")}`.
      who: the name of the function that was called, for errors.
      zero: ZeRO's number. 3 is as above; 2 gathers all before the loss and scatters gradients of
        each microbatch, at `marks.use` where it can, so that they are never all whole; 1 sums the
        microbatches' gradients whole, and scatters once.
      dtype: that in which weights are gathered and used, as jnp.bfloat16; default their own.
      reduce_dtype: that in which gradients are reduced; default the gathered dtype.

    Raises, when called:
      ValueError: an axis that the mesh lacks, parameters that lie otherwise, rows or a sequence
        that do not divide, a stacked array that is read outside `use`, a further mesh axis over
        which nothing is laid out; with several microbatches, a count that depends on parameters.
      Indivisible: `columns`, and a loss that returns one scalar (a ValueError).
      TypeError: a parameter that has no gradient, as integers; a loss that is no Mean or scalar.
    """
    given, mesh = mesh, meshes.auto(mesh)
    rule = rule if isinstance(rule, rules.FSDPRule) else rule_along(rule)
    rows, columns = (*replicate, *axes_of(rule.axis)), tuple(columns)
    check_axes(who, mesh, (*rows, *columns))
    if zero not in (1, 2, 3):
        raise ValueError(f"{who}: zero={zero}; expected 1, 2 or 3.")
    division = Division(rows, columns, microbatches, mesh, order, who)
    settings = loss, division, zero, dtype, reduce_dtype, has_aux, aux

    def loss_and_grad(params, batch, *args, key=None):
        arrays = array_layouts(params, rule, mesh, apart)
        check_params(params, mesh, who)
        batch, numbers, cut = division.cut(batch)
        leaves, structure = jax.tree.flatten(params)
        specs = [array.manual for array in arrays]
        shapes = []  # of the auxiliary outputs, which are known once the loss is traced
        manual = jax.shard_map(
            functools.partial(_on_device, settings, arrays, structure, shapes),
            mesh=mesh,
            in_specs=(specs, *cut, P(), P()),
            out_specs=(P(), (P(), P(rows)), specs),
            axis_names={*rows, *columns},
            check_vma=False,  # every sum over devices is written out, in _on_device
        )
        with marks.bind(**meanings or {}):
            value, parts, grads = manual(leaves, batch, numbers, args, key)
        grads = jax.tree.unflatten(structure, grads)
        if set(mesh.shape) != {*rows, *columns}:
            grads = rules.constrain_tree(grads, rule, mesh)
        return ((value, merged(*parts, *shapes)) if has_aux else value), grads

    def specs(out):
        return jax.tree.map(lambda _: P(), out[0]), rule(out[1], mesh)

    run = laid_out(jax.jit(loss_and_grad), rule, mesh, who)
    return meshes.for_caller(run, given, specs)


def _on_device(settings, layouts, structure, shapes, shards, batch, numbers, args, key):
    """The loss and gradient of one device's rows, and every sum over devices."""
    loss, division, zero, dtype, reduce_dtype, has_aux, aux = settings
    mesh, m = division.mesh, division.microbatches
    hows = [How.of(array, mesh, dtype, reduce_dtype, division.axes) for array in layouts]
    parts = [split(tree, m) for tree in (batch, numbers)]
    once = zero == 1 and m > 1  # scattered when all are summed
    first = jax.tree.map(lambda x: x[0], parts[0])
    options = {} if key is None else {"key": key}
    within = [None] * len(hows) if once else hows  # the loss's own
    params = structure.unflatten(shards)
    found = reads(loss, params, layouts, mesh, within, dtype, first, args, options)
    _check_axes(division, layouts, found)
    at_use = within if zero == 3 else late(found, layouts, within)
    use = use_of(found, layouts, mesh, at_use)
    now = [None if later else how for how, later in zip(within, use.deferred, strict=True)]
    inputs, wholes = shards, None  # it is differentiated in the inputs
    if zero < 3:  # gather once for all microbatches
        inputs = wholes = all_gather(shards, hows)
        if not once:
            each = zip(shards, layouts, use.deferred, strict=True)
            inputs = [numbered(x, s) if later else x for x, s, later in each]
            use = dataclasses.replace(use, wholes=wholes)

    def whole(inputs, batch, *args, **key):
        if m > 1:
            # The TPU's compiler would take scatters out of the loop that adds up their shares,
            # and its libtpu 0.0.41 fails at it (while_loop_all_reduce_code_motion.cc).
            inputs = jax.lax.optimization_barrier(inputs)
        pairs = zip(gather(inputs, now, wholes), use.deferred, strict=True)
        arrays = [x if later else cast(x, dtype) for x, later in pairs]
        with marks.bind(use=use):
            return loss(structure.unflatten(arrays), batch, *args, **key)

    value, extra, grads = mean_and_grads(whole, inputs, *parts, args, key, division, has_aux, aux)
    if once:
        grads = scatter(grads, hows)
    groups = zip(grads, layouts, shards, strict=True)
    grads = [_sum(division, g, array).astype(x.dtype) for g, array, x in groups]
    shapes += [ways(aux, extra), jax.tree.structure(extra)]
    return value, division.over_devices(jax.tree.leaves(extra), shapes[0]), grads


def _check_axes(division, layouts, found):
    """Raise for a mesh axis that nothing uses."""
    used = {*division.axes, *found.mesh_axes}
    used.update(axis for array in layouts for axis in used_axes(array.spec))
    for name, size in division.mesh.shape.items():
        if size > 1 and name not in used:
            raise ValueError(
                f"{division.who}: nothing is laid out over the mesh axis {name!r} of size {size}, "
                f"so that all work would be done {size} times. Cut rows over it, with replicate="
                f"({name!r},), or data={name!r} in a layout; or lay out parameters over it, with "
                f"over=rule, or activations, by a constraint in the loss."
            )


def _sum(division, grad, array):
    """The gradient summed over devices that hold copies: all, for an array that is not cut."""
    return jax.lax.psum(grad, array.copied(division.axes))
