"""The table of the package's modules: each one's first line, and a link to what it has."""

import ast
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from .docstrings import CODE
from .times import table


class ModuleTable(SphinxDirective):
    """`{module-table}`: every module, linked where a page of the book has a section for it."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it shows what stands in the package, so it is never up to date
        pages = "".join(path.read_text() for path in Path(self.env.srcdir, "book").glob("api*.md"))
        found = modules(Path(self.env.srcdir, "src/shardwise"))
        rows = [[_link(name, pages), _line(text)] for name, text in found.items()]
        return [table(["Module", "What it has"], rows, "modules")]


def modules(package: Path) -> dict[str, str]:
    """{name: first line of its docstring}, in the order of names; what is private left out."""
    paths = [*package.glob("[!_]*.py"), *package.glob("[!_]*/__init__.py")]
    found = {}
    for path in paths:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.parent.name if path.stem == "__init__" else path.stem] = text.split("\n")[0]
    return dict(sorted(found.items()))


def _link(name, pages):
    label = f"api-{name}"
    if f"({label})=" not in pages:
        return nodes.literal(name, name)
    about = {"refdomain": "std", "reftype": "ref", "refexplicit": True, "refwarn": True}
    reference = addnodes.pending_xref("", reftarget=label, **about)
    reference += nodes.literal(name, name)
    return reference


def _line(text):
    line = nodes.inline()
    for index, part in enumerate(CODE.split(text)):
        line += nodes.literal(part, part) if index % 2 else nodes.Text(part)
    return line


def setup(app: Sphinx) -> None:
    app.add_directive("module-table", ModuleTable)
