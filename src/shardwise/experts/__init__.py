"""Expert parallelism: what `marks.experts` becomes where a mesh axis cuts the experts.

Inside a manual region (`jax.shard_map`) in which a device has its rows of the batch, and the
weights of experts/n experts:

    with marks.bind(experts=experts.all_to_all("expert")):
        y, kept = layer(x, weights)

`all_to_all` sends each token to the devices of its experts and back (Lepikhin et al., 2020,
GShard), in buffers of a capacity; `ragged` sends as many rows as there are, for no capacity (Gale
et al., 2023, MegaBlocks); `gather` brings all tokens to all experts and reduce-scatters what they
make of them. Which sends less, `bytes_sent` says. Outputs, gradients and who is dropped are those
of one device.

**Gradients.** What comes back for `stacked` is whole: the tokens of every device of the axis are in
it, with the cotangents that their own devices had. Sum it over the axes along which these experts
are copied, and never over the axis that cuts them: a mean or a sum there is a factor that Adam
hides (it divides a gradient by its size). All other weights are summed over it, as over any axis
that cuts rows.

**Rows** have queues of their own (`shardwise.dispatch`), so that rows may be cut in any way. Where
the sequence is cut too, give that axis as `sequence=`: who is kept is then decided from the whole
row, for the cost of gathering the choices, four bytes each.
"""

from shardwise.experts.balance import loads, penalty, rebalanced
from shardwise.experts.costs import bytes_sent
from shardwise.experts.exchange import Exchange, all_to_all, gather, local, ragged

# What `layouts` knows by name.
FORMS = {"all_to_all": all_to_all, "gather": gather, "ragged": ragged}

__all__ = [
    "FORMS",
    "Exchange",
    "all_to_all",
    "bytes_sent",
    "gather",
    "loads",
    "local",
    "penalty",
    "ragged",
    "rebalanced",
]
