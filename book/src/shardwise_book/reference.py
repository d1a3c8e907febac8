"""The pages of the API: docstrings, signatures, and the table of the package's modules.

Docstrings are written as plain text that reads well in an editor; here they become RST. `name` is
code, and so is a value in double quotes, "name"; an indented block after a colon is a list where
its lines start with `word:`, and code otherwise. Sections such as `Raises:` are left to napoleon,
which runs after this. Signatures show the types in them, by names that readers can import.
"""

import ast
import dataclasses
import html
import inspect
import re
import types
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc import AttributeDocumenter, ClassDocumenter, PropertyDocumenter
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import object_description
from sphinx.util.typing import stringify_annotation

from . import failures
from .times import link, table

SECTION = re.compile(r"(Raises|Returns|Yields|Args|Attributes|Example|Note):$")
LONGEST = "python_maximum_signature_line_length"  # above it, each parameter has a line
PUBLIC = (  # what annotations become: without modules, then as readers write it
    (r"~?jax\.[\w.]*\bArray\b", "JaxArray"),
    (r"~shardwise\.costs\.arrays\.(Roles)", r"plan.\1"),  # of names that two rooms have
    (r"~shardwise\.\w+\.(\w+\.Sent)", r"\1"),
    (r"~?\b(?!(?:plan|forms|ledger)\.)[a-z_][\w.]*\.(?=\w)", ""),
    (r"Callable\[\[\.\.\.\], (Any\])?", lambda found: "Callable" if found[1] else "Callable[..., "),
    (r"JaxArray \| ndarray \| [\w |]+ \| complex", "ArrayLike"),
    (r"\bJaxArray\b", "jax.Array"),
    (r"\bndarray\b", "np.ndarray"),
    (r"\bdtype\b", "np.dtype"),
    (r"\bP\b", "PartitionSpec"),
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


class _Text(str):
    """A text that is its own repr, as `inspect.Signature` prints it."""

    __repr__ = str.__str__


def signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, args: str, returned: str
) -> tuple[str, str] | None:
    """(arguments, what is returned), with types; None where Sphinx's own, or a page's, stay."""
    try:
        found = inspect.signature(obj) if args else None
    except (TypeError, ValueError):  # of an exception that takes any arguments
        return None
    given = [p for p in found.parameters.values() if p.name != "self"] if found else []
    if found is None or (what == "class" and given and given[0].name == "args"):
        return None
    fields = getattr(obj, "__dataclass_fields__", {})
    for i, p in enumerate(given):
        default = p.default
        if repr(default) == "<factory>":
            default = fields[p.name].default_factory()
        default = default if default is p.empty else _Text(default_text(default))
        given[i] = p.replace(annotation=_shown(p.annotation), default=default)
    written = str(inspect.Signature(given))
    is_context = inspect.isgeneratorfunction(inspect.unwrap(obj))  # of contextlib's decorator
    told = _shown(p.empty if what == "class" or is_context else found.return_annotation)
    return written, "" if told is inspect.Signature.empty else told


def _shown(annotation):
    """The text of an annotation; none for those that tell nothing."""
    if annotation in (inspect.Signature.empty, Any, None):
        return inspect.Signature.empty
    text = stringify_annotation(annotation, "smart")
    for pattern, instead in PUBLIC:
        text = re.sub(pattern, instead, text)
    return _Text(text)


def default_text(value: Any) -> str:
    """A default as one would write it: `marks.causal`, `jnp.float32`, `Optimizer()`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        return f"{name}()" if value == type(value)() else repr(value)
    if isinstance(value, types.MappingProxyType):
        return repr(dict(value))
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    if callable(value) and hasattr(value, "__qualname__"):
        package, *inside = value.__module__.split(".")
        room = inside[0] if package == "shardwise" else package
        return f"{'jnp' if value.__module__ == 'jax.numpy' else room}.{value.__qualname__}"
    return object_description(value)


def _bare(translator, node):
    """Writes the marks between types without the two tags around each, a tenth of a page."""
    translator.body.append(html.escape(node.astext()))
    raise nodes.SkipNode


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """A named tuple's fields, of which Python itself says only their number."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


class Renamed(ClassDocumenter):
    """Shows a class under the name by which a module offers it, as `context.ring`; not as an alias
    of another, of which readers know nothing.
    """

    def import_object(self, raiseerror: bool = False) -> bool:
        found = super().import_object(raiseerror)
        self.doc_as_attr = found and self.doc_as_attr and not inspect.isclass(self.object)
        return found


class Field(AttributeDocumenter):
    """Shows a field's default as a signature does."""

    def add_directive_header(self, sig: str) -> None:
        super().add_directive_header(sig)
        if not super().should_suppress_value_header():
            self.add_line(f"   :value: {default_text(self.object)}", self.get_sourcename())

    def should_suppress_value_header(self) -> bool:
        return True  # what Sphinx would show is added above


class Typed(PropertyDocumenter):
    """Shows a property with its type."""

    def add_directive_header(self, sig: str) -> None:
        super().add_directive_header(sig)
        told = _shown(inspect.signature(self._get_property_getter()).return_annotation)
        if told is not inspect.Signature.empty:
            self.add_line(f"   :type: {told}", self.get_sourcename())


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
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("config-inited", lambda app, config: setattr(config, LONGEST, 100))
    app.add_autodocumenter(Renamed, override=True)
    app.add_autodocumenter(Field, override=True)
    app.add_autodocumenter(Typed, override=True)
    app.add_node(addnodes.desc_sig_punctuation, override=True, html=(_bare, None))
    app.add_directive("module-table", ModuleTable)
