"""What becomes of a page's HTML: mended, and freed of what the site has as files.

Mended is what Sphinx, MyST-NB and JAX write that a screen reader stumbles over;
`tests/test_site.py` has axe-core look at every page of the built site. What overflows at some width
only gets its place in the order of tabs from `shardwise.js`. Files of the site are scripts and
styles of interactive figures: a notebook's figure brings all it needs with it; of a page with
several, each would be there again.
"""

import hashlib
import re
from pathlib import Path

# Each is (what is written, what it becomes).
MENDS = [
    # Hides the words of the summary from those who have it read to them.
    (re.compile(r'(<summary) aria-label="Toggle hidden content"'), r"\1"),
    # Deprecated by ARIA 1.2, which asks for items in a list.
    (re.compile(r'role="doc-biblioentry"'), 'role="listitem"'),
    # The corner of a table is no header.
    (re.compile(r"<th\b([^>]*)>\s*(?:<p>\s*</p>)?\s*</th>"), r"<td\1></td>"),
    # A heading has a level.
    (re.compile(r'(<p class="caption") role="heading"'), r'\1 role="heading" aria-level="2"'),
]
# jax.debug.visualize_array_sharding, drawn by rich: white text, whatever lies behind it.
PAINTED = re.compile(
    r'style="color: #\w+; (?:text-decoration-color: #\w+; )?background-color: (#\w{6})"'
)
FOLDER = "_static/figures"
SHARED = re.compile(r"(?s)<(style|script)>\s*((?:\.shardwise-|\(globalThis\.shardwise ).*?)</\1>")
LINKS = {"css": '<link rel="stylesheet" href="{}"/>', "js": '<script src="{}"></script>'}


def mend(html: str) -> str:
    """The HTML with every such place mended."""
    for pattern, replacement in MENDS:
        html = pattern.sub(replacement, html)
    if not PAINTED.search(html):
        return html
    from .figures import palette  # JAX comes with it, which a page of prose can do without

    painted = 'style="color: {}; background-color: {}"'
    return PAINTED.sub(lambda found: painted.format(palette.ink(found[1]), found[1]), html)


def lift(html: str, output: Path, address: str) -> str:
    """The page's HTML, which reads from files in `output` what the book's figures share.

    `address` leads from the page to FOLDER in `output`.
    """
    folder, linked = output / FOLDER, set()

    def lifted(match):
        ending = "css" if match[1] == "style" else "js"
        name = f"{hashlib.sha256(match[2].encode()).hexdigest()[:12]}.{ending}"
        link = "" if name in linked else LINKS[ending].format(f"{address}/{name}")
        linked.add(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(match[2], encoding="utf-8")
        return link

    return SHARED.sub(lifted, html)
