"""Docstrings are written as plain text that reads well in an editor; here they become RST.

`name` is code; an indented block after a colon is a list where its lines start with `word:`, and
code otherwise. Sections such as `Raises:` are left to napoleon, which runs after this.
"""

import re
from collections.abc import Sequence
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"(Raises|Returns|Yields|Args|Attributes|Example|Note):$")
ITEM = re.compile(r"(\s+)([\w, ]+):\s+(.*)")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def to_rst(lines: Sequence[str]) -> list[str]:
    """The lines of one docstring, in place of which Sphinx reads what is returned."""
    out, block, previous = [], None, ""  # block: what the lines are in: None, "list" or "code"
    for line in lines:
        indented = line.startswith(" ") and line.strip()
        if indented and block is None and not previous.endswith("::"):
            block, item = _open(line, previous, out)
        elif line.strip() and not indented:
            block = "section" if SECTION.match(line) else None
        if block == "list" and (item := ITEM.match(line)):
            margin = len(item[1]) + 2  # where the text after the bullet begins
            out.append(f"{item[1]}- ``{item[2]}``: {_code(item[3])}")
        elif block == "list" and indented:
            out.append(" " * margin + _code(line.strip()))
        else:
            out.append(line if block == "code" else _code(line))
        previous = line.strip() or previous
    return out


def _open(line, previous, out):
    item = ITEM.match(line)
    if item:
        if out and out[-1].strip():
            out.append("")
        return "list", item
    if previous.endswith(":"):
        while out and not out[-1].strip():
            out.pop()
        out[-1:] = [out[-1] + ":", ""]
        return "code", None
    return None, None


def _code(line):
    return CODE.sub(r"``\1``", line)


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """A named tuple's fields, of which Python itself says only their number."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", convert, priority=400)
    app.connect("autodoc-skip-member", skip)
