"""What a folded cell defines is named in prose before a cell that readers see uses it.

Whoever leaves the folds closed, as most do, reads no name that was not said before. What a fold
imports needs no saying, and any earlier code span with the name counts.
"""

import builtins
import json
import re
import symtable
from pathlib import Path

import pytest

CHAPTERS = sorted((Path(__file__).parent.parent / "chapters").glob("*.ipynb"))
FOLDED = {"hide-input", "hide-cell"}


def names(text):
    """The names that a cell binds at its top level, those of them that it imports, and the names
    that it reads which are no function's own.
    """
    top = symtable.symtable(re.sub(r"^\s*[%!].*$", "", text, flags=re.M), "cell", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    imported = {s.get_name() for s in top.get_symbols() if s.is_imported()}
    tables, read = [top], set()
    for table in tables:
        tables += table.get_children()
        own = (s for s in table.get_symbols() if s.is_referenced())
        read |= {s.get_name() for s in own if table is top or s.is_global()}
    return bound, imported, read


def unsaid(cells):
    """The names of folds that visible cells use and that no prose before them has as code."""
    known, hidden, prose, found = set(dir(builtins)), set(), "", []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            prose += f"{text}\n"
            continue
        bound, imported, read = names(text)
        if FOLDED & set(cell["metadata"].get("tags", ())):
            hidden, known = hidden | bound, known | imported
            continue
        code = re.sub(r"^```.*$|\{[\w:-]+\}`[^`]*`", "", prose, flags=re.M)  # no fences, no roles
        said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", code))))
        found += sorted((read & hidden) - bound - known - said)
        known |= bound | set(found)
    return found


def test_a_name_of_a_fold_that_no_prose_has_is_found():
    fold = {"cell_type": "code", "source": ["def gap(a, b):\n", "    return a - b\n"]}
    fold["metadata"] = {"tags": ["hide-input"]}
    seen = {"cell_type": "code", "source": ["gap(1, 2)"], "metadata": {}}
    prose = {"cell_type": "markdown", "source": ["The difference is `gap(a, b)`."]}
    assert unsaid([fold, seen, seen]) == ["gap"]
    assert unsaid([fold, prose, seen]) == []
    assert unsaid([fold, seen, prose]) == ["gap"]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_visible_cells_use_no_name_that_only_a_fold_knows(path):
    assert unsaid(json.loads(path.read_text())["cells"]) == []
