"""Interactive figures: a still drawn by Python, numbers computed by Python, a little JavaScript."""

import json
import secrets
from html import escape
from importlib.resources import files

STYLE = """<style>
.shardwise-figure { margin: 1rem 0; line-height: 1.45; }
.shardwise-figure fieldset { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: .5rem 1.1rem; }
.shardwise-figure label { font-size: .88em; display: grid; gap: .15rem; }
.shardwise-figure select, .shardwise-figure input { font: inherit; min-height: 2rem; }
.shardwise-figure .pictures { display: flex; flex-wrap: wrap; gap: .5rem 2rem;
  margin: .9rem 0 .4rem; }
.shardwise-figure svg { width: 100%; max-width: 21rem; height: auto; fill: currentColor;
  font: 12px system-ui, sans-serif; }
.shardwise-figure .error { border-left: 3px solid #c8504b; padding-left: .7rem;
  overflow-wrap: anywhere; }
</style>"""


class Interactive:
    """A figure that shows itself as HTML, with everything inside it: nothing is fetched.

    `script` is a file of this package that holds one JavaScript function of (root, data); `still`
    is the HTML it brings to life, which must make sense without it. In `still`, "@" before a name
    makes an id of this showing alone, so that one figure may stand on a page many times.
    """

    def __init__(self, script, data, still):
        self.script, self.data, self.still = script, data, still

    def _repr_html_(self):
        root = f"shardwise-{secrets.token_hex(4)}"
        code = files(__package__).joinpath(self.script).read_text(encoding="utf-8").strip()
        data = json.dumps(self.data, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<div id="{root}" class="shardwise-figure">{self.still.replace("@", root + "-")}</div>'
            f'\n<script>({code})(document.getElementById("{root}"), {data});</script>'
        )


def select(name, label, options, chosen):
    """A labelled choice, with the id "@name"; its value is the number of the option."""
    listed = "".join(
        f'<option value="{i}"{" selected" if i == chosen else ""}>{escape(text)}</option>'
        for i, text in enumerate(options)
    )
    return f'<label for="@{name}">{label}<select id="@{name}">{listed}</select></label>'
