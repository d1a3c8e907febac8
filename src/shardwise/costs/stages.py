"""The bytes that a step in stages needs beside parameters and state, term by term."""

from shardwise.costs.arrays import Part
from shardwise.costs.ledger import WIDE
from shardwise.costs.sent import passed, slots
from shardwise.costs.terms import (
    Terms,
    between,
    dispatch_of,
    filled,
    head_of,
    in_layer,
    normed,
    of_a_layer,
    of_vocabulary,
    ring_of,
    worked_on,
)


def of_stages(part: Part, gpu: bool) -> Terms:
    """The `Terms` of a step in stages.

    `weights` has what is in no layer, gathered over stages for the step, and layers that lie
    elsewhere than they are read, twice (by one program). `kept` are slots: one for each stage, with
    what a task (a forward of one microbatch) keeps, without remat the gathered weights too, and of
    each number of layers that stages have its own; one for what the last stage's end leaves,
    float32 logits and its norm; arrived activation and cotangent, cut along tensor.
    """
    c, r, used = part.config, part.roles, part.itemsize
    one, head = of_a_layer(part, (s for s in part.held() if s.array.stacked)), head_of(part)
    width = part.tokens * c.embed / r.tensor
    # Along tensor whole: so the compiler lays it out, to scatter its gradient over stages.
    ends = sum(s.array.size // s.fsdp for s in part.held() if not s.array.stacked)
    last = width * (3 * WIDE + used) + of_vocabulary(part) * WIDE
    live = sum(min(r.microbatches, r.stage - x.stage) * _kept([x], one, gpu) for x in part.kinds)
    copied = sum(each.layers * _pending(each) for each in part.kinds)
    return Terms(
        weights=ends * WIDE + head + max(one.values()) + 2 * _moved(part),
        kept=live + last + sum(passed(part)) - 2 * used * (part.tokens * c.embed - width),
        summed=sum(map(part.carried, part.held())) * WIDE,
        pending=copied + width * (WIDE + used) + of_vocabulary(part) * used,
        copied=copied,
        layer=worked_on(part.kinds, gpu),
        ring=ring_of(part) if r.context > 1 else 0,
        dispatch=dispatch_of(part) if c.experts else 0,
        heads=part.tokens * filled(part) if c.latent else 0,
    )


def _kept(stacks, one, gpu):
    """The bytes that a forward task keeps of these stacks of layers; `one` has a layer's weights,
    gathered.
    """
    found = 0
    for x in stacks:
        weights = one["dense" if "dense" in one and not x.config.experts else "blocks"]
        each = x.tokens * between(x) if x.roles.remat else sum(in_layer(x, gpu)) + weights
        found += x.layers * each
    return found


def _moved(part):
    """The bytes of layers that lie elsewhere between steps than where they are read."""
    layers = (s for s in part.held() if s.array.stacked)
    away = (s for s in layers if not part.is_in_place(s))
    return sum(part.carried(s) * s.array.itemsize for s in away)


def _pending(part):
    """The bytes that a layer's backward pass leaves from its half that goes on to the stage before
    to the half that yields the weights' gradients; done again, all that it was computed from too.
    """
    c, t, used, again = part.config, part.roles.tensor, part.itemsize, part.roles.remat
    norms = (1 + again) * normed(c) * (WIDE + used) / t
    heads = (1 + again) * c.heads * c.depth + c.kv_heads * (c.head_dim + c.depth)
    heads *= used / t
    wide, rows = (2 + 2 * again) * c.mlp * (c.shared_experts if c.experts else 1), 0
    if c.experts:
        wide += (2 + again) * c.mlp * slots(part)
        rows = 2 * c.embed * slots(part) * used + c.experts * WIDE
    return part.tokens * (norms + heads + rows + wide * used / t)
