"""The explorer of experts' loads: who is chosen, who is dropped, what is sent."""

from collections.abc import Callable, Mapping, Sequence

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said

LABELS = {
    "experts": "Experts",
    "per_token": "Experts a token",
    "capacity": "Capacity",
    "skew": "Router",
    "devices": "Devices",
}
_LEFT, _WIDE, _FOOT, _HIGH = 36, 328, 168, 140


def loads_explorer(
    offered: Mapping[str, Mapping[str, object]],
    route: Callable[..., tuple[Sequence[int], Sequence[int], int | None]],
    sent: Callable[..., tuple[int, int]],
    start: Mapping[str, int] | None = None,
) -> Interactive:
    """Choose experts, choices of a token, capacity, router and devices; see loads and bytes.

    `offered` maps each of "experts", "per_token", "capacity", "skew" and "devices" to {words:
    value}. `route(experts, per_token, capacity, skew)` returns (wanted, taken, slots): for each
    expert how many choose it, and how many of these it takes, two lists of ints; and an expert's
    slots, an int, or None for as many as it needs. `sent(experts, per_token, capacity, devices)`
    returns the bytes of an all-to-all there and back (0: there is none), and those of a gather and
    a scatter. `start` has the number of the option first shown, for any of the names.
    """
    controls = {name: Control(label, offered[name]) for name, label in LABELS.items()}

    def result(routed, experts, per_token, capacity, devices):
        wanted, kept, _ = routed
        choices, busiest = int(sum(wanted)), int(max(wanted))
        lost = choices - int(sum(kept))
        exchanged, gathered = map(int, sent(experts, per_token, capacity, devices))
        by_exchange = "without a capacity there is no all-to-all of fixed size; "
        if exchanged:
            by_exchange = f"{said('exchanged', exchanged)} bytes by an all-to-all there and back, "
        less = "all-to-all" if exchanged and exchanged < gathered else "gather"
        return (
            f"{said('choices', choices)} choices; the busiest expert has "
            f"{said('busiest', busiest)}, an even share is {choices // experts}. Dropped: "
            f"{said('dropped', lost)} ({100 * lost / choices:.1f} %). A device sends {by_exchange}"
            f"{said('gathered', gathered)} bytes by a gather and a scatter: {said('less', less)} "
            f"sends less."
        )

    def routed(experts, per_token, capacity, skew):
        return route(experts, per_token, capacity, skew)

    alt = "A bar for each expert: how many choices it takes, and above it those it drops"
    layout = f'<div class="pictures">{svg.picture("loads", 372, 206, alt, rem=32)}</div>'
    return explorer(controls, layout, routed, result, _loads, start=start)


def _loads(routed, devices):
    wanted, kept, slots = routed
    n, scale = len(wanted), _HIGH / max(*wanted, slots or 0)
    wide, line = _WIDE // n, "" if slots is None else "; line: slots"
    yield svg.text(0, 12, f"choices by expert; dashed: dropped{line}")
    yield svg.line(f"M{_LEFT} {_FOOT}H{_LEFT + _WIDE}")
    for i, (all_of_it, taken) in enumerate(zip(wanted, kept, strict=True)):
        x, colour = _LEFT + i * wide, svg.device(i * devices // n)
        high, dropped = round(scale * taken), round(scale * (all_of_it - taken))
        dashed = svg.EDGE + ' stroke-dasharray="2 2"'
        yield svg.box(x, _FOOT - high - dropped, wide - 3, dropped, more=dashed)
        yield svg.box(x, _FOOT - high, wide - 3, high, colour, "")
        yield svg.text(x + (wide - 3) // 2, _FOOT + 15, i, "middle")
    if slots is not None:
        y = round(_FOOT - scale * slots)
        yield svg.line(f"M{_LEFT - 4} {y}H{_LEFT + _WIDE}", 'stroke-width="1.5"')
        yield svg.text(_LEFT - 6, y + 4, slots, "end")
    yield svg.text(364, _FOOT + 31, f"experts; a colour is one of {devices} devices", "end")
