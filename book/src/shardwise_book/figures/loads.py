"""The interactive figure of experts' loads: who is chosen, who is dropped, what is sent."""

from collections.abc import Callable, Mapping, Sequence

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    status,
)

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
    value}. `route(experts, per_token, capacity, skew)` gives, for each expert, how many choose it
    and how many of these it takes, and the slots of an expert (None: as many as it needs).
    `sent(experts, per_token, capacity, devices)` gives the bytes of an all-to-all there and back
    (0: there is none), and of a gather and a scatter. `start` has the number of the option first
    shown, for any of the names.
    """
    values = {name: list(offered[name].values()) for name in LABELS}
    routed, costs = list(LABELS)[:4], [*list(LABELS)[:3], "devices"]
    data = {
        "offered": {name: list(offered[name]) for name in LABELS},
        "routed": _nest([values[n] for n in routed], lambda *c: _plain(*route(*c))),
        "sent": _nest([values[n] for n in costs], lambda *c: [int(x) for x in sent(*c)]),
        "devices": values["devices"],
        "colours": list(palette.DEVICES),
        "start": {name: 0 for name in LABELS} | dict(start or {}),
    }
    said = status(describe(data, data["start"]))
    return Interactive("loads.js", data, STYLE + _controls(data) + _still(data) + said)


def _plain(wanted, kept, slots):
    return [list(map(int, wanted)), list(map(int, kept)), None if slots is None else int(slots)]


def _nest(options, made):
    if not options:
        return made()
    first, *rest = options
    return [_nest(rest, lambda *c, value=value: made(value, *c)) for value in first]


def look(data: Data, choice: Choice) -> Data:
    """All about a choice, as loads.js finds it too."""
    experts, k, capacity, skew, devices = (choice[name] for name in LABELS)
    wanted, kept, slots = data["routed"][experts][k][capacity][skew]
    exchanged, gathered = data["sent"][experts][k][capacity][devices]
    return {
        "wanted": wanted,
        "kept": kept,
        "slots": slots,
        "exchanged": exchanged,
        "gathered": gathered,
        "devices": data["devices"][devices],
    }


def describe(data: Data, choice: Choice) -> str:
    """The result in words; numbers carry names."""
    a = look(data, choice)
    choices, taken = sum(a["wanted"]), sum(a["kept"])
    lost = (1000 * (choices - taken) + choices // 2) // choices
    exchanged = (
        f'<b data-name="exchanged">{a["exchanged"]:,}</b> bytes by an all-to-all there and back, '
        if a["exchanged"]
        else "without a capacity there is no all-to-all of fixed size; "
    )
    less = "all-to-all" if a["exchanged"] and a["exchanged"] < a["gathered"] else "gather"
    return (
        f'<b data-name="choices">{choices:,}</b> choices; the busiest expert has '
        f'<b data-name="busiest">{max(a["wanted"])}</b>, an even share is '
        f"{choices // len(a['wanted'])}. Dropped: "
        f'<b data-name="dropped">{choices - taken}</b> ({lost // 10}.{lost % 10} %). '
        f"A device sends {exchanged}"
        f'<b data-name="gathered">{a["gathered"]:,}</b> bytes by a gather and a scatter: '
        f'<b data-name="less">{less}</b> sends less.'
    )


def picture(data: Data, choice: Choice) -> str:
    """The bars as the inside of an SVG."""
    a = look(data, choice)
    n, slots = len(a["wanted"]), a["slots"]
    most = max(*a["wanted"], slots or 0)
    wide = _WIDE // n
    parts = []
    for i, (wanted, kept) in enumerate(zip(a["wanted"], a["kept"], strict=True)):
        device = i * a["devices"] // n
        x, colour = _LEFT + i * wide, data["colours"][device]
        taken, all_of_it = _HIGH * kept // most, _HIGH * wanted // most
        parts.append(
            f'<rect x="{x}" y="{_FOOT - all_of_it}" width="{wide - 3}" '
            f'height="{all_of_it - taken}" fill="none" stroke="currentColor" '
            f'stroke-dasharray="2 2"></rect><rect x="{x}" y="{_FOOT - taken}" '
            f'width="{wide - 3}" height="{taken}" fill="{colour}"></rect>'
            f'<text x="{x + (wide - 3) // 2}" y="{_FOOT + 15}" text-anchor="middle">{i}</text>'
        )
    if slots is not None:
        y = _FOOT - _HIGH * slots // most
        parts.append(
            f'<path d="M{_LEFT - 4} {y}H{_LEFT + _WIDE}" stroke="currentColor" '
            f'stroke-width="1.5"></path>'
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{slots}</text>'
        )
    return (
        f'<text x="0" y="12">choices by expert; dashed: dropped'
        f"{'' if slots is None else '; line: slots'}</text>"
        f'<path d="M{_LEFT} {_FOOT}H{_LEFT + _WIDE}" stroke="currentColor"></path>'
        f'{"".join(parts)}<text x="{_LEFT + _WIDE}" y="{_FOOT + 31}" text-anchor="end">'
        f"experts; a colour is one of {a['devices']} devices</text>"
    )


def _still(data):
    return (
        f'<div class="pictures"><svg id="@loads" viewBox="0 0 372 206" style="max-width: 32rem" '
        f'role="img" aria-label="A bar for each expert: how many choices it takes, and above it '
        f'those it drops">{picture(data, data["start"])}</svg></div>'
    )


def _controls(data):
    made = [select(n, LABELS[n], data["offered"][n], data["start"][n]) for n in LABELS]
    return controls("".join(made), "choice")
