"""What a step cannot but hold beside its arguments, by what its strategy is; by formula.

Bytes of temporaries of one device: of the weights what is gathered and what of their gradients is
there at once, the inputs that rematerialised layers keep, the loss's logits and their gradient, and
what attention or dispatch gathers to stay. What a layer computes on the way, and what a compiler
copies, comes on top.
"""

import math

import decoders

from shardwise import tree as trees
from shardwise.layouts import Layout

FLOAT = 4  # bytes


def strategy(layout: Layout) -> str:
    """What, beside its roles, makes it hold what it holds: rows of one strategy are compared."""
    found = []
    if layout.fsdp and layout.zero < 3:
        found.append(f"ZeRO {layout.zero}")
    if layout.context and layout.attention in ("all_gather", "ulysses"):
        found.append(layout.attention)
    if layout.expert and layout.dispatch != "all_to_all":
        found.append(layout.dispatch)
    return ", ".join(found)


def floor(layout: Layout, bench) -> int:
    """Bytes of temporaries, for a layout without stages."""
    return int(_weights(layout, bench) + _activations(layout, bench))


def _weights(layout, bench):
    """Gathered weights, and gradients, which the optimizer finds in shares."""
    shares, whole, layer, largest = 0, 0, 0, 0
    for path, x, box in trees.walk(bench.abstract):
        names = set(trees.axis_names(box) or ())
        size = x.size * FLOAT / (layout.size("tensor") if names & {*layout.cut} else 1)
        size /= layout.size("expert") if "experts" in names else 1
        apart = {*layout.expert} & {*layout.fsdp} if "experts" in names else set()
        shares += size if apart else size / layout.size("fsdp")
        whole += size
        if path[0] == "blocks":
            layer += size / bench.config.layers
        else:
            largest = max(largest, size)
    if layout.size("fsdp") == 1:
        return shares
    if layout.zero == 3:
        return shares + 2 * max(layer, largest)
    return whole + (whole if layout.zero == 1 else shares + layer)


def _activations(layout, bench):
    config, rows = bench.config, decoders.ROWS // layout.microbatches
    n, c, t = math.prod(layout.mesh.shape[a] for a in layout.rows), *map(layout.size, CUT)
    tokens = rows // n * decoders.LENGTH // c
    kept = config.layers * tokens * config.embed / (t if layout.sequence else 1)
    held = kept + 2 * tokens * config.vocab / t
    if layout.context and layout.attention == "all_gather":  # K, V, dK and dV of a layer
        held += 4 * tokens * c * config.kv_heads * config.head_dim / t
    if layout.expert and layout.dispatch == "gather":  # what comes in, and what goes back
        held += 2 * tokens * layout.size("expert") * config.embed
    return held * FLOAT


CUT = ("context", "tensor")
