"""Whether a loss is what strategies take it for: sums over rows, or a mean over rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import marks
from shardwise.objective.means import Mean, cotangents, normal
from shardwise.objective.microbatches import meaning, numbers


def check(
    loss: Callable, params: Any, batch: Any, *args: Any, key: Any = None, has_aux: bool = False
) -> None:
    """Compare the loss and its gradient over the whole batch with those of its two halves.

    Run it once, on one device, with a batch whose rows differ, in padding too: what it finds
    unequal is another function under every strategy that divides rows. The halves are the even
    rows and the odd ones, as microbatches divide, and then the first rows and the last, as devices
    do: a mask that leaves as many in both of one pair is uneven in the other. A loss that draws by
    shape draws otherwise in a half: leave its key out.

    Raises:
      ValueError: total, count, mean or gradient are no sums, or no mean, over rows; the message
        names which, and both numbers.
      TypeError: outputs that are no loss.
    """
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)}
    if not sizes or min(sizes) < 2:
        raise ValueError("objective.check: expected a batch of 2 rows or more.")
    given = {} if key is None else {"key": key}
    bare = normal(loss, has_aux)

    def sums(params, batch, rows, share):
        with marks.bind(index=meaning(rows)):
            (total, count), _ = bare(params, batch, *args, **given)
        scalar = count is None  # a mean over rows, which weighs as many as it has
        total = total.astype(jnp.float32)
        return Mean(total * share, share) if scalar else Mean(total, jnp.float32(count))

    @jax.jit
    def backward(params, part, whole):
        return jax.vjp(lambda params: sums(params, *part), params)[1](cotangents(whole))[0]

    rows = numbers(batch)
    whole = batch, rows, jnp.float32(1)
    forward = jax.jit(sums)
    expected = forward(params, *whole)
    tolerance = _tolerance(params)
    scalar = jax.eval_shape(bare, params, batch, *args, **given)[0].count is None
    of_whole = jax.tree.leaves(backward(params, whole, expected))
    # Of a gradient that is zero but for rounding, only the others tell the size.
    largest = max(float(np.max(np.abs(np.asarray(g, np.float64)), initial=0)) for g in of_whole)
    shares = [jnp.float32(_share(max(sizes), j)) for j in (0, 1)]
    for half in _alternate, _in_order:
        halves = [(*half((batch, rows), j), share) for j, share in enumerate(shares)]
        parts = [forward(params, *half) for half in halves]
        for name, field in [("mean" if scalar else "total", 0), ("count", 1)]:
            _compare(name, expected[field], [part[field] for part in parts], tolerance)
        grads = [backward(params, half, expected) for half in halves]
        flat = [jax.tree_util.tree_flatten_with_path(g)[0] for g in grads]
        for g, (keys, a), (_, b) in zip(of_whole, *flat, strict=True):
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            _compare(f"gradient of {path or 'the parameters'}", g, [a, b], tolerance, largest / 100)


def _alternate(tree, j):
    return jax.tree.map(lambda x: x[j::2] if jnp.ndim(x) else x, tree)


def _in_order(tree, j):
    def half(x):
        middle = (len(x) + 1) // 2
        return x[middle:] if j else x[:middle]

    return jax.tree.map(lambda x: half(x) if jnp.ndim(x) else x, tree)


def _share(rows, j):
    return len(range(j, rows, 2)) / rows


def _tolerance(params):
    """Sums of parts are rounded otherwise: some hundred roundings of the coarsest number."""
    return 300 * max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(params))


def _compare(name, whole, parts, tolerance, least=0.0):
    whole, parts = np.asarray(whole, np.float64), [np.asarray(p, np.float64) for p in parts]
    scale = max([least, *(float(np.max(np.abs(x), initial=0)) for x in (whole, *parts))])
    error = float(np.max(np.abs(whole - sum(parts)), initial=0))
    if error <= tolerance * scale:
        return
    told = (
        f"{whole:.6g} over the whole batch, {sum(parts):.6g} from its halves"
        if (whole.ndim == 0)
        else f"they differ by {error:.3g} where the largest entry is {scale:.3g}"
    )
    raise ValueError(
        f"objective.check: the {name} of the loss is no sum over rows: {told}. If it divides by "
        f"something that the batch decides, return objective.Mean(total, count). If rows look at "
        f"each other (contrastive losses, batch statistics, balance or capacity of experts), sum "
        f"over the strategy's axis name, or use a layout by the compiler (rules.jit), which sees "
        f"whole arrays. If it draws random numbers by shape, check it without its key."
    )
