"""Interactive figures: Python draws every state, and one small script shows the chosen one."""

import base64
import functools
import inspect
import itertools
import json
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
            f'<div id="{root}" class="shardwise-figure"><style>{style}</style>{still}</div>\n'
            f'<script>(globalThis.shardwise ??= {{}})["{self.script}"] = {code(self.script)};\n'
            f'</script><script>shardwise["{self.script}"]'
            f'(document.getElementById("{root}"), {data});</script>'
        )


def code(name: str) -> str:
    """A file of this package without indentation and lines of comment: each showing repeats it."""
    lines = files(__package__).joinpath(name).read_text(encoding="utf-8").split("\n")
    return "\n".join(line.strip() for line in lines if line.strip()[:2] not in ("//", "/*")).strip()


class Control(NamedTuple):
    """A control of an explorer.

    `options` maps what each option is called to its value; a list has values that are called what
    they are. Where they depend on the controls before it, a function makes them, whose parameters
    are as those of `explorer`'s functions. `kind` is "select", "range" for a slider, or "steps" for
    one with buttons, of which a figure has one, called "step".
    """

    label: str
    options: Mapping[str, Any] | Sequence[Any] | Callable[..., Mapping[str, Any] | Sequence[Any]]
    kind: str = "select"


class Refusal(str):
    """Why there is nothing to draw, in words, where a function of an explorer returns it.

    Functions that would get it are not called; of their elements "result" shows it.
    """


def explorer(
    controls: Mapping[str, Control],
    layout: str,
    *functions: Callable,
    start: Mapping[str, int] | None = None,
    shows: str = "choice",
    fixed: Mapping[str, Any] | None = None,
    **more: Callable,
) -> Interactive:
    """An explorer: each function draws the inside of the element with its name in `layout`.

    It returns that, or yields pieces of it. Its parameters are the names of the controls that it
    depends on (`**` stands for all), whose values it gets, and of other functions, whose results it
    gets. One that `layout` has no element for makes what others draw; but "result" then stands
    below. Each is called once for all choices that are the same to it, and player.js shows what was
    drawn. An underscore before a name is no part of it; `more` has functions under other names, and
    `fixed` values that no control changes. `start` has the number of the option that a control is
    first at, 0 where it is left out. Without the script the figure `shows` one thing: this.

    Raises:
      ValueError: a control starts at an option that it has not, or nothing shows what a function
        makes.
    """
    named = {function.__name__.lstrip("_"): function for function in functions} | more
    layout += RESULT if "result" in named and 'id="@result"' not in layout else ""
    states = _States(controls, named, fixed or {})
    parts = states.parts(layout)
    given: dict[str, Any] = {}
    drawn = ""
    for name, control in controls.items():
        options, chosen = states.options(name, given), (start or {}).get(name, 0)
        if chosen not in range(len(options)):
            raise ValueError(
                f"{control.label} starts at option {chosen!r}; on offer are 0 to "
                f"{len(options) - 1}: {', '.join(options)}."
            )
        drawn += _control(name, control, list(options), chosen)
        given[name] = list(options.values())[chosen]
    first = {name: states.text(name, given) for name in parts}
    inside = re.sub(r'id="@(\w+)"[^>]*>', lambda tag: tag[0] + first.get(tag[1], ""), layout)
    still = (
        f"<noscript><p>Without JavaScript this figure shows one {shows}.</p></noscript>"
        f"<fieldset disabled>{drawn}</fieldset>{inside}"
    )
    return Interactive("player.js", states.packed(parts), still)


class _States:
    """What functions make of all that controls can say."""

    def __init__(self, controls, made, fixed):
        self.controls, self.made, self.fixed, self.known = controls, made, fixed, {}
        self.asks, self.keys = functools.cache(self._asks), functools.cache(self._keys)

    def _asks(self, function):
        """The names of its parameters."""
        found = inspect.signature(function).parameters.values()
        every = any(one.kind is one.VAR_KEYWORD for one in found)
        return list(self.controls) if every else [one.name for one in found]

    def _keys(self, function):
        """The names of the controls that it depends on."""
        asked = self.asks(function)
        needed = {*asked}.union(*(self.keys(self.made[n]) for n in asked if n in self.made))
        return [name for name in self.controls if name in needed]

    def parts(self, layout):
        """The functions that draw elements of the layout, by name."""
        shown = {name: made for name, made in self.made.items() if f'id="@{name}"' in layout}
        askers = [*self.made.values(), *(one.options for one in self.controls.values())]
        asked = {name for one in filter(callable, askers) for name in self.asks(one)}
        if lost := [name for name in self.made if name not in shown and name not in asked]:
            raise ValueError(
                f"explorer: nothing shows what {lost[0]!r} makes: the layout has no element with "
                f'id="@{lost[0]}", and no other function asks for it.'
            )
        return shown

    def call(self, function, given):
        """What it makes of values of controls."""
        choice = function, *(given[key] for key in self.keys(function))
        if choice not in self.known:
            made = {n: self.made.get(n) for n in self.asks(function)}
            values = self.fixed | given
            asked = {n: self.call(f, given) if f else values[n] for n, f in made.items()}
            refusals = [one for one in asked.values() if isinstance(one, Refusal)]
            found = refusals[0] if refusals else function(**asked)
            self.known[choice] = "".join(found) if inspect.isgenerator(found) else found
        return self.known[choice]

    def text(self, name, given):
        """What an element shows."""
        found = self.call(self.made[name], given)
        told = f'<span class="error">{escape(found)}</span>' if name == "result" else ""
        return told if isinstance(found, Refusal) else found

    def options(self, name, given):
        """A control's options, by name."""
        told = self.controls[name].options
        told = self.call(told, given) if callable(told) else told
        told = range(1) if isinstance(told, Refusal) else told
        return dict(told) if isinstance(told, Mapping) else {str(value): value for value in told}

    def packed(self, parts):
        """All states, deflated: each text once, and tables of their numbers, where 0 is the next.

        Texts that differ in numbers alone are one template, and a column for each of its numbers:
        they deflate to about half, since a number says nothing of what stands beside it.
        """
        texts: dict[str, int] = {}

        def drawn(name, given):
            text = self.text(name, given)
            return texts.get(text) or texts.setdefault(text, len(texts) + 1) * 0

        def offered(name, given):
            return list(self.options(name, given))

        def table(keys, entry, name, given):
            if not keys:
                return entry(name, given)
            values = self.options(keys[0], given).values()
            return [table(keys[1:], entry, name, given | {keys[0]: value}) for value in values]

        def keyed(function, *entry):
            keys = self.keys(function) if callable(function) else []
            return {"keys": keys, "table": table(keys, *entry, {})}

        controls = {n: keyed(one.options, offered, n) for n, one in self.controls.items()}
        shown = {name: keyed(draw, drawn, name) for name, draw in parts.items()}
        split = [re.split(r"(\d+(?:\.\d+)?)", text) for text in texts]  # each second is a number
        rows: dict[tuple[str, ...], list] = {}
        for pieces in split:
            rows.setdefault(tuple(pieces[::2]), []).append(pieces[1::2])
        numbers = {pieces: number for number, pieces in enumerate(rows)}
        order = [numbers[tuple(pieces[::2])] for pieces in split]
        columns = [[t, *map(" ".join, zip(*found, strict=True))] for t, found in rows.items()]
        data = {"controls": controls, "parts": shown, "order": order, "templates": columns}
        packed = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        return base64.b64encode(zlib.compress(packed.encode(), 9)).decode()


def axes(
    found: Mapping[tuple, Any], figure: str, options: Sequence[Iterable] | None = None
) -> list[list]:
    """The `options` along each axis of a table that has all their combinations, in their order.

    Without them, those that the table has. ValueError names the `figure`, and what is missing.
    """
    seen = (dict.fromkeys(values) for values in zip(*found, strict=True))
    options = [list(values) for values in options or seen]
    if missing := [place for place in itertools.product(*options) if place not in found]:
        raise ValueError(f"figures.{figure}: all combinations are needed; none for {missing[0]}.")
    return options


def _control(name, control, options, chosen):
    """A labelled control with the id "@name"."""
    listed = "".join(
        f'<option value="{i}"{" selected" * (i == chosen)}>{escape(text)}</option>'
        for i, text in enumerate(options)
    )
    slider = f'<input id="@{name}" type="range" min="0" max="{len(options) - 1}" value="{chosen}">'
    made = f'<select id="@{name}">{listed}</select>' if control.kind == "select" else slider
    made = f'<label for="@{name}">{escape(control.label)}{made}</label>'
    button = '<button id="@{}" type="button">{}</button>'
    buttons = "".join(button.format(word.lower(), word) for word in ("Back", "Play", "Next"))
    steps = f'<div class="steps">{made}<div>{buttons}</div></div>'
    return steps if control.kind == "steps" else made


def said(name: str, value: Any) -> str:
    """A number or word of the result, in bold, which carries a name."""
    shown = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<b data-name="{name}">{shown}</b>'
