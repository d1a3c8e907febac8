"""Tensor and sequence parallelism: which axes are cut, how activations lie, what is sent.

The matrices of a layer are cut over the devices of one mesh axis, which work on the same tokens
(Shoeybi et al., 2019). Sequence parallelism cuts the tokens over the same axis wherever no product
needs them whole (Korthikanti et al., 2023). Both are plain data here, for whoever lays a program
out: a table for `rules.LogicalRules`, specs for the model's marks, and formulas of bytes.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec as P

from shardwise.mesh import axes_of, entry_of

__all__ = ["activations", "bytes_sent", "check", "table"]

Axes = str | tuple[str, ...] | None

_CUT = ("vocab", "heads", "kv_heads", "mlp")
_WHOLE = ("embed", "head_dim")
_KV_HEADS = " Or leave kv heads whole, every device computing all: table(...) | {'kv_heads': None}."


def table(axis: Axes) -> dict[str, Axes]:
    """The table from the logical axes of a decoder to the mesh axis that cuts them, or to None.

    Heads, the MLP's width and the vocabulary are cut; `embed` stays whole: one product's output is
    cut and the next one contracts it. Models with other axes add theirs: `table(axis) | {...}`.
    """
    return {**dict.fromkeys(_CUT, axis), **dict.fromkeys(_WHOLE)}


def activations(
    axis: Axes, rows: Axes = None, context: Axes = None, sequence: bool = False
) -> dict[str, P]:
    """The specs by the names of the model's marks: rows over `rows`, tokens over `context`.

    With `sequence`, tokens are cut over `axis` too between the products. Then what enters attention
    and the MLP and what is cut inside them is pinned as well: left free, XLA for CPU keeps the
    tokens cut there, and gathers weights.
    """
    tokens = (*axes_of(context), *axes_of(axis)) if sequence else axes_of(context)
    between = ("embedding_output", "attention_output", "mlp_output")
    pins = dict.fromkeys(between, P(rows, entry_of(tokens)))
    pins["logits"] = P(rows, entry_of(axes_of(context)), axis)
    if sequence:
        pins |= dict.fromkeys(("attention_input", "mlp_input"), P(rows, context))
        pins |= dict.fromkeys(("attended", "mlp_hidden"), P(rows, context, axis))
    return pins


def check(axis: str, n: int, sizes: Mapping[str, int], length: int | None = None) -> None:
    """Raise where `n` devices along `axis` cannot divide what they would cut.

    `sizes` maps logical axes to their sizes; others than those that are cut do not matter. `length`
    is that of the sequence, for sequence parallelism.

    Raises:
      ValueError: a size that `n` does not divide, with the numbers of devices that would do.
    """
    cut = {name: sizes[name] for name in _CUT if name in sizes}
    cut |= {} if length is None else {"sequence": length}
    fits = [k for k in range(1, n) if not any(size % k for size in cut.values())]
    for name, size in cut.items():
        if size % n:
            raise ValueError(
                f"tensor: {name}={size} does not divide over {n} devices along {axis!r}: choose a "
                f"multiple of {n}, or fewer devices: {', '.join(map(str, fits))} divide all of "
                f"{', '.join(f'{key}={value}' for key, value in cut.items())}."
                + (_KV_HEADS if name == "kv_heads" else "")
            )


class Sent(NamedTuple):
    """What `bytes_sent` returns; `total` is the sum."""

    embedding: float
    layers: float
    head: float
    loss: float
    norms: float

    @property
    def total(self) -> float:
        return sum(self)


def bytes_sent(
    n: int,
    rows: int,
    length: int,
    embed: int,
    layers: int,
    itemsize: int = 4,
    sequence: bool = False,
    gathers_again: bool = False,
    scales: int | None = None,
    normed_heads: float = 0,
) -> Sent:
    """The bytes that one device sends in a step, forward and backward, around a ring.

    Tensor parallelism is over `n` devices, for `rows`×`length` tokens of a group. What is sent is
    told apart: `embedding`; `layers`, all together; `head`, for what enters the last product;
    `loss`, for what the softmax and the target's logit need; `norms`, for the gradients of the
    norms' scales.

    An activation is rows × length × embed × itemsize bytes. A layer takes four all-reduces of one,
    two each way; the embedding one forward, the head one backward; the loss three float32 numbers
    for each token. With `sequence` an all-reduce becomes a gather and a scatter, each of half the
    bytes, and the gradients of the norms' scales are summed, `scales` bytes, by default two in each
    layer and one last; with `gathers_again` what entered a product is not kept, and gathered a
    second time. `normed_heads` is how many norms of a layer are over all heads, which the axis
    cuts: each sums a float32 number of each token, each way.
    """
    share = (n - 1) / n
    activation = rows * length * embed * itemsize * share  # of one gather, or one scatter
    again = activation if sequence and gathers_again else 0
    scales = (2 * layers + 1) * embed * 4 if scales is None else scales
    number = 2 * rows * length * 4 * share  # of each token, summed in float32
    return Sent(
        embedding=2 * activation,
        layers=layers * (8 * activation + 2 * again + 2 * normed_heads * number),
        head=2 * activation + again,
        loss=3 * number,
        norms=2 * scales * share if sequence else 0,
    )
