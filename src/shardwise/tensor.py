"""Tensor and sequence parallelism: which axes are cut, how activations lie, what is sent.

The matrices of a layer are cut over the devices of one mesh axis, which work on the same tokens
(Shoeybi et al., 2019). Sequence parallelism cuts the tokens over the same axis wherever no product
needs them whole (Korthikanti et al., 2023). Both are plain data here, for whoever lays a program
out: a table for `rules.LogicalRules`, specs for the model's marks, and formulas of bytes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from shardwise.measure.counts import Op
from shardwise.measure.hlo import Array
from shardwise.mesh import axes_of, entry_of

__all__ = ["activations", "bytes_sent", "check", "collectives", "table"]

Axes = str | tuple[str, ...] | None

DTYPES = {1: "s8", 2: "bf16", 4: "f32", 8: "f64"}  # by bytes, as programs name them
_CUT = ("vocab", "heads", "kv_heads", "mlp")
_WHOLE = ("embed", "head_dim")
_KV_HEADS = " Or leave kv heads whole, every device computing all: table(...) | {'kv_heads': None}."


def table(axis: Axes) -> dict[str, Axes]:
    """The table from the logical axes of a decoder to the mesh axis that cuts them, or to None.

    Cut are "vocab", "heads", "kv_heads" and "mlp"; "embed" and "head_dim" stay whole: one product's
    output is cut, the next one contracts it. Add other axes of a model: `table(axis) | {...}`.
    """
    return {**dict.fromkeys(_CUT, axis), **dict.fromkeys(_WHOLE)}


def activations(
    axis: Axes, rows: Axes = None, context: Axes = None, sequence: bool = False
) -> dict[str, P]:
    """A dict from names in a model's `marks.constrain` to the PartitionSpecs of these activations.

    `rules.jit(..., names=activations(...))` pins them so. A `layouts.Layout` does it by itself.
    The names are "embedding_output", "attention_output", "mlp_output" and "logits". Rows are cut
    over `rows`, tokens over `context`, and logits over `axis` too. With `sequence`, tokens are cut
    over `axis` as well between the products, and what enters attention and the MLP or is cut in
    them is pinned, too, as "attention_input", "mlp_input", "attended" and "mlp_hidden": left free,
    XLA for CPU keeps the tokens cut there, and gathers weights.
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

    `sizes` maps logical axes to sizes, of which those of "vocab", "heads", "kv_heads" and "mlp"
    count. `axis` is a name for messages, `length` that of a sequence that is cut too.

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


class BytesSent(NamedTuple):
    """The bytes that a device sends in a step: for each field, what `collectives` tells of it."""

    embedding: float
    layers: float
    head: float
    loss: float
    norms: float

    @property
    def total(self) -> float:
        return sum(self)


def collectives(
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
    sums_again: bool = False,
    mlp: bool = True,
) -> dict[str, list[Op]]:
    """A dict of the collectives of a step, forward and backward, along an axis of `n` devices.

    Its keys are "embedding", "layers", "head", "loss" and "norms". Its values are lists of
    `measure.counts.Op`: `kind`, such as "all-reduce", the `arrays` (dtype, dims) that a device puts
    in, how often it runs (`trips`), the `ring_bytes` that a device sends in all. The n devices have
    the same `rows` × `length` tokens, and activations have `itemsize` bytes an entry, 1, 2, 4 or 8.

    A layer sums an activation, rows × length × embed entries, four times: after attention and
    after the MLP, and backward before each; without `mlp`, around attention alone. So does the
    embedding once, forward, and the head once, backward; the loss sums three float32 numbers of
    each token. `normed_heads` is the number of a layer's norms that run over all heads, which the
    axis cuts, a mean where layers differ: each sums one float32 of each token, forward and
    backward; one whose forward pass is done again counts 1.5.

    With `sequence` a sum of an activation becomes a gather and a scatter, and the gradients of the
    norms' scales are summed: `scales` bytes, by default those of two float32 scales in each layer
    and one last. Set `gathers_again` if layers are rematerialised: with `sequence` they, and the
    head, then gather once more what enters their products. Set `sums_again` too if the policy keeps
    no products (`nothing_saveable`): what leaves attention is then scattered, or without `sequence`
    summed, once more. Nothing needs what leaves the MLP.
    """
    blocks, activation, dtype = 1 + mlp, (rows, length, embed), DTYPES[itemsize]
    again = {"all-reduce": sums_again}
    if sequence:
        again = {"all-gather": blocks * gathers_again, "reduce-scatter": sums_again}
    once = [expected(n, kind, activation, dtype, 1) for kind in again]
    of_layers = [
        expected(n, kind, activation, dtype, layers * (2 * blocks + more))
        for kind, more in again.items()
    ]
    numbers = "all-reduce", (rows, length), "f32"
    of_layers.append(expected(n, *numbers, 2 * layers * normed_heads))
    scales = (2 * layers + 1) * embed * 4 if scales is None else scales
    return {
        "embedding": once,
        "layers": of_layers,
        "head": once + once[:1] * (sequence and gathers_again),
        "loss": [expected(n, *numbers, 3)],
        "norms": [expected(n, "all-reduce", (scales,), "s8", 1)] * sequence,
    }


def expected(n: int, kind: str, dims: tuple[float, ...], dtype: str, times: float) -> Op:
    """The `Op` of a collective that a compiler is expected to insert, of a whole array's dims."""
    if kind == "all-gather":  # of shares, cut along the sequence
        dims = dims[0], dims[1] / n if dims[1] % n else dims[1] // n, *dims[2:]
    return Op(kind, "", (Array(dtype, dims),), n, times, notes=("expected",))


def bytes_sent(
    n: int, rows: int, length: int, embed: int, layers: int, *more: Any, **options: Any
) -> BytesSent:
    """The bytes that one device sends in a step, forward and backward, around a ring of `n`.

    What comes back has the sum of the `ring_bytes` in each list of `collectives`, as `.embedding`,
    `.layers`, `.head`, `.loss` and `.norms`, and as `.total` that of all. `more` and `options` are
    further arguments of `collectives`.
    """
    found = collectives(n, rows, length, embed, layers, *more, **options)
    return BytesSent(**{of: sum(op.ring_bytes for op in ops) for of, ops in found.items()})
