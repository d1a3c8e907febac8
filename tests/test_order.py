"""The order of the chapters, which `_toc.yml` alone knows, is that of cards and of last lines."""

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHAPTERS = re.findall(r"file: chapters/(\w+)", (ROOT / "_toc.yml").read_text())


def title(slug):
    return re.search(r"^# (.*)$", (ROOT / f"chapters/{slug}.md").read_text(), re.MULTILINE)[1]


def test_the_introduction_has_a_card_for_each_chapter():
    text = (ROOT / "book/intro.md").read_text()
    cards = re.findall(r"card\} (.*)\n:link: /chapters/(\w+)", text)
    assert cards == [(title(slug), slug) for slug in CHAPTERS]


@pytest.mark.parametrize("slug, after", list(itertools.pairwise(CHAPTERS)))
def test_what_comes_next_is_the_next_chapter(slug, after):
    text = (ROOT / f"chapters/{slug}.md").read_text()
    lines = text[text.rindex("comes next") :] if "comes next" in text else text[-1500:]
    assert f"({after}.md)" in lines
