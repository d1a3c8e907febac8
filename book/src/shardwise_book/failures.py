"""The failure gallery: symptom, what was printed, cause and section of each cell marked as one.

A code cell says so in its metadata: `failure: {symptom: "...", cause: "..."}`. The output is that
of the run from which its chapter's page is made.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import nbformat
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from . import execute

KEYS = ("symptom", "cause")
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
LINES, LAST, WIDTH = 12, 3, 400  # of an output: lines in all, of these at its end; characters


class Failure(NamedTuple):
    """An entry of the gallery; `index` is its cell's place in the notebook."""

    index: int
    symptom: str
    cause: str
    output: str


class Entries(nodes.General, nodes.Element):
    """Where the entries will stand, once every chapter has been read."""


class FailureGallery(SphinxDirective):
    """`{failure-gallery}`: every failure of the book, in its order."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it shows other pages' runs, so it is never up to date
        return [Entries()]


def problems(name: str, notebook: nbformat.NotebookNode) -> list[str]:
    """A sentence for each mistake of form in the notebook's failures, naming their cells."""
    return [
        f"{where}: its `failure` {mistake}."
        for _, where, given in _marked(name, notebook)
        if (mistake := _mistake(given))
    ]


def collect(
    name: str, notebook: nbformat.NotebookNode, outputs: Sequence[Sequence[nbformat.NotebookNode]]
) -> tuple[list[Failure], list[str]]:
    """The notebook's failures, and a sentence for each whose cell prints nothing.

    `outputs` has one entry for each code cell of the run.
    """
    code = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    found, silent = [], []
    for index, where, given in _marked(name, notebook):
        output = _trimmed("\n".join(_printed(outputs[code.index(index)])))
        found.append(Failure(index, *(given[key].strip() for key in KEYS), output))
        if not output:
            silent.append(
                f"{where}: it is marked as a failure, and prints nothing: print the error's text "
                "or the wrong number, which the gallery shows."
            )
    return found, silent


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Write the entries into a page that has the directive: now each cell's section is known."""
    for place in list(doctree.findall(Entries)):
        entries = [
            _entry(app, docname, chapter, failure)
            for chapter, failures in app.shardwise_failures.items()
            for failure in failures
        ]
        none = nodes.paragraph("", "No chapter has marked a failure yet.")
        place.replace_self(nodes.container("", *entries or [none], classes=["failures"]))


def _marked(name, notebook) -> Iterator[tuple[int, str, dict]]:
    """(index, its place in words, what is given) of each cell that is marked as a failure."""
    lines = notebook.metadata.get("source_map")
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and "failure" in cell.metadata:
            yield index, execute.describe(name, notebook, index, lines), cell.metadata["failure"]


def _mistake(given):
    expected = f"expected {' and '.join(KEYS)}, each a text"
    if not isinstance(given, dict):
        return f"is {given!r}: {expected}"
    if unknown := sorted(set(given) - set(KEYS)):
        return f"has {', '.join(map(repr, unknown))}: {expected}"
    for key in KEYS:
        if not isinstance(given.get(key), str) or not given[key].strip():
            return f"lacks its {key}: {expected}"
        if tag := TAG.search(given[key]):
            return f"has HTML in its {key}, {tag[0]!r}: it is plain text, with `code` in backticks"
    return None


def _printed(outputs):
    """What a cell said as text; an error without its trace, and nothing that is shown as HTML."""
    for output in outputs:
        if output.get("name") == "stderr":
            continue  # a library's or the compiler's remarks
        if output.output_type == "stream":
            yield output.text.rstrip("\n")
        elif output.output_type == "error":
            yield f"{output.ename}: {output.evalue}"
        elif set(output.data) == {"text/plain"}:
            yield output.data["text/plain"]


def _trimmed(text):
    lines = [line.rstrip() for line in execute.ANSI.sub("", text).split("\n")]
    lines = [line if len(line) <= WIDTH else line[:WIDTH] + " …" for line in lines]
    lines = list(itertools.dropwhile(lambda line: not line, lines))
    if len(lines) > LINES:
        lines = [*lines[: LINES - LAST - 1], "…", *lines[-LAST:]]
    return "\n".join(lines).rstrip()


def _entry(app, docname, chapter, failure):
    """What is told of a failure, and a link to the section in which its cell stands."""
    cells = app.env.get_doctree(chapter).findall(nodes.container)
    node = next(cell for cell in cells if cell.get("cell_index") == failure.index)
    while not isinstance(node, nodes.section):
        node = node.parent
    title, section = app.env.titles[chapter].astext(), node.next_node(nodes.title).astext()
    address = f"{app.builder.get_relative_uri(docname, chapter)}#{node['ids'][0]}"
    text = title if section == title else f"{title}: {section}"
    link = nodes.reference("", text, internal=True, refuri=address)
    symptom, cause = (
        nodes.paragraph("", "", *inline(getattr(failure, key)), classes=[key]) for key in KEYS
    )
    printed = nodes.literal_block(failure.output, failure.output, language="none")
    where = nodes.paragraph("", "", link, classes=["where"])
    return nodes.container("", symptom, printed, cause, where, classes=["failure"])


def inline(text: str) -> list[nodes.Node]:
    """Plain text as nodes, with what stands between backticks as code."""
    parts = enumerate(text.split("`"))
    return [nodes.literal(x, x) if i % 2 else nodes.Text(x) for i, x in parts if x]


def setup(app: Sphinx) -> None:
    app.shardwise_failures = {}  # by page, as `collect` returns them
    app.add_node(Entries)
    app.add_directive("failure-gallery", FailureGallery)
    app.connect("doctree-resolved", fill)
