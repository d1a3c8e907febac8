"""The README's program for a model of one's own runs as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_program_of_ones_own(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (program,) = [text for text in programs if "run.train(" in text]
    shorter = program.replace("steps=1000", "steps=3")
    assert shorter != program
    done = subprocess.run(
        [sys.executable, "-c", shorter], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
