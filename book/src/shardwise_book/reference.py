"""The pages of the API: docstrings, and the table of the package's modules.

Docstrings are written as plain text that reads well in an editor; here they become RST. `name` is
code, and so is a value in double quotes, "name"; an indented block after a colon is a list where
its lines start with `word:`, and code otherwise. Sections such as `Raises:` are left to napoleon,
which runs after this.
"""

import ast
import inspect
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc import ClassDocumenter
from sphinx.util.docutils import SphinxDirective

from . import failures
from .times import link, table

SECTION = re.compile(r"(Raises|Returns|Yields|Args|Attributes|Example|Note):$")
DEFAULTS = (
    (r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1"),
    (r"<function (\w+)>", r"\1"),
    (r"([\w.]+) = <factory>", r"\1 = \1()"),
)
ITEM = re.compile(r"(\s+)([\w, ]+):\s+(.*)")
CODE = re.compile(r'``.+?``|(?<!`)`([^`]+)`(?!`)|(?<![\w"])("(?! )[^"`]*(?<! )")(?![\w"])')


def to_rst(lines: Sequence[str]) -> list[str]:
    """The lines of one docstring, in place of which Sphinx reads what is returned."""
    out, block, previous = [], None, ""  # block: what the lines are in, such as "list" or "code"
    margin = 0  # of a list: where the text after a bullet begins
    for line in lines:
        indented, item = line.startswith(" ") and line.strip(), ITEM.match(line)
        if line.strip() and not indented:
            kinds = {"section": SECTION.match(line), "bullets": line.startswith("- ")}
            block = next((kind for kind, found in kinds.items() if found), None)
        elif indented and block is None and not previous.endswith("::"):
            block = "list" if item else "code" if previous.endswith(":") else None
            while block == "code" and out and not out[-1].strip():
                out.pop()
            if block == "code":
                out[-1:] = [out[-1] + ":", ""]
            elif item:
                margin = len(item[1]) + 2
                out += [""] * bool(out and out[-1].strip())
        if block == "list" and item and len(item[1]) + 2 == margin:
            out.append(f"{item[1]}- ``{item[2]}``: {_code(item[3])}")
        elif block == "list" and indented:
            out.append(" " * margin + _code(line.strip()))
        else:
            out.append(line if block == "code" else _code(line))
        previous = line.strip() or previous
    return out


def _code(line):
    def literal(found):
        if not (inside := found[1] or found[2]):
            return found[0]
        around = line[: found.start()][-1:], line[found.end() :][:1]
        before, after = ("\\ " * _is_glued(character) for character in around)
        return f"{before}``{inside}``{after}"

    return CODE.sub(literal, line)


def _is_glued(character):
    """Whether RST takes no code beside this character, as in `a`×`b`."""
    return bool(character.strip()) and not unicodedata.category(character).startswith("P")


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # a comment: napoleon takes words before a first colon for a type


def _signature(app, what, name, obj, options, args, returned):
    """(arguments, what is returned), with a dataclass's defaults as one writes them."""
    for told, written in DEFAULTS if args else ():
        args = re.sub(told, written, args)
    return args, returned


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """A named tuple's fields, of which Python itself says only their number."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


class Renamed(ClassDocumenter):
    """Shows a class under the name by which a module offers it, as `context.ring`, no alias."""

    def import_object(self, raiseerror: bool = False) -> bool:
        found = super().import_object(raiseerror)
        self.doc_as_attr = found and self.doc_as_attr and not inspect.isclass(self.object)
        return found


class ModuleTable(SphinxDirective):
    """`{module-table}`: every module, linked where a page of the book has a section for it."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it shows what stands in the package, so it is never up to date
        pages = "".join(path.read_text() for path in Path(self.env.srcdir, "book").glob("api*.md"))
        rows = []
        for name, text in modules(Path(self.env.srcdir, "src/shardwise")).items():
            words, label = nodes.literal(name, name), f"api-{name}"
            linked = link("ref", label, words) if f"({label})=" in pages else words
            rows.append([linked, nodes.inline("", "", *failures.inline(text))])
        return [table(["Module", "What it has"], rows, "modules")]


def modules(package: Path) -> dict[str, str]:
    """{name: first line of its docstring}, in the order of names; what is private left out."""
    found = {}
    for path in [*package.glob("[!_]*.py"), *package.glob("[!_]*/__init__.py")]:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.parent.name if path.stem == "__init__" else path.stem] = text.split("\n")[0]
    return dict(sorted(found.items()))


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", convert, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", skip)
    app.add_autodocumenter(Renamed, override=True)
    app.add_directive("module-table", ModuleTable)
