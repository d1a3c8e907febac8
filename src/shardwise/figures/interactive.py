"""Interactive figures: a still drawn by Python, numbers computed by Python, a little JavaScript."""

import json
import secrets
from importlib.resources import files


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
