"""What explorers draw with: pictures, rectangles and words, as SVG."""

from collections.abc import Iterable
from html import escape
from typing import Any

from shardwise_book.figures import palette

EDGE = 'stroke="currentColor"'
COLOURS = "".join(
    f"--device-{i}:{colour};--ink-{i}:{palette.ink(colour)};"
    for i, colour in enumerate(palette.DEVICES)
)


def device(index: int) -> str:
    """A device's colour by a name that its number alone tells apart: that packs well."""
    return f"var(--device-{index % len(palette.DEVICES)})"


def ink(index: int) -> str:
    """The colour of words on a device's."""
    return f"var(--ink-{index % len(palette.DEVICES)})"


def picture(
    name: str, wide: float, high: float, alt: str, inside: str = "", rem: float = 21
) -> str:
    """A picture of so many units, at most `rem` wide; with a `name` it is a part, to be filled."""
    part = f'id="@{name}" ' if name else ""
    return (
        f'<svg {part}viewBox="0 0 {wide:g} {high:g}" style="max-width: {rem:g}rem" role="img" '
        f'aria-label="{escape(alt)}">{inside}</svg>'
    )


def box(x: float, y: float, wide: float, high: float, fill: str = "none", more: str = EDGE) -> str:
    """A rectangle of a picture: in one colour, or outlined in that of the text."""
    place = f'x="{short(x)}" y="{short(y)}" width="{short(wide)}" height="{short(high)}"'
    return f'<rect {place} fill="{fill}" {more}/>'


def line(course: str, more: str = "") -> str:
    """A line in the colour of the text, along what a path's `d` says."""
    return f'<path d="{course}" fill="none" {EDGE} {more}/>'


def path(boxes: Iterable[tuple[float, ...]], fill: str = "none", more: str = EDGE) -> str:
    """Many rectangles as one shape, each (left, top, width, height)."""
    drawn = (
        f"M{short(x)} {short(y)}h{short(wide)}v{short(high)}h-{short(wide)}z"
        for x, y, wide, high in boxes
    )
    return f'<path d="{"".join(drawn)}" fill="{fill}" {more}/>'


def text(x: float, y: float, words: Any, anchor: str = "", more: str = "") -> str:
    """Words in a picture, escaped; `anchor` is "middle" or "end"."""
    place = f'x="{short(x)}" y="{short(y)}"' + (f' text-anchor="{anchor}"' if anchor else "")
    return f"<text {place} {more}>{escape(str(words))}</text>"


def short(x: float, decimals: int = 2) -> str:
    """A number in as few digits, at most so many of them decimals."""
    return f"{x:.{decimals}f}".rstrip("0").rstrip(".") if x % 1 else f"{x:.0f}"
