"""Mends, in a page's HTML, what Sphinx, MyST-NB and JAX write that a screen reader stumbles over.

`tests/test_site.py` has axe-core look at every page of the built site. What overflows at
some width only gets its place in the order of tabs from `shardwise.js`.
"""

import re

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


def mend(html: str) -> str:
    """The HTML with every such place mended."""
    for pattern, replacement in MENDS:
        html = pattern.sub(replacement, html)
    if not PAINTED.search(html):
        return html
    from .figures import palette  # JAX comes with it, which a page of prose can do without

    painted = 'style="color: {}; background-color: {}"'
    return PAINTED.sub(lambda found: painted.format(palette.ink(found[1]), found[1]), html)
