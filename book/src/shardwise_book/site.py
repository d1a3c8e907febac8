"""The look of the site: formulas drawn at build time, the links above each page, its HTML mended.

No page asks for anything from the network. Formulas become MathML, which browsers draw by
themselves; the theme is Sphinx's `basic` with the two templates in `book/_templates`, because
sphinx-book-theme loads 2 MB of scripts and fonts on every page, draws two search fields and
writes to the console. What interactive figures of a page share becomes files.

Mended is what Sphinx, MyST-NB and JAX write that a screen reader stumbles over;
`tests/test_site.py` has axe-core look at every page of the built site. What overflows at some width
only gets its place in the order of tabs from `shardwise.js`.
"""

import hashlib
import itertools
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

from . import reference

log = logging.getLogger(__name__)

# latex2mathml draws a command it does not know as an identifier, and a stray brace likewise.
NOT_DRAWN = re.compile(r"<m[io]>(\\[A-Za-z]*|[&{}]|&amp;)</m[io]>")
ALIGNED = re.compile(r"\\(begin|end)\{(aligned|split|align)\}")

# By file: what the HTML of a page that needs it contains; None where no page does.
NEEDS = {
    "sphinx-design": "sd-",
    "design-tabs": "sd-tab",
    "mystnb": 'class="cell ',
    "pygments": None,  # its colours know one mode; shardwise.css has both
}
NAME = re.compile(r"[\w-]*(?=\.)|$")
# Each piece of source that a cell shows brings all of pygments' colours with it, for one mode.
COLOURS = re.compile(r"<style>pre \{ line-height: 125%; \}.*?</style>", re.DOTALL)

# Names, operators and punctuation have the text's own colour: half of a page with much code.
UNCOLOURED = ("n", "nb", "nn", "o", "p", "w", "default_value", "sig-paren")
# In code each word is told not to break; most could not.
WORD = re.compile(r'<span class="pre">([\w.=*()]+)</span>')
PLAIN = re.compile(rf'<span class="(?:{"|".join(UNCOLOURED)})">([^<]*)</span>')

# Each is (what is written, what it becomes).
MENDS = [
    # Hides the words of the summary from those who have it read to them.
    (re.compile(r'(<summary) aria-label="Toggle hidden content"'), r"\1"),
    # Deprecated by ARIA 1.2, which asks for items in a list.
    (re.compile(r'role="doc-biblioentry"'), 'role="listitem"'),
    # The corner of a table is no header.
    (re.compile(r"<th\b([^>]*)>\s*(?:<p>\s*</p>)?\s*</th>"), r"<td\1></td>"),
    # The lines of a long signature define nothing.
    (re.compile(r'(?s)<dl>(\s*<dd><em class="sig-p.*?)</dl>'), r'<div class="lines">\1</div>'),
    (re.compile(r'<dd>(<em class="sig-param">.*?)</dd>'), r"<div>\1</div>"),
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


def draw(tex: str, display: str) -> tuple[str, str]:
    """(MathML, mistake): the mistake is empty where all of the formula was understood."""
    if tex.replace(r"\{", "").count("{") != tex.replace(r"\}", "").count("}"):
        return "", "its braces do not match; a brace to be shown is \\{ or \\}."
    try:
        # The converter lays out align*, and neither aligned nor a numbered align.
        drawn = convert(ALIGNED.sub(r"\\\1{align*}", tex), display=display)
    except Exception as error:  # it raises a class of its own for each kind of mistake
        return "", f"{type(error).__name__} {error}: check its commands and their arguments."
    if wrong := NOT_DRAWN.search(drawn):
        return drawn, f"{wrong[1]!r} would be shown as it stands: use what latex2mathml knows."
    return drawn, ""


def visit_math(self, node: nodes.math | nodes.math_block) -> None:
    """Writes the node's formula; warns, naming place and formula, where it cannot be drawn."""
    tex, inline = node.astext().strip(), isinstance(node, nodes.math)
    drawn, mistake = draw(tex, "inline" if inline else "block")
    if mistake:
        log.warning("formula %r: %s", tex, mistake, location=node)
    if not inline:
        self.body.append(self.starttag(node, "div", CLASS="math"))
        if node["number"]:
            self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
            self.add_permalink_ref(node, "Link to this equation")
            self.body.append("</span>")
    self.body.append(drawn if inline else f"{drawn}</div>\n")
    raise nodes.SkipNode


def _take_options(app, config):
    """Keeps what Jupyter Book says of the repository; `basic` knows none of its options."""
    options = config.html_theme_options
    config.html_context["repository"] = (options.get("repository_url") or "").rstrip("/")
    config.html_context["branch"] = options.get("repository_branch") or "main"
    config.html_context["colab"] = (options.get("launch_buttons") or {}).get("colab_url") or ""
    config.html_theme_options = {}


def page_links(repository: str, branch: str, colab: str, slug: str) -> list[dict[str, str]]:
    """The links to a chapter's notebook on Colab and to its source; none without an address.

    Colab opens notebooks from GitHub only. A `file:` address is a clone on this machine.
    """
    if not repository:
        return []
    address = urlsplit(repository)
    folder = repository if address.scheme == "file" else f"{repository}/blob/{branch}"
    links = [{"name": "Source", "url": f"{folder}/{slug}.md"}]
    if address.hostname == "github.com":
        notebook = f"{colab}/github{address.path}/blob/{branch}/{slug}.ipynb"
        links.insert(0, {"name": "Colab", "url": notebook})
    return links


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
    """The page's HTML, which reads what figures share from files in `output`, at this `address`."""
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


def _complete(app, pagename, templatename, context, doctree):
    """Gives the templates the page's links and text, and each chapter a notebook to download.
    Extensions load their files on every page: leaves out what this page has no use for.
    """
    body = context.get("body", "")
    for files in ("css_files", "script_files"):
        needs = [NEEDS.get(NAME.search(str(one.filename))[0], "") for one in context[files]]
        wanted = [need is not None and need in body for need in needs]
        context[files] = list(itertools.compress(context[files], wanted))
    context["page_links"] = []
    plain = PLAIN.sub(r"\1", WORD.sub(r"\1", COLOURS.sub("", body)))
    address = context["pathto"](FOLDER, 1)
    context["body"] = lift(mend(plain), Path(app.outdir), address)
    contents = context["toctree"]
    context["toctree"] = lambda **options: mend(contents(**options))
    notebook = Path(app.srcdir, f"{pagename}.ipynb")
    if not pagename.startswith("chapters/") or not notebook.exists():
        return
    (copy := Path(app.outdir, "_downloads", notebook.name)).parent.mkdir(
        parents=True, exist_ok=True
    )
    shutil.copyfile(notebook, copy)
    links = page_links(context["repository"], context["branch"], context["colab"], pagename)
    download = {"name": "Notebook", "url": context["pathto"](f"_downloads/{copy.name}", 1)}
    context["page_links"] = [*links[:-1], download | {"download": True}, *links[-1:]]


def setup(app: Sphinx) -> None:
    # Jupyter Book sets it even where sphinx_comments, which would know it, is not loaded.
    app.add_config_value("comments_config", {}, "")
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("config-inited", _take_options)
    app.connect("html-page-context", _complete)
    reference.setup(app)
