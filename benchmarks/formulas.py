"""What one device sends in a step of a layout by hand, along each group of mesh axes; by formula.

Written from what each role has to move, not from the code that moves it. Layers are recomputed in
the backward pass: what is gathered for them, and what their attention and experts exchange forward,
counts twice.
"""

import collections
import math

import jax
import jax.numpy as jnp
from decoders import LENGTH, ROWS

from shardwise import experts
from shardwise import tree as trees
from shardwise.layouts import Layout
from shardwise.layouts.meanings import attention

FLOAT = 4  # bytes


def by_hand(layout: Layout, bench) -> dict[tuple[str, ...], float]:
    """{mesh axes: ring bytes}, of the axes that are manual."""
    sent = collections.Counter()
    manual = (*layout.rows, *layout.context)
    for path, x, box in trees.walk(bench.abstract):
        names = set(trees.axis_names(box) or ())
        _parameter(sent, layout, manual, path, x.size * FLOAT, names)
    _summed(sent, layout, manual, 2 * FLOAT)  # the total and the count
    if layout.context:
        _attention(sent, layout, bench.config)
    if layout.expert:
        _experts(sent, layout, bench.config, manual)
    order = list(layout.mesh.shape)
    return {tuple(sorted(k, key=order.index)): v for k, v in sent.items() if v}


def _parameter(sent, layout, manual, path, size, names):
    apart = layout.expert if "experts" in names else ()
    size /= layout.size("tensor") if names.intersection(layout.cut) else 1
    size /= layout.size("expert") if apart else 1
    again = layout.zero == 3 and path[0] == "blocks"
    passes = (2 if again else 1) + (layout.microbatches if layout.zero == 2 else 1)
    n = layout.size("fsdp")
    sent[layout.fsdp] += passes * size * (n - 1) / n
    rest = tuple(name for name in manual if name not in (*layout.fsdp, *apart))
    _summed(sent, layout, rest, size / n)


def _summed(sent, layout, axes, size):
    n = _parts(layout, axes)
    sent[axes] += 2 * size * (n - 1) / n


def _attention(sent, layout, config):
    rows, t = ROWS // _parts(layout, layout.rows), layout.size("tensor")
    q, k = (
        jax.ShapeDtypeStruct((rows, LENGTH, heads // t, config.head_dim), jnp.float32)
        for heads in (config.heads, config.kv_heads)
    )
    form = attention(layout).bytes_sent(layout.size("context"), q, k)
    sent[layout.context] += config.layers * (2 * form.forward + form.backward)


def _experts(sent, layout, config, manual):
    _tokens(sent, layout, config)
    rows, cut = ROWS // _parts(layout, layout.rows), layout.size("context")
    choices = rows * LENGTH // cut * (config.experts_per_token + 1) * FLOAT * (cut - 1)
    sent[layout.context] += config.layers * 2 * choices
    loads = config.layers * config.experts
    _summed(sent, layout, manual, FLOAT * (2 * loads + config.layers + 1))  # balance, and aux


def _tokens(sent, layout, config):
    """To their experts and back; of stages, of each one's layers."""
    n, cut, form = layout.size("expert"), layout.size("context"), layout.dispatch
    rows, per_token = ROWS // _parts(layout, layout.rows), config.experts_per_token
    tokens = LENGTH // cut
    given = config.embed, per_token, config.experts, n, config.capacity_factor, form
    forward = experts.bytes_sent(rows, tokens, *given, sequence=cut)
    again, backward = forward, forward
    if form == "ragged":  # how many rows there are is known
        backward -= config.experts * FLOAT * (n - 1)
    if form == "gather":  # choices and slots have no gradients; sums are not asked for again
        backward -= 2 * rows * tokens * per_token * FLOAT * (n - 1)
        again -= rows * tokens * config.embed * FLOAT * (n - 1)
    sent[layout.expert] += config.layers // layout.size("stage") * (forward + again + backward)


def of_experts(layout: Layout, bench) -> dict[tuple[str, ...], float]:
    """What stages send for a loss with experts beside what `layouts.predict` says: tokens, and once
    the sums beside the mean.
    """
    sent, config = collections.Counter(), bench.config
    size = FLOAT * (config.layers * (config.experts + 1) + 1)
    if bench.mixed:
        _summed(sent, layout, (*layout.rows, *layout.context), size)
        _tokens(sent, layout, config)
    return sent


def _parts(layout, axes):
    return math.prod(layout.mesh.shape[name] for name in axes)
