"""The contract of what a loss returns, and how its parts become one mean and one gradient.

A loss returns `Mean(total, count)`, two sums over the rows of its batch, or one scalar, a mean over
rows; with `has_aux`, that and a tree. Whatever the batch is divided into, microbatches or shares of
devices, the result is that of `jax.value_and_grad` of total/count over all of it:

    def loss(params, batch, key=None):
        each = losses(params, batch, key)                              # [rows, tokens]
        return objective.Mean((each * batch["mask"]).sum(), batch["mask"].sum())

The division comes first: the cotangent that enters each part's backward pass is 1/count of the
whole batch, so that a clipped cotangent, a small count or a float16 loss come out as on one device.

**Rows that look at each other** (a contrastive loss, batch statistics, the balance of experts) are
another function when rows are divided. `check` finds them by numbers (see `oracle`), and so does
the first call of what `layouts` returns; of `value_and_grad` here, or those of `fsdp` and
`pipeline`, nothing is judged: call `check` once. It finds what a trace would hide, such as rows to
which numbers of the batch point, kernels, and conditions on a mean, and sums that are none: a
division by what the batch's values decide, a penalty or a mean that would be added once for each
part, a scalar that is a sum over rows. The remedies: statistics of the whole batch by
`marks.total`, exact over devices and refused with microbatches; or a layout by the compiler
(`rules.jit`), which sees whole arrays and is exact for every loss. Where a part's own rows are
meant, as in batch norm by device, `marks.local` says so.

**Microbatches**: microbatch j of m holds the rows r with r % m == j, under every strategy. A batch
whose rows are cut over devices stays cut so in each of them.

**Keys** go in by `key=`, raw or typed. Draws that depend on the key and on `marks.index` alone are
those of one device under every strategy, bit for bit. A loss that draws by shape gets a key of its
own for each part: valid masks, and others than one device's. Without microbatches the compiled
path (`rules.jit`) divides nothing, and equals one device for these too.
"""

from shardwise.objective.gradients import value_and_grad
from shardwise.objective.means import Mean
from shardwise.objective.oracle import check
from shardwise.objective.reasons import Indivisible

__all__ = ["Indivisible", "Mean", "check", "value_and_grad"]
