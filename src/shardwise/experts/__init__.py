"""Mixtures of experts: the layer, its dispatch on one device, and where a mesh axis cuts experts.

`marks.experts` says what a dispatch takes and gives, and where nothing is bound one device does it.
Inside a `jax.shard_map` in which a device has its rows of the batch, and the weights of experts/n
experts, with a function `layer` of your own that calls `marks.experts`:

    with marks.bind(experts=experts.all_to_all("expert")):
        y, kept = layer(x, weights)    # kept: bool [rows, tokens, k], False where dropped

`all_to_all` sends each token to the devices of its experts and back (Lepikhin et al., 2020,
GShard), in buffers of a capacity; `ragged` sends as many rows as there are, for no capacity (Gale
et al., 2023, MegaBlocks); `gather` brings all tokens to all experts and reduce-scatters what they
make of them. Which sends less, `bytes_sent` says. Outputs, gradients and which choices are dropped
are those of one device.

**Gradients.** The gradient of a device's experts already has the tokens of every device of the axis
in it: sum it over the axes along which these experts are copied, not over the axis that cuts them.
All other gradients are summed over it, as over any axis that cuts rows, and all are divided by the
count of the whole batch. Who averages the others over the axis instead has experts' gradients that
are n times too large, which Adam hides.

**Rows** of the batch have queues of their own, one for each expert, in the order of their tokens
and of a token's choices. So they may be cut in any way, and an earlier token never waits for a
later one. Where the sequence is cut too, give that axis as `sequence=`: which choices are kept is
then decided from the whole row, for the cost of gathering the choices, four bytes each.
"""

from .dispatch import queued, slots
from .exchange import FORMS, Exchange, all_to_all, bytes_sent, gather, on_one_device, ragged
from .mixture import loads, penalty, rebalanced

__all__ = [
    "FORMS", "Exchange", "all_to_all", "bytes_sent", "gather", "loads", "on_one_device", "penalty",
    "queued", "ragged", "rebalanced", "slots",
]  # fmt: skip
