"""Interactive figures: a still drawn by Python, numbers computed by Python, a little JavaScript."""

import json
import re
import secrets
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

Data = dict[str, Any]  # all that a figure offers; its script reads it as JSON
Choice = dict[str, Any]  # what its controls say

STYLE = """<style>
.shardwise-figure { margin: 1rem 0; line-height: 1.45; }
.shardwise-figure fieldset { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: .5rem 1.1rem; }
.shardwise-figure label { font-size: .88em; display: grid; gap: .15rem; }
.shardwise-figure select, .shardwise-figure input { font: inherit; min-height: 2rem; }
.shardwise-figure .steps, .shardwise-figure .steps div { display: flex; flex-wrap: wrap;
  gap: .5rem; align-items: end; }
.shardwise-figure .steps button { font: inherit; font-size: .88em; min-height: 2rem;
  min-width: 4.2em; }
@media (max-width: 30rem) {
  .shardwise-figure fieldset { display: grid; grid-template-columns: 1fr 1fr; align-items: end; }
  .shardwise-figure .steps, .shardwise-figure .steps label { grid-column: 1 / -1; flex-grow: 1; }
  .shardwise-figure select, .shardwise-figure input[type=range] { width: 100%; min-width: 0; }
}
.shardwise-figure .pictures { display: flex; flex-wrap: wrap; gap: .5rem 2rem;
  margin: .9rem 0 .4rem; overflow-x: auto; }
.shardwise-figure svg { width: 100%; max-width: 21rem; height: auto; fill: currentColor;
  font: 12px system-ui, sans-serif; }
.shardwise-figure .error { border-left: 3px solid #c8504b; padding-left: .7rem;
  overflow-wrap: anywhere; }
</style>"""


class Interactive:
    """A figure that shows itself as HTML, with everything inside it: nothing is fetched.

    `script` is a file of this package that holds one JavaScript function of (root, data, shared),
    where `shared` is what figure.js returns; `still` is the HTML it brings to life, which must make
    sense without it, and in which names that a caller gave are escaped. In `still`, "@name" as
    an id or a name becomes one of this showing alone: a figure may stand on a page many times.
    """

    def __init__(self, script: str, data: Data, still: str) -> None:
        self.script, self.data, self.still = script, data, still

    def _repr_html_(self) -> str:
        root = f"shardwise-{secrets.token_hex(4)}"
        # An escaped name holds no quotation mark, so an "@" in one is never taken for an id.
        still = re.sub(r'((?:id|for|name)=")@', rf"\g<1>{root}-", self.still)
        data = json.dumps(self.data, separators=(",", ":")).replace("<", "\\u003c")
        own, shared = code(self.script), code("figure.js")
        return (
            f'<div id="{root}" class="shardwise-figure">{still}</div>\n'
            f"<script>((root) => ({own})(root, {data}, ({shared})(root)))"
            f'(document.getElementById("{root}"));</script>'
        )


def code(script: str) -> str:
    """The script without indentation and lines of comment: each showing repeats it."""
    lines = files(__package__).joinpath(script).read_text(encoding="utf-8").split("\n")
    return "\n".join(line.strip() for line in lines if not line.strip().startswith("//")).strip()


def select(name: str, label: str, options: Sequence[str], chosen: int) -> str:
    """A labelled choice, with the id "@name"; its value is the number of the option."""
    listed = "".join(
        f'<option value="{i}"{" selected" if i == chosen else ""}>{escape(text)}</option>'
        for i, text in enumerate(options)
    )
    return f'<label for="@{name}">{label}<select id="@{name}">{listed}</select></label>'


def slider(name: str, label: str, last: int, chosen: int) -> str:
    """A labelled range from 0 to `last`, with the id "@name"."""
    return (
        f'<label for="@{name}">{label}<input id="@{name}" type="range" min="0" max="{last}" '
        f'value="{chosen}"></label>'
    )


def steps(label: str, last: int, chosen: int) -> str:
    """The slider "@step" of a run of events, and buttons below; figure.js moves and plays them."""
    buttons = "".join(
        f'<button id="@{name.lower()}" type="button">{name}</button>'
        for name in ("Back", "Play", "Next")
    )
    return f'<div class="steps">{slider("step", label, last, chosen)}<div>{buttons}</div></div>'


def controls(made: str, shows: str) -> str:
    """The controls, off until the script has come; without it the figure `shows` one thing."""
    return (
        f"<noscript><p>Without JavaScript this figure shows one {shows}.</p></noscript>"
        f"<fieldset disabled>{made}</fieldset>"
    )


def status(text: str) -> str:
    """The result in words, read aloud when it changes."""
    return f'<p id="@result" role="status" aria-live="polite">{text}</p>'
