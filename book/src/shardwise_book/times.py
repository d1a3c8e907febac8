"""What the reader is told of execution: a line under each chapter's title, and the table of all."""

import os
from collections.abc import Iterable

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from . import cache


def add_run_time(app: Sphinx, doctree: nodes.document) -> None:
    """Say under the title of an executed page how long it ran, on what, with which versions."""
    run = app.shardwise_runs.get(app.env.docname)
    title = next(doctree.findall(nodes.title), None)
    if run and title is not None:
        versions = cache.versions()
        stack = ", ".join(f"{n} {versions[n]}" for n in ("Python", "jax", "flax") if n in versions)
        text = f"Executed in {run['execution_seconds']:.1f} s{_devices(run)}, with {stack}."
        line = nodes.paragraph(text, text, classes=["run-time"])
        title.parent.insert(title.parent.index(title) + 1, line)


class RunTimes(SphinxDirective):
    """`{run-times}`: each chapter's run time, then the versions and cores of the measurement."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it shows other pages' runs, so it is never up to date
        runs = self.env.app.shardwise_runs
        seconds = {name: run["execution_seconds"] for name, run in runs.items()}
        rows = [[link("doc", f"/{name}"), f"{each:.1f} s"] for name, each in seconds.items()]
        rows.append(["All", f"{sum(seconds.values()):.1f} s"])
        devices = ",".join(sorted({_devices(run) for run in runs.values()} - {""}))
        cores = f"Measured on {os.cpu_count()} cores, up to {cache.jobs()} chapters at a time"
        cores += f"{devices}."
        return [
            table(["Chapter", "Run time"], rows, "run-times"),
            nodes.paragraph(cores, cores),
            table(["Package", "Version"], cache.versions().items(), "versions"),
        ]


def _devices(run):
    count, _, kind = run["devices"].partition(" ")
    if kind == "cpu":
        kind = "simulated CPU"
    return f" on {count} {kind} device{'s' * (count != '1')}" if kind else ""


def link(kind: str, target: str, words: nodes.Node | None = None) -> nodes.Node:
    """A link to a "doc" by its title, or to the "ref" of a place by `words`."""
    about = {"refdomain": "std", "reftype": kind, "reftarget": target, "refwarn": True}
    shown = words or nodes.inline("", target)
    return addnodes.pending_xref("", shown, refexplicit=words is not None, **about)


def table(header: list[str], rows: Iterable[Iterable], name: str) -> nodes.table:
    """A table of that class; its cells are texts or inline nodes."""

    def row(cells):
        inline = (nodes.Text(cell) if isinstance(cell, str) else cell for cell in cells)
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", one)) for one in inline))

    columns = [nodes.colspec(colwidth=1) for _ in header]
    head, body = nodes.thead("", row(header)), nodes.tbody("", *map(row, rows))
    group = nodes.tgroup("", *columns, head, body, cols=len(header))
    return nodes.table("", group, classes=[name])
