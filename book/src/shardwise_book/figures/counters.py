"""Random bits drawn in shards: which device drew which counters of the generator's stream."""

from collections.abc import Mapping

import jax
import numpy as np
from matplotlib.patches import Rectangle

from shardwise_book.figures import palette
from shardwise_book.figures.plots import Drawing, canvas, tile, words


def counters(key: jax.Array, drawn: Mapping[str, jax.Array]) -> Drawing:
    """Arrays of `jax.random.bits(key, shape)`, cut in several ways, by the counters behind them.

    `drawn` maps a title to such an array of two axes. Each entry of each shard is looked up in the
    stream `jax.random.bits(key, (size,))`, and its place there is the number written into it; its
    colour is the device that holds it. The strip below is the stream in order, coloured alike.

    Raises:
      ValueError: a shard holds a number that stands nowhere in the stream.
    """
    drawing, panels = canvas(2.05 * len(drawn), 2.6, len(drawn))
    for axes, (title, array) in zip(np.atleast_1d(panels), drawn.items(), strict=True):
        found, devices = origins(key, array)
        rows, columns = found.shape
        wide, foot = columns / found.size, rows + 2.6
        for (i, j), counter in np.ndenumerate(found):
            colour = palette.device(devices[i, j])
            tile(axes, j, i, 0.96, 0.96, colour, counter, fontsize=9, va="center_baseline")
            place = counter * wide, rows + 1.1
            axes.add_patch(Rectangle(place, wide, 1, color=colour, linewidth=0.4))  # they touch
        words(axes, 0, foot, 0, ha="left", fontsize=9)
        words(axes, columns / 2, foot, "the stream", fontsize=9)
        words(axes, columns, foot, found.size - 1, ha="right", fontsize=9)
        axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 3.1, -0.1), aspect="equal")
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    return drawing


def origins(key: jax.Array, array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """For each entry of an array of random bits: its place in the stream, and the device's id."""
    stream = np.asarray(jax.random.bits(key, (array.size,), array.dtype))
    place = {bits: i for i, bits in enumerate(stream.tolist())}
    found, devices = np.empty(array.shape, int), np.empty(array.shape, int)
    for shard in array.addressable_shards:
        block = np.asarray(shard.data)
        if strange := [bits for bits in block.ravel().tolist() if bits not in place]:
            raise ValueError(
                f"figures.counters: device {shard.device.id} holds {strange[0]}, which is "
                f"not among the {array.size} numbers that this key draws; was it drawn with "
                f"another key?"
            )
        found[shard.index] = np.vectorize(place.get, otypes=[int])(block)
        if shard.replica_id == 0:  # of several that hold the same block, one gives the colour
            devices[shard.index] = shard.device.id
    return found, devices
