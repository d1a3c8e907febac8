"""The mean and its gradient, from parts: microbatches, and shares of devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import marks
from shardwise.objective.means import Mean, cotangents, normal, quotient, wide, widened
from shardwise.objective.parts import Division, numbers, reduced, split, ways
from shardwise.objective.tracing import Traced, trace


def value_and_grad(
    loss: Callable, microbatches: int = 1, has_aux: bool = False, aux: Any = "sum"
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean loss, and its gradient.

    On whole arrays: for one device, or for a layout by the compiler. `loss(params, batch, *args)`
    takes `key=` too where one is given, and returns a `Mean` or a scalar (see `objective`). With
    `has_aux` it returns that and a tree, and what comes back is `((mean, tree), grads)`. With m
    microbatches the batch is taken in m parts, one after the other, with the activations of one in
    memory at a time; `aux` says how their trees become one: "sum", "mean", "max" or "concatenate"
    (in the order of rows), or a prefix tree of these. "mean" weighs each part alike, whatever its
    count. By "sum" a mean in a tree comes back times the number of parts: here the microbatches, in
    `fsdp` and `layouts` by hand these times the devices that divide the batch, or exact blocks.

    Raises, when called:
      TypeError: outputs that are no loss.
      ValueError: rows that do not split; with several microbatches, a count that depends on the
        parameters. Whether the loss is a mean over rows at all, `objective.check` tells.
    """
    bare, division = normal(loss, has_aux), Division(microbatches=microbatches)

    def one(params, batch, *args, key=None):
        def mean(params):
            out, extra = bare(params, batch, *args, key=key)
            return quotient(out), (out.count, extra)

        (value, (count, extra)), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return ((value, extra) if has_aux else value), nothing_if_empty(grads, count)

    def several(params, batch, *args, key=None):
        parts, rows = split(batch, microbatches), split(numbers(batch), microbatches)
        given = params, parts, rows, args, key, division
        value, extra, grads = mean_and_grads(loss, *given, has_aux, aux)
        grads = jax.tree.map(lambda g, x: g.astype(jnp.result_type(x)), grads, params)
        return ((value, extra) if has_aux else value), grads

    return one if microbatches == 1 else several


def mean_and_grads(loss, params, parts, rows, args, key, division: Division, has_aux, aux) -> tuple:
    """(mean, aux, gradients summed over the microbatches) of one device's part of a batch.

    `parts` and `rows` are the part's arrays and row numbers, as `split` gives them. The gradients
    are in `wide` dtypes, and not yet summed over devices.
    """
    first = jax.tree.map(lambda x: x[0], (parts, rows))
    with marks.bind(total=division):
        traced = trace(loss, params, *first, args, key, has_aux)
    part = _Part(traced, params, args, key if traced.by_place else division.fold(key))
    if division.microbatches == 1:
        mean, extra, backward = part.forward(*first)
        whole = division.together(mean)
        grads = backward(whole)
        extra = jax.tree.map(lambda x: jnp.asarray(x)[None], extra)
    else:
        whole, grads, extra = _accumulated(part, parts, rows, division)
    grads = nothing_if_empty(grads, whole.count if traced.has_count else None)
    leaves, structure = jax.tree.flatten(extra)
    extra = structure.unflatten(map(reduced, leaves, ways(aux, extra)))
    of_one_device = jnp.result_type(*(x.dtype for x in jax.tree.leaves(traced.shapes[0])))
    return quotient(whole).astype(of_one_device), extra, grads


def of_block(
    loss, params, batch, rows, args, key, number, division: Division, has_aux, count, backward
) -> tuple:
    """(mean, gradients, aux) as the block of this `number` adds to the batch's, of this `count`.

    Without `count` it is (the block's own, None, ()). `rows` are its row numbers. Sums are `wide`.

    Raises:
      ValueError: a count that depends on the parameters, or a sum over all blocks (`marks.total`).
    """
    with marks.bind(total=division):
        traced = trace(loss, params, batch, rows, args, key, has_aux)
    traced.check_count(params, division.who)
    part = _Part(traced, params, args, key)
    if count is None:
        return part.count(batch, rows, number), None, ()
    (total, _), extra, pull = part.forward(batch, rows, number)
    mean = Mean(total, count)
    return quotient(mean), nothing_if_empty(pull(mean), count) if backward else None, extra


def nothing_if_empty(grads: Any, count: Any) -> Any:
    """Gradients, and 0 where the count is exactly 0."""
    if count is None:
        return grads
    return jax.tree.map(lambda g: jnp.where(count == 0, jnp.zeros_like(g), g), grads)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The passes of one microbatch; its number `j` is None where there is no other."""

    traced: Traced
    params: Any
    args: tuple
    key: Any

    def key_of(self, j):
        """The key of microbatch `j`, for its count and its loss: what is drawn may be counted."""
        of_all = self.key is None or j is None or self.traced.by_place
        return self.key if of_all else jax.random.fold_in(self.key, j)

    def count(self, batch, rows, j):
        return widened(self.traced.count(self.params, batch, rows, self.args, self.key_of(j)))

    def forward(self, batch, rows, j=None):
        """(its sums, its auxiliary outputs, a function of the whole batch's sums: its gradients)"""
        key = self.key_of(j)

        def outputs(params):
            (total, count), extra = self.traced(params, batch, rows, self.args, key)
            count = jnp.float32(1) if count is None else jnp.asarray(count)
            floating = jnp.issubdtype(count.dtype, jnp.inexact)
            return ((total, count) if floating else (total,)), (count, extra)

        out, pull, (count, extra) = jax.vjp(outputs, self.params, has_aux=True)

        def backward(whole):  # with the cotangents of the whole mean, 1/count from the start
            cots = zip(cotangents(whole), out, strict=False)
            return widened(pull(tuple(c.astype(x.dtype) for c, x in cots))[0])

        return Mean(widened(out[0]), widened(count)), extra, backward


def _accumulated(part, parts, rows, division):
    """(sums of all parts, sum of the gradients, stacked aux), one microbatch after the other."""
    part.traced.check_count(part.params, division.who)
    steps = (parts, rows, jnp.arange(division.microbatches))
    count = division.together(jnp.sum(jax.lax.map(lambda one: part.count(*one), steps)))
    # A sum of gradients is like the parameter.
    sums = part.traced.shapes[0].total, part.params
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), wide(jnp.result_type(x))), sums)

    def add(sums, one):
        (total, _), extra, backward = part.forward(*one)
        found = total, backward(Mean(total, count))
        return jax.tree.map(jnp.add, sums, found), extra

    (total, grads), extra = jax.lax.scan(add, zeros, steps)
    return Mean(division.together(total), count), grads, extra
