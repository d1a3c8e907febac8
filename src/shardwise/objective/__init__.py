"""The contract of what a loss returns, and how its parts become one mean and one gradient.

A loss returns `Mean(total, count)`, two sums over the rows of its batch, or one scalar, a mean over
rows; with `has_aux`, a pair of that and a tree. Whatever the batch is divided into, microbatches or
shares of devices, the result is that of `jax.value_and_grad` of total/count over all of it:

    def loss(params, batch, key=None):
        each = losses(params, batch, key)                              # [rows, tokens]
        return objective.Mean((each * batch["mask"]).sum(), batch["mask"].sum())

The division comes first: the cotangent that enters each part's backward pass is 1/count of the
whole batch, so that a clipped cotangent, a small count or a float16 loss come out as on one device.
(In a `chunked_sum` it comes last: scale what is summed, if float16 needs that.)

**Rows that depend on each other** (by a contrastive loss, batch statistics, the balance of experts)
have another loss when they are divided. `check` finds that by numbers, and so does the first call
of what `layouts` returns; `value_and_grad` here, and those of `fsdp` and `pipeline`, judge nothing:
call `check` once. It finds dependences that a trace would hide: rows picked by indices in the
batch, rows mixed in a kernel, a branch on a mean. It also finds outputs that do not add up: divided
by a number that the batch's values decide; with a penalty or a mean that each part would add again;
a scalar that is a sum over rows. The remedies: statistics of the whole batch by `marks.total`,
exact over devices and refused with microbatches; or a layout by the compiler (`rules.jit`) without
microbatches, which sees whole arrays and equals one device, to rounding, for every loss. Statistics
that are to be those of each part's own rows, as in batch norm by device, are `marks.local`'s.

**Rows** are axis 0 of each array of the batch. Where a batch is divided, a scalar in it is a
ValueError, and further arguments go whole to each part. Microbatch j of m holds the rows r with r %
m == j, under every strategy; a batch whose rows are cut over devices stays cut so in each of them.

**Keys** go in by `key=`, raw or typed. If all draws depend on `marks.index`, as the loss's trace
tells, each part gets the key itself: they are those of one device under every strategy, bit for
bit. (Under `jax.vmap` over such keys "rbg" draws depend on their number too, and `check` refuses
them: take threefry, or `jax.lax.map`.) If no draw does, as of a dropout mask over its rows, each
part gets another key: masks are valid, and differ from one device's. A loss that draws in both ways
is a ValueError where it is divided. Without microbatches the compiled path (`rules.jit`) divides
nothing, and equals one device.
"""

from shardwise.objective.chunks import chunked_sum
from shardwise.objective.gradients import value_and_grad
from shardwise.objective.means import Mean
from shardwise.objective.oracle import check
from shardwise.objective.reasons import Indivisible

__all__ = ["Indivisible", "Mean", "check", "chunked_sum", "value_and_grad"]
