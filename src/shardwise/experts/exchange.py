"""Meanings of `marks.experts` inside a manual region, and by formula the bytes that they send."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from shardwise import marks
from shardwise.experts import dispatch, ragged_exchange


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A meaning of `marks.experts`: how tokens get to experts that are cut along a mesh axis.

    `form` is "all_to_all", "ragged" or "gather", see the functions of these names, or "local".
    `axis` cuts the experts, `sequence` the sequence, if an axis does. With "local" every device has
    all experts, `axis` is None, and nothing but the choices travels, where an axis cuts the
    sequence and a capacity drops from the whole row.

    Raises:
      ValueError: at the call, arrays whose shapes do not fit, or experts that do not divide.
    """

    form: str
    axis: str | None
    sequence: str | None = None

    def __call__(self, x, chosen, weights, apply, stacked, experts, capacity=None, index=None):
        """(y, kept) of `marks.experts`; raises ValueError for experts that do not fit the axis."""
        n = jax.lax.axis_size(self.axis or ())
        dispatch.check(x, chosen, weights, stacked, experts, n, self.axis)
        apply, slot, size = functools.partial(apply, stacked), None, None
        kept = jnp.ones(chosen.shape, bool)
        if capacity is not None:
            slot, size, kept = self._slots(chosen, experts, capacity, index)
        if self.form == "ragged":
            chosen, run = jnp.where(kept, chosen, experts), self._in_slices
        else:
            run = self._sent if self.form == "all_to_all" and size is not None else self._gathered
        return run(x, chosen, weights, apply, experts // n, slot, size), kept

    def _slots(self, chosen, experts, capacity, index):
        """(slot of each choice in this device's buffers, their size, whether it is kept)."""
        b, s, k = chosen.shape
        allowed = dispatch.slots(capacity, s * jax.lax.axis_size(self.sequence or ()), k, experts)
        if self.sequence is None:
            place = dispatch.queued(chosen, experts, index)
            return place, allowed, place < allowed
        index = marks.index("sequence", s)[None] if index is None else index
        index = jnp.broadcast_to(index, (b, s))
        whole = jax.lax.all_gather((chosen, index), self.sequence, axis=1, tiled=True)
        start = jax.lax.axis_index(self.sequence) * s
        place = dispatch.queued(whole[0], experts, whole[1])
        kept = jax.lax.dynamic_slice_in_dim(place, start, s, axis=1) < allowed
        here = dispatch.queued(jnp.where(kept, chosen, experts), experts)
        return here, min(allowed, s), kept

    def _sent(self, x, chosen, weights, apply, held, slot, size):
        """The experts' outputs by buffers [experts, rows·size, e], sent block by block and back."""

        def there(buffers):
            arrived = jax.lax.all_to_all(buffers, self.axis, 0, 1, tiled=True)
            return jax.lax.all_to_all(apply(arrived), self.axis, 1, 0, tiled=True)

        experts = held * jax.lax.axis_size(self.axis)
        return dispatch.buffered(x, chosen, slot, weights, there, experts, size)

    def _in_slices(self, x, chosen, weights, apply, held, _, size):
        """The experts' outputs by slices: choices sorted by expert, to their devices, and back."""
        b, s, k = chosen.shape
        n, me = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        order, sizes = dispatch.by_expert(chosen, n * held)
        counts = jax.lax.all_gather(sizes, self.axis)  # [devices, experts]
        most = ragged_exchange.most_rows(b, s, k, held, size)
        send = functools.partial(ragged_exchange.exchange, self.axis, order.size, most)
        arrived = send(False, x.reshape(b * s, -1)[order // k], counts)
        groups = jnp.sum(counts, axis=0).reshape(n, held)[me]
        found = send(True, apply(arrived, groups), counts)  # and home
        return dispatch.in_order(found, order, weights)

    def _gathered(self, x, chosen, weights, apply, held, slot, size):
        """The experts' outputs by gathering all tokens of the axis, and scattering the sums."""
        if self.axis is not None:
            given = x, chosen, weights, slot
            x, chosen, weights, slot = jax.lax.all_gather(given, self.axis, tiled=True)
            chosen = chosen - jax.lax.axis_index(self.axis) * held  # beyond: of other devices
        if size is None:
            y = dispatch.grouped(x, chosen, weights, apply, held)
        else:
            y = dispatch.buffered(x, chosen, slot, weights, apply, held, size)
        if self.axis is None:
            return y
        return jax.lax.psum_scatter(y, self.axis, scatter_dimension=0, tiled=True)


def all_to_all(axis: str, sequence: str | None = None) -> Exchange:
    """The Exchange that sends tokens over `axis` to their experts and back, in buffers of slots.

    Without a capacity, for which a buffer would be as large as what an all-gather sends, this is
    `gather`; `ragged` sends less on TPUs and GPUs.
    """
    return Exchange("all_to_all", axis, sequence)


def ragged(axis: str, sequence: str | None = None) -> Exchange:
    """The Exchange that sends one row over `axis` for each choice, and one back; for no capacity.

    With n devices and k experts a token, an even router sends n/k times less by it than by
    `gather`. What arrives stands in a buffer for the worst case, rows·tokens·min(k, experts held)
    from each device; with a capacity it is smaller, and choices that are dropped are not sent.

    On TPUs and GPUs rows travel by `jax.lax.ragged_all_to_all` (compiled by Google's compiler, not
    run on a TPU yet). XLA:CPU has none: there devices send each other blocks for the worst case.
    """
    return Exchange("ragged", axis, sequence)


def gather(axis: str, sequence: str | None = None) -> Exchange:
    """The Exchange that gathers all tokens of `axis` to the experts, and reduce-scatters the sums.

    It is for a capacity·k above the number of devices, with k experts a token, and for no capacity.
    """
    return Exchange("gather", axis, sequence)


# What `layouts` knows by name.
FORMS = {"all_to_all": all_to_all, "gather": gather, "ragged": ragged}

on_one_device = Exchange("local", None)  # what `marks.experts` does where nothing is bound


def bytes_sent(
    rows: int,
    tokens: int,
    embed: int,
    per_token: int,
    experts: int,
    devices: int,
    capacity: float | None = None,
    form: str = "all_to_all",
    itemsize: int = 4,
    sequence: int = 1,
) -> int:
    """The bytes that one device sends in a layer's forward pass, for rows·tokens tokens of its own.

    Let T = rows·tokens, k = per_token, h = embed, e = itemsize, n = devices, m = experts/devices.
    An "all_to_all" there and back sends 2·k·f·T·h·e·(n-1)/n, where f is the capacity after rounding
    up to whole slots. A "gather" and its scatter send 2·T·h·e·(n-1), and four bytes each for the
    choices, their weights and, with a capacity, their slots. A backward pass sends the activations'
    part again; one that recomputes the layer, twice.

    For "ragged" what CPUs send is returned, blocks for the worst case: 2·T·min(k, m)·h·e·(n-1), or
    with a capacity m·slots in place of tokens·min(k, m) if that is less; and numbers of rows,
    4·(n + 2)·m·(n-1) bytes, of which a backward pass sends 8·m·(n-1) at most. TPUs and GPUs send
    chosen rows alone, which is not returned: T·k·h·e·(n-1)/n for an even router and T·k·h·e at
    most, and back what arrived, at most (n-1) times that.

    `sequence` is the number of devices that a row is cut over, `tokens` then a device's part of it:
    an expert's slots are those of the whole row.

    Raises:
      ValueError: another form, or experts that do not divide over the devices.
    """
    dispatch.divides(experts, devices, "expert")
    if form not in FORMS:
        told = ", ".join(map(repr, FORMS))
        raise ValueError(f"experts.bytes_sent: form={form!r}; expected one of {told}.")
    held, slots = experts // devices, None
    if capacity is not None:
        slots = min(tokens, dispatch.slots(capacity, tokens * sequence, per_token, experts))
    if form == "ragged":
        blocks = ragged_exchange.most_rows(rows, tokens, per_token, held, slots) * embed * itemsize
        return (devices - 1) * (2 * blocks + 4 * (experts + 2 * held))
    if form == "all_to_all" and slots is not None:
        return 2 * held * rows * slots * embed * itemsize * (devices - 1)
    choice = 8 if slots is None else 12
    once = rows * tokens * (2 * embed * itemsize + per_token * choice)
    return once * (devices - 1)
