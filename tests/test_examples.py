"""The examples, as the README shows them: it prints what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def printed(*command):
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_readme_shows_the_first_example_and_what_it_prints():
    first = ROOT / "examples/first.py"
    assert f"```python\n{first.read_text()}```\n\n```\n{printed(first)}```\n" in README


@pytest.mark.slow
def test_readme_shows_the_picture_that_is_drawn_today(tmp_path):
    printed(ROOT / "examples/picture.py", tmp_path / "drawn.svg")
    drawn, kept = (
        re.findall(r">([^<>]* MB [^<>]*)<", path.read_text())
        for path in (tmp_path / "drawn.svg", ROOT / "examples/layouts.svg")
    )
    assert drawn == kept and len(kept) == 6
    described = re.search(r"!\[(.*)\]\(examples/layouts.svg\)", README)[1]
    assert all(number in described for text in kept for number in re.findall(r"[\d.]+", text))


def test_readme_is_short_and_names_files_that_exist():
    assert len(README) <= 5000
    for path in re.findall(r"\]\(([^)]*)\)", README):
        assert (ROOT / path).exists(), path
