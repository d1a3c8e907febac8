"""Interactive figures: Python draws every state, and one small script shows the chosen one."""

import base64
import inspect
import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from shardwise_book.figures import svg

RESULT = '<p id="@result" role="status" aria-live="polite"></p>'  # read aloud when it changes


class Interactive:
    """A figure that shows itself as HTML, with everything inside it: nothing is fetched.

    `script` is a file of this package that holds one JavaScript function of (root, data); `still`
    is the HTML it brings to life, which must make sense without it, and in which names that a
    caller gave are escaped. In `still`, "@name" as an id or a name becomes one of this showing
    alone: a figure may stand on a page many times.
    """

    def __init__(self, script: str, data: Any, still: str) -> None:
        self.script, self.data, self.still = script, data, still

    def _repr_html_(self) -> str:
        root = f"shardwise-{secrets.token_hex(4)}"
        # An escaped name holds no quotation mark, so an "@" in one is never taken for an id.
        still = re.sub(r'((?:id|for|name)="|<style>#)@', rf"\g<1>{root}-", self.still)
        style = f".shardwise-figure {{{svg.COLOURS}}}\n" + code("interactive.css")
        data = json.dumps(self.data, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<div id="{root}" class="shardwise-figure"><style>{style}</style>'
            f"{still}</div>\n"
            f"<script>((root) => ({code(self.script)})(root, {data}))"
            f'(document.getElementById("{root}"));</script>'
        )


def code(name: str) -> str:
    """A file of this package without indentation and lines of comment: each showing repeats it."""
    lines = files(__package__).joinpath(name).read_text(encoding="utf-8").split("\n")
    return "\n".join(line.strip() for line in lines if line.strip()[:2] not in ("//", "/*")).strip()


class Control(NamedTuple):
    """A control of an explorer.

    `options` maps what each option is called to its value; a list has values that are called what
    they are. Where they depend on the controls before it, a function makes them, whose parameters
    are as those of `explorer`'s parts. `kind` is "select", "range" for a slider, or "steps" for a
    slider with buttons, of which a figure has one, called "step".
    """

    label: str
    options: Mapping[str, Any] | Sequence[Any] | Callable[..., Mapping[str, Any] | Sequence[Any]]
    kind: str = "select"


def explorer(
    controls: Mapping[str, Control],
    layout: str,
    parts: Mapping[str, Callable[..., str]],
    start: Mapping[str, int] | None = None,
    shows: str = "choice",
    made: Mapping[str, Callable] | None = None,
) -> Interactive:
    """An explorer: `parts` maps ids of elements in `layout` to functions that draw their inside.

    The parameters of such a function are the names of the controls that it depends on (`**` stands
    for all), whose values it gets, and names of what is `made` of such values: by functions with
    parameters of the same kind, each called once for all that have the same. A part is drawn for
    everything that its controls can say; player.js shows what was drawn. `start` has the number of
    the option that a control is first at, 0 where it is left out. Without the script the figure
    `shows` one thing: this.

    Raises:
      ValueError: a control starts at an option that it has not.
    """
    bound: dict[str, _Bound] = {}
    for name, make in (made or {}).items():
        bound[name] = _once(_bind(make, controls, bound))
    offers = {name: _offer(control.options, controls, bound) for name, control in controls.items()}
    draws = {name: _bind(draw, controls, bound) for name, draw in parts.items()}
    given: dict[str, Any] = {}
    drawn = ""
    for name, control in controls.items():
        options, chosen = offers[name].call(given), (start or {}).get(name, 0)
        if chosen not in range(len(options)):
            raise ValueError(
                f"{control.label} starts at option {chosen!r}; on offer are 0 to "
                f"{len(options) - 1}: {', '.join(options)}."
            )
        drawn += _control(name, control, list(options), chosen)
        given[name] = list(options.values())[chosen]
    first = {name: draw.call(given) for name, draw in draws.items()}
    inside = re.sub(r'id="@(\w+)"[^>]*>', lambda tag: tag[0] + first.get(tag[1], ""), layout)
    still = (
        f"<noscript><p>Without JavaScript this figure shows one {shows}.</p></noscript>"
        f"<fieldset disabled>{drawn}</fieldset>{inside}"
    )
    return Interactive("player.js", _packed(offers, draws), still)


class _Bound(NamedTuple):
    """A function of the values of all controls, and the names of those that it depends on."""

    keys: list[str]
    call: Callable[[Mapping[str, Any]], Any]


def _bind(function, controls, made):
    found = inspect.signature(function).parameters.values()
    every = any(one.kind is one.VAR_KEYWORD for one in found)
    names = list(controls) if every else [one.name for one in found]
    needed = {key for name in names for key in (made[name].keys if name in made else [name])}

    def call(given):
        return function(**{n: made[n].call(given) if n in made else given[n] for n in names})

    return _Bound([name for name in controls if name in needed], call)


def _once(bound):
    known: dict[tuple, Any] = {}

    def call(given):
        choice = tuple(given[key] for key in bound.keys)
        if choice not in known:
            known[choice] = bound.call(given)
        return known[choice]

    return _Bound(bound.keys, call)


def _offer(options, controls, made):
    """A control's options, by name."""
    found = _bind(options if callable(options) else lambda: options, controls, made)

    def call(given):
        told = found.call(given)
        return dict(told) if isinstance(told, Mapping) else {str(value): value for value in told}

    return _Bound(found.keys, call)


def _packed(offers, draws):
    """All states, deflated: each text once, and tables of their numbers, in which 0 is the next.

    Texts that differ in numbers alone are one template, and a column for each of its numbers: they
    deflate to about half, since a number says nothing of what stands beside it.
    """
    texts: dict[str, int] = {}

    def shared(text):
        return texts.get(text) or texts.setdefault(text, len(texts) + 1) * 0

    def table(bound, form, given):
        left = [key for key in bound.keys if key not in given]
        if not left:
            return form(bound.call(given))
        values = offers[left[0]].call(given).values()
        return [table(bound, form, given | {left[0]: value}) for value in values]

    def keyed(bound, form):
        return {"keys": bound.keys, "table": table(bound, form, {})}

    offered = {name: keyed(offer, list) for name, offer in offers.items()}
    drawn = {name: keyed(draw, shared) for name, draw in draws.items()}
    templates: dict[tuple[str, ...], tuple[int, list]] = {}
    order = []
    for text in texts:
        pieces = re.split(r"(\d+(?:\.\d+)?)", text)  # each second one is a number
        number, rows = templates.setdefault(tuple(pieces[::2]), (len(templates), []))
        rows.append(pieces[1::2])
        order.append(number)
    columns = [
        [pieces, *map(" ".join, zip(*rows, strict=True))] for pieces, (_, rows) in templates.items()
    ]
    data = {"controls": offered, "parts": drawn, "order": order, "templates": columns}
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(packed.encode(), 9)).decode()


def _control(name, control, options, chosen):
    """A labelled control with the id "@name"."""
    label = f'<label for="@{name}">{escape(control.label)}'
    if control.kind == "select":
        listed = "".join(
            f'<option value="{i}"{" selected" * (i == chosen)}>{escape(text)}</option>'
            for i, text in enumerate(options)
        )
        return f'{label}<select id="@{name}">{listed}</select></label>'
    made = (
        f'{label}<input id="@{name}" type="range" min="0" max="{len(options) - 1}" '
        f'value="{chosen}"></label>'
    )
    if control.kind == "range":
        return made
    buttons = "".join(
        f'<button id="@{name.lower()}" type="button">{name}</button>'
        for name in ("Back", "Play", "Next")
    )
    return f'<div class="steps">{made}<div>{buttons}</div></div>'


def said(name: str, value: Any) -> str:
    """A number or word of the result, in bold, which carries a name."""
    shown = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<b data-name="{name}">{shown}</b>'
