"""Bytes that a dispatch sends, by formula."""

from shardwise.experts import dispatch
from shardwise.experts.ragged_exchange import most_rows

KNOWN = ("all_to_all", "gather", "ragged")


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
    weight_itemsize: int = 4,
    sequence: int = 1,
) -> int | float:
    """Bytes that one device sends in a forward pass, for `rows`·`tokens` tokens of its own.

    With T = rows·tokens: an all-to-all there and back sends 2·k·f·T·h·e·(n-1)/n, where f is the
    capacity after rounding up to whole slots; no numbers of experts travel, since the place in a
    buffer tells. A gather and a scatter send 2·T·h·e·(n-1), the choices (four bytes), their weights
    and, with a capacity, their slots. A backward pass sends the activations' part again; one that
    recomputes the layer, twice.

    "ragged" is exact on CPU, where blocks are sent that have room for all that a device can choose
    of another's m experts: 2·T·min(k, m)·h·e·(n-1), or with a capacity m·slots for each row if that
    is less; and numbers of rows, 4·(n + 2)·m·(n-1) bytes, of which a backward pass sends 8·m·(n-1)
    (or none, where XLA finds that it has them).
    On TPUs and GPUs the rows are sent that there are: there T·k·h·e·(n-1)/n for an even router and
    T·k·h·e at most, and back what arrived, at most (n-1) times that.

    `sequence` is the number of devices that a row is cut over, `tokens` then a device's part of it:
    an expert's slots are those of the whole row.

    Raises:
      ValueError: another form, or experts that do not divide over the devices.
    """
    dispatch.divides(experts, devices, "expert")
    if form not in KNOWN:
        told = ", ".join(map(repr, KNOWN))
        raise ValueError(f"experts.bytes_sent: form={form!r}; expected one of {told}.")
    slots = None
    if capacity is not None:
        slots = min(tokens, dispatch.slots(capacity, tokens * sequence, per_token, experts))
    if form == "ragged":
        held = experts // devices
        blocks = most_rows(rows, tokens, per_token, held, slots) * embed * itemsize
        return (devices - 1) * (2 * blocks + 4 * (experts + 2 * held))
    if form == "all_to_all" and slots is not None:
        buffers = experts * rows * slots * embed * itemsize
        return _exact(2 * buffers * (devices - 1), devices)
    choice = 4 + weight_itemsize + (0 if slots is None else 4)
    once = rows * tokens * (2 * embed * itemsize + per_token * choice)
    return once * (devices - 1)


def _exact(numerator, denominator):
    quotient, rest = divmod(numerator, denominator)
    return numerator / denominator if rest else quotient
