"""Cells of chapters that need the compiler of chips that are not here."""

import pytest

from shardwise_book import compilers


@pytest.mark.parametrize("mark", compilers.MISSING)
def test_a_cell_whose_compiler_is_missing_says_so(mark):
    cell = [f"{mark}\n", "x = 1\n"]
    (said,) = compilers.left_out(cell, {mark: False})
    assert said.startswith("print(") and "Not run here: this needs" in said and "x = 1" not in said
    assert compilers.left_out(cell, {mark: True}) == cell
    other = [["# For chipsets\n"], ["y = 2\n", f"{mark}\n"], []]
    assert [compilers.left_out(lines, {mark: False}) for lines in other] == other


def test_what_is_here_is_found(monkeypatch):
    def missing():
        raise ImportError

    monkeypatch.setattr(compilers.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compilers.gpu, "find", missing)
    assert compilers.found() == {"# For chips": True, "# For GPUs": False}
    monkeypatch.setattr(compilers.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compilers.gpu, "find", lambda: ("library", "version"))
    assert compilers.found() == {"# For chips": False, "# For GPUs": True}
