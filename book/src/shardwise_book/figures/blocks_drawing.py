"""How the figure of two products is drawn: matrices in bands, in grey, or piled; and labels."""

from collections.abc import Iterable, Iterator, Mapping

from shardwise_book.figures import palette

_T, _E, _F = 64, 40, 80  # tokens, embed and the hidden width, as drawn
_PILE = 12  # by how much the last of a pile of summands is moved
# left, top, width, height: x twice, up, hidden; then hidden, down, y twice.
_PLACES = (
    (2, 34, _E, _T),
    (102, 34, _E, _T),
    (160, 46, _F, _E),
    (258, 34, _F, _T),
    (2, 160, _F, _T),
    (100, 152, _E, _F),
    (158, 160, _E, _T),
    (276, 160, _E, _T),
)
_NAMES = ("x", "x", "up", "hidden", "hidden", "down", "y", "y")
_LABELS = {"before": (72, 66), "between": (140, 122), "after": (244, 192)}


def matrices(n: int, states: Iterable[str]) -> Iterator[str]:
    """Each matrix on n devices as SVG, in the order of `blocks.states`."""
    for place, name, state in zip(_PLACES, _NAMES, states, strict=True):
        left, top, *_ = place
        text = f'<text x="{left}" y="{top - 6}">{name}</text>'
        yield text + _matrix(n, state, *place)


def _matrix(n, state, left, top, wide, high):
    if state == "whole":
        return _box(left, top, wide, high, "currentColor", ' fill-opacity=".22"')
    if state == "partial":
        step = _PILE / (n - 1)
        return "".join(
            _box(round(left + i * step, 1), round(top + i * step, 1), wide, high, palette.device(i))
            for i in reversed(range(n))
        )
    if state == "columns":
        wide = wide / n
        return "".join(_box(left + i * wide, top, wide, high, palette.device(i)) for i in range(n))
    high = high / n
    return "".join(_box(left, top + i * high, wide, high, palette.device(i)) for i in range(n))


def _box(left, top, wide, high, colour, more=""):
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{wide:g}" height="{high:g}" fill="{colour}" '
        f'stroke="currentColor" stroke-width=".7"{more}></rect>'
    )


def labels(sends: Mapping[str, tuple[str, int]], order: int) -> str:
    """The collectives beside their arrows: none, or crossed where `order` 2 leaves the last out."""
    texts = []
    for place, (x, y) in _LABELS.items():
        kind = sends[place][0] if place in sends else ""
        if place == "between":
            steps = ["relu", kind] if order == 1 or not kind else [kind, "relu"]
            texts.append(f'<text x="{x}" y="{y}">{", then ".join(filter(None, steps))}</text>')
            continue
        missing = order == 2 and place == "after"
        for i, line in enumerate(["left", "out"] if missing else _lines(kind)):
            texts.append(f'<text x="{x}" y="{y - 22 + 13 * i}" text-anchor="middle">{line}</text>')
    return "".join(texts)


def _lines(kind):
    first, _, last = kind.rpartition("-")
    return [f"{first}-", last] if first else [last]


def picture(drawn: str, said: str) -> str:
    """The figure's still: arrows, signs, what is drawn for the choice, and what it says."""
    arrow = 'fill="none" stroke="currentColor" stroke-width="1.3"'
    heads = "".join(
        f'<path d="M{x} {y}h{length}m-5 -4l5 4l-5 4" {arrow}></path>'
        for x, y, length in ((48, 66, 46), (220, 192, 48))
    )
    down = f'<path d="M130 108v22m-4 -5l4 5l4 -5" {arrow}></path>'
    signs = "".join(
        f'<text x="{x}" y="{y}" text-anchor="middle">{sign}</text>'
        for x, y, sign in ((151, 70, "×"), (249, 70, "="), (91, 196, "×"), (149, 196, "="))
    )
    return (
        '<div class="pictures"><svg viewBox="0 0 352 250" style="max-width: 27rem" role="img" '
        'aria-label="Two products of matrices: for each matrix how it lies on the devices, and on '
        f'the arrows the collectives between">{heads}{down}{signs}<g id="@block">{drawn}</g></svg>'
        f'<div style="flex: 1 1 15rem">{said}<p style="font-size: .88em">Grey is whole on every '
        "device. Bands are cut: each device has the band of its colour. A pile is a sum that has "
        "not been taken: every device has a summand.</p></div></div>"
    )
