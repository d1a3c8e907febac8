"""Context parallelism: the sequence is cut, and attention is what devices must exchange for.

A form is a meaning of `marks.attend` for a mesh axis that cuts the sequence. All of them equal one
device, and differ in what they send, keep and allow:

    with marks.bind(attend=context.ring("context")):            # inside a shard_map
        mean = loss(params, batch)
    attend = context.within(mesh, "context", context.ring("context"))   # under jit

    all_gather(axis)  every device gets all of K and V
    ring(axis)        K and V go around, and attention is summed up block by block
    ulysses(axis)     tokens are exchanged for heads, and back

`axis` is one mesh axis, or several as one. `form.bytes_sent(n, q, k, v)` has the bytes that
one of n devices sends in a layer's attention, as `.forward` and `.backward`. There q, k and v (by
default like k) are arrays or `jax.ShapeDtypeStruct`s [b, S, heads, d], of the whole sequence S, in
the b rows that these devices share. `apart` counts. With remat the forward bytes are sent twice.

Where a device sees whole sequences, as without a context axis or by ulysses, a kernel may compute
attention: `layouts.Layout(kernel=...)`. `tiled` keeps no scores on any device, and `splash()`, for
TPUs, and `cudnn()`, for GPUs, never have them in memory.

An order says which of `size` tokens each of n devices has: `contiguous`, `striped` or `zigzag`, a
permutation int32 [size]. Entry i is the place in the sequence of the token that lies at place i of
memory, of which device r has the r-th n-th. So `x[:, order]` lays a batch's tokens out, and
`np.argsort(order)` undoes it. A size that n, or zigzag's 2n, does not divide is a ValueError.
"""

from shardwise.context.forms import AllGather as all_gather
from shardwise.context.forms import Ring as ring
from shardwise.context.forms import Ulysses as ulysses
from shardwise.context.forms import Within as within
from shardwise.context.forms import tiled
from shardwise.context.kernels import Cudnn as cudnn
from shardwise.context.kernels import Splash as splash
from shardwise.context.orders import contiguous, striped, work, zigzag

# What `layouts` knows by name: a form, and the order that it wants (None: the sequence's own).
FORMS = {
    "ring": (ring, None),
    "striped": (ring, striped),
    "zigzag": (ring, zigzag),
    "all_gather": (all_gather, None),
    "ulysses": (ulysses, None),
}

__all__ = [
    "FORMS", "all_gather", "contiguous", "cudnn", "ring", "splash", "striped",
    "tiled", "ulysses", "within", "work", "zigzag",
]  # fmt: skip
