"""`{observatory}`: what each JAX and its TPU compiler made of the same programs, from one file.

`make observe` writes the file, `book/observatory.json`; a build reads it and compiles nothing.
"""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from packaging.version import Version
from sphinx.util.docutils import SphinxDirective

from .times import table

FILE = Path("book/observatory.json")
# What is told of changes in bytes: from one per cent, and from a tenth of a megabyte.
NOTABLE, LEAST = 0.01, 1e5
_MB = 1e6
_COLOURS = (1, 5, 3, 7, 2, 6)  # of the palette: neighbours differ, in grey too
# What is compared between releases, in the words of the page, with its unit.
_BYTES = {"sent": "sent", "temporaries": "temporaries", "hbm": "HBM"}


class Stack(NamedTuple):
    """One entry of the file: who compiled, when, and what was made of each program, by name.

    `programs` has bytes, collectives by kind and seconds, or why a program `failed`.
    """

    date: str
    chips: str
    versions: dict[str, str]
    programs: dict[str, dict[str, Any]]

    @property
    def jax(self) -> str:
        return self.versions["jax"]


def read(path: Path) -> list[Stack]:
    """The file's entries, the oldest JAX first.

    Raises:
      ValueError: it is no file of ours, or two of its entries are of one JAX.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["stacks"]
        found = [Stack(**{name: one[name] for name in Stack._fields}) for one in told]
        found.sort(key=lambda stack: Version(stack.jax))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}; run `make observe`.") from None
    for before, after in itertools.pairwise(found):
        if before.jax == after.jax:
            raise ValueError(f"{path}: two entries are of JAX {after.jax}; run `make observe`.")
    return found


def names(stacks: list[Stack]) -> list[str]:
    """Of all programs, in the order of the newest stack that has them."""
    return list(dict.fromkeys(name for stack in reversed(stacks) for name in stack.programs))


def row(stack: Stack, name: str) -> list[str]:
    """A program's cells: collectives, of them asynchronous, megabytes, seconds; or why none."""
    found = stack.programs.get(name, {"failed": "not compiled"})
    if "failed" in found:
        return [found["failed"], *[""] * 5]
    kinds = []
    for kind, counted in sorted(found["collectives"].items()):
        loops = f" ({counted['run']} runs)" if counted["run"] != counted["in_program"] else ""
        kinds.append(f"{counted['in_program']} {kind}{loops}")
    runs = sum(counted["asynchronous"] for counted in found["collectives"].values())
    sizes = [found[field] for field in _BYTES]
    sizes = ["not said" if size is None else f"{size / _MB:,.1f}" for size in sizes]
    return [", ".join(kinds) or "none", str(runs), *sizes, f"{found['seconds']:.0f}"]


def changes(before: Stack, after: Stack) -> list[str]:
    """A sentence for each program that is not as it was."""
    told = []
    for name in names([before, after]):
        old, new = before.programs.get(name), after.programs.get(name)
        if old and new and (words := list(_differences(old, new))):
            told.append(f"{name}: {', '.join(words)}.")
    return told


def _differences(old, new):
    if "failed" in old or "failed" in new:
        if ("failed" in old) != ("failed" in new):
            yield "compiles now" if "failed" in old else "is refused now"
        return
    for kind in sorted({*old["collectives"], *new["collectives"]}):
        was, now = (x["collectives"].get(kind, {}).get("in_program", 0) for x in (old, new))
        if was != now:
            yield f"{kind} {was} → {now}"
    for field, word in _BYTES.items():
        was, now = old[field], new[field]
        if None not in (was, now) and abs(now - was) > max(NOTABLE * was, LEAST):
            yield f"{word} {was / _MB:,.1f} → {now / _MB:,.1f} MB"


def drawing(stacks: list[Stack]) -> str:
    """SVG: megabytes sent and temporaries of each program, a bar for each JAX."""
    from .figures import canvas, palette, plots  # where no page asks, nothing is drawn

    programs = names(stacks)
    drawn, panels = canvas(4.4, 1.4 + 2 * len(programs) * (0.12 + 0.07 * len(stacks)), rows=2)
    height = 0.8 / len(stacks)
    for axes, field in zip(panels, ("sent", "temporaries"), strict=True):
        for i, stack in enumerate(stacks):
            values = [stack.programs.get(name, {}).get(field, 0) / _MB for name in programs]
            places = [at + (i - (len(stacks) - 1) / 2) * height for at in range(len(programs))]
            colour = palette.device(_COLOURS[i % len(_COLOURS)])
            axes.barh(places, values, height, label=stack.jax, color=colour, edgecolor=palette.GREY)
        axes.set_yticks(range(len(programs)), programs)
        axes.invert_yaxis()
        axes.set_xlabel(f"{_BYTES[field]}, MB on each chip")
    plots.legend(panels[0], 3, -0.6, title="JAX")
    return drawn._repr_svg_()


class Observatory(SphinxDirective):
    """`{observatory}`: when and with what the file was made; changes, a table, a drawing."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / FILE
        self.env.note_dependency(str(path))
        try:
            stacks = read(path)
        except ValueError as error:
            raise self.error(str(error)) from None
        named = {"jax": "JAX", "jaxlib": "jaxlib", "libtpu": "libtpu", "flax": "Flax"}
        made = [[*(stack.versions[name] for name in named), *stack[:2]] for stack in stacks]
        parts = [table([*named.values(), "made on", "chips"], made, "observed-versions")]
        for before, after in itertools.pairwise(stacks):
            told = changes(before, after) or ["Nothing that is counted here."]
            title = f"From JAX {before.jax} to {after.jax}"
            items = (nodes.list_item("", nodes.paragraph(text, text)) for text in told)
            parts += [nodes.rubric(title, title), nodes.bullet_list("", *items)]
        said = "Bars of megabytes sent, and of temporaries, for each program and release of JAX."
        svg = f'<div class="observatory" role="img" aria-label="{said}">{drawing(stacks)}</div>'
        sizes = [f"{word}, MB" for word in _BYTES.values()]
        header = ["program", "JAX", "collectives", "asynchronous", *sizes, "seconds"]
        rows = [[name, s.jax, *row(s, name)] for name in names(stacks) for s in stacks]
        return [*parts, nodes.raw("", svg, format="html"), table(header, rows, "observed")]
