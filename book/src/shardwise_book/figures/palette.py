"""One palette for the whole book: eight device colours, and a style for light and dark pages."""

from contextlib import AbstractContextManager

import matplotlib
from matplotlib.colors import to_rgb

# Lightness (CIE L*) rises in even steps from 30 to 90, so that neighbours differ in grey too.
DEVICES = (
    "#5b2d94",
    "#2656b5",
    "#c14457",
    "#008fc6",
    "#0db181",
    "#fe996b",
    "#01e2d9",
    "#ffe16e",
)

# Of middle lightness, so at least 3:1 on white and on near-black; dashes tell them apart in grey.
LINES = ("#3a7bc8", "#c8504b", "#3a9a6b", "#8a63b8")
DASHES = ("-", "--", "-.", ":")
# The fifth line has the first one's colour in other dashes, and so on: no two look alike.
STYLES = [(LINES[i], DASHES[(i + again) % 4]) for again in range(4) for i in range(4)]

GREY = "#7a7a7a"  # text and axes: more than 4:1 on white and on near-black

STYLE = {
    **dict.fromkeys(["figure.facecolor", "savefig.facecolor", "axes.facecolor"], "none"),
    **dict.fromkeys(["axes.edgecolor", "axes.labelcolor", "axes.titlecolor"], GREY),
    **dict.fromkeys(["text.color", "xtick.color", "ytick.color"], GREY),
    **dict.fromkeys(["axes.spines.top", "axes.spines.right"], False),
    "axes.titlesize": 10,
    "axes.prop_cycle": matplotlib.cycler(color=LINES, linestyle=DASHES),
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure on every machine
    "font.size": 10,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "svg.hashsalt": "shardwise",  # otherwise the same figure differs from build to build
}


def device(index: int) -> str:
    """The colour of a device: `index` is its place in `mesh.devices()`; from the ninth, again."""
    return DEVICES[index % len(DEVICES)]


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    return max("#ffffff", "#000000", key=lambda text: contrast(text, colour))


def luminance(colour: str) -> float:
    """Relative luminance of a colour in [0, 1], as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21, as WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def style() -> AbstractContextManager[None]:
    """A context in which matplotlib draws in the book's style: `with figures.style(): ...`."""
    return matplotlib.rc_context(STYLE)
