"""Bytes that a dispatch sends, by formula."""

from shardwise import dispatch


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
) -> int | float:
    """What one device sends in a forward pass, in bytes, of `rows`·`tokens` tokens of its own.

    With T = rows·tokens: an all-to-all there and back sends 2·k·f·T·h·e·(n-1)/n, where f is the
    capacity after rounding up to whole slots; no numbers of experts travel, since the place in a
    buffer tells. A gather and a scatter send 2·T·h·e·(n-1), the choices (four bytes), their weights
    and, with a capacity, their slots. A backward pass sends the activations' part again; one that
    recomputes the layer, twice.

    Raises:
      ValueError: another form, or experts that do not divide over the devices.
    """
    dispatch.divides(experts, devices, "expert")
    if form not in ("all_to_all", "gather"):
        raise ValueError(f"experts.bytes_sent: form={form!r}; expected 'all_to_all' or 'gather'.")
    if form == "all_to_all" and capacity is not None:
        slots = dispatch.slots(capacity, tokens, per_token, experts)
        buffers = experts * rows * slots * embed * itemsize
        return _exact(2 * buffers * (devices - 1), devices)
    choice = 4 + weight_itemsize + (0 if capacity is None else 4)
    once = rows * tokens * (2 * embed * itemsize + per_token * choice)
    return once * (devices - 1)


def _exact(numerator, denominator):
    quotient, rest = divmod(numerator, denominator)
    return numerator / denominator if rest else quotient
