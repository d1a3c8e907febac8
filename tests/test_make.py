"""The Makefile's own set-up: from any starting state, and in one sentence where it cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if not shutil.which("make"):
    pytest.skip("make is not installed", allow_module_level=True)

MAKEFILE = Path(__file__).parent.parent / "Makefile"


@pytest.fixture
def project(tmp_path):
    """A project with the Makefile, nothing to install, and a folder `bin` to put Pythons in."""
    folder = tmp_path / "a project"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(MAKEFILE, folder)
    (folder / "requirements.txt").write_text("")
    (folder / "pyproject.toml").write_text("")
    return folder


def interpreter(path, version, status):
    """A stand-in for a Python `version` that the Makefile's probe of its suitability leaves so."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in\n  --version) echo Python {version} ;;\n'
        f'  *ensurepip*) exit {status} ;;\n  *) exec {sys.executable} "$@" ;;\nesac\n'
    )
    path.chmod(0o755)


def venv(project, *arguments, path=None):
    """(exit status, what was printed) of `make venv`, its own lines aside."""
    # Under `make test` the outer make's level, flags and PYTHON= would reach this one.
    ours = {key: os.environ[key] for key in os.environ if not key.startswith(("MAKE", "PYTHON"))}
    ran = subprocess.run(
        ["make", "--no-print-directory", "venv", *arguments],
        cwd=project,
        env={**ours, "PATH": f"{path}:/usr/bin:/bin" if path else os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [line for line in ran.stdout.splitlines() if not line.startswith("make:")]
    return ran.returncode, "\n".join(line for line in lines if not line.startswith("WARNING"))


@pytest.mark.parametrize(
    ("version", "status", "names"),
    [
        ("3.10.9", 3, ["is Python 3.10.9", "needs Python 3.11, 3.12 or 3.13", "make PYTHON="]),
        ("3.11.2", 4, ["lacks its venv module", "apt install python3-venv", "make PYTHON="]),
    ],
)
def test_unsuitable_python_is_one_sentence(project, version, status, names):
    stub = project / "bin/python3"
    interpreter(stub, version, status)
    code, printed = venv(project, "PYTHON=bin/python3")
    assert code != 0
    assert printed.startswith("bin/python3") and "\n" not in printed
    assert all(name in printed for name in names), printed
    assert not (project / ".venv").exists()


def test_missing_python_is_one_sentence(project):
    code, printed = venv(project, "PYTHON=bin/nowhere")
    assert code != 0
    assert printed.startswith("bin/nowhere does not run here: install Python 3.11, 3.12 or 3.13")
    assert "\n" not in printed


@pytest.mark.slow
def test_another_python_on_the_path_is_taken(project):
    interpreter(project / "bin/python3", "3.9.1", 3)
    interpreter(project / "bin/python3.13", "3.13.0", 0)
    code, printed = venv(project, path=project / "bin")
    assert code == 0, printed
    assert "Making .venv with python3.13" in printed


@pytest.mark.slow
def test_every_starting_state_ends_ready(project):
    with_this = f"PYTHON={sys.executable}"
    assert venv(project, with_this)[0] == 0
    assert venv(project, with_this) == (0, "")  # ready: nothing is done
    (project / "pyproject.toml").write_text("# changed\n")
    updated = venv(project)
    assert updated[0] == 0 and updated[1].startswith("Installing")
    (project / ".venv/ready").unlink()  # half-made: interrupted while installing
    again = venv(project, with_this)
    assert again[0] == 0 and again[1].startswith("Making .venv")
    moved = project.rename(project.with_name("moved"))
    anew = venv(moved, with_this)
    assert anew[0] == 0 and anew[1].startswith("Making .venv")
    assert venv(moved) == (0, "")
