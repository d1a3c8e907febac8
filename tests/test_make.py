"""The Makefile's own set-up: from any starting state, and in one sentence where it cannot be."""

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import marked

if not shutil.which("make"):
    pytest.skip("make is not installed", allow_module_level=True)

ROOT = Path(__file__).parent.parent
PINS = ["requirements.txt", "requirements-tpu.txt", "pyproject.toml", "book/pyproject.toml"]


@pytest.fixture
def project(tmp_path):
    """A project with the Makefile, nothing to install, and a folder `bin` to put Pythons in."""
    folder = tmp_path / "a 'project' $(touch from-the-folder)"
    (folder / "bin").mkdir(parents=True)
    (folder / "book").mkdir()
    for name in ["Makefile", "environment.py"]:
        shutil.copy(ROOT / name, folder)
    for name in PINS:
        (folder / name).write_text("")
    yield folder
    assert not list(tmp_path.rglob("from-the-folder")), "the folder's name was run"


PROBED = r"""#!/bin/sh
case "$*" in
  *ensurepip*) echo {version} {able} /nowhere ;;
  *) exec {python} "$@" ;;
esac
"""


def interpreter(path, version, able):
    """A stand-in for a Python `version`, with a venv module or without."""
    path.write_text(PROBED.format(version=version, able=able, python=sys.executable))
    path.chmod(0o755)


def run(project, *arguments, path=None):
    """(exit status, what was printed) of `make`, its own lines aside."""
    # Under `make test` the outer make's level, flags and PYTHON= would reach this one.
    ours = {key: os.environ[key] for key in os.environ if not key.startswith(("MAKE", "PYTHON"))}
    ran = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=project,
        env={**ours, "PATH": str(path) if path else os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [line for line in ran.stdout.splitlines() if not line.startswith("make:")]
    return ran.returncode, "\n".join(line for line in lines if not line.startswith("WARNING"))


def venv(project, *arguments, path=None):
    return run(project, "venv", *arguments, path=path)


@pytest.mark.parametrize(
    ("version", "able", "names"),
    [
        ("3.10.9", True, ["is Python 3.10.9", "needs Python 3.11, 3.12 or 3.13", "make PYTHON="]),
        ("3.11.2", False, ["lacks its venv module", "apt install python3-venv", "make PYTHON="]),
    ],
)
def test_unsuitable_python_is_one_sentence(project, version, able, names):
    stub = project / "bin/python3"
    interpreter(stub, version, able)
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


def test_no_python_at_all_is_one_sentence(project):
    for name in ["make", "sh", "bash"]:  # nothing else is on the PATH
        (project / "bin" / name).symlink_to(shutil.which(name))
    code, printed = venv(project, path=project / "bin")
    assert code != 0 and "\n" not in printed
    assert printed.startswith("No Python 3 runs here: install Python 3.11, 3.12 or 3.13")


def state(project):
    """What says that `.venv` is ready: where it is, and what was installed."""
    pins = b"".join((project / name).read_bytes() for name in PINS)
    return {"folder": str(project), "pins": hashlib.sha256(pins).hexdigest()}


READY = """#!/bin/sh
case "$*" in
  *ensurepip*) echo 3.12.1 True /nowhere ;;
  *) echo "$*"; printenv URL STACKS INTERPRETERS PYTEST_ADDOPTS ;;
esac
"""


@pytest.mark.parametrize("target", marked(["repo", "stacks", "lint", "observe"], ["stacks"]))
def test_values_reach_programs_as_they_stand(project, target):
    """Neither make nor a shell runs what they say, and no word of them is an option."""
    prepared = project / ".venv/bin/python"
    prepared.parent.mkdir(parents=True)
    prepared.write_text(READY)
    prepared.chmod(0o755)
    (project / ".venv/ready").write_text(json.dumps(state(project)))
    value = '$(touch a)$$(touch b)`touch c`"; touch d; \'$(shell touch e) -k "f or g"'
    given = [f"{name}={value}" for name in ("URL", "STACKS", "INTERPRETERS", "PYTEST_ARGS")]
    code, printed = run(project, target, *given)
    assert code == 0, printed
    assert printed.count(value) % 4 == 0 and value in printed
    assert "touch" not in printed.replace(value, "")
    assert not {"a", "b", "c", "d", "e"} & {path.name for path in project.iterdir()}


INSTALLS = r"""#!/bin/sh
case "$*" in
  *ensurepip*) echo 3.12.1 True /nowhere ;;
  *"{fails}") echo Looking; echo "ERROR: No route to {fails}" >&2; exit 1 ;;
esac
"""


GPUS = "-m shardwise.topology -qq --disable-pip-version-check"


@pytest.mark.parametrize("fails", marked([*PINS[:2], GPUS], [PINS[0]]))
def test_only_compilers_may_be_missing(project, fails):
    """The book is made without them, and is told so once; without anything else it is not."""
    prepared = project / ".venv/bin/python"
    prepared.parent.mkdir(parents=True)
    prepared.write_text(INSTALLS.format(fails=fails))
    prepared.chmod(0o755)
    ready = project / ".venv/ready"
    (project / "requirements-tpu.txt").write_text("other pins")
    ready.write_text(json.dumps({**state(project), "pins": "old"}))
    code, printed = venv(project)
    if fails == "requirements.txt":
        assert code != 0 and "No route" in printed and not ready.exists()
        return
    assert code == 0 and json.loads(ready.read_text()) == state(project)
    _, said = printed.splitlines()
    kind, again = "TPU", "pip install -r requirements-tpu.txt"
    if fails == GPUS:
        kind, again = "GPU", "shardwise.topology"
    assert said.startswith(f"No {kind} compiler (ERROR: No route to {fails}): the book goe")
    assert said.endswith(f"run .venv/bin/python -m {again}.")
    assert venv(project) == (0, "")


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_where_no_compiler_exists_one_sentence_says_so(monkeypatch, capfd, system, machine):
    spec = importlib.util.spec_from_file_location("environment", ROOT / "environment.py")
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    monkeypatch.setattr(environment.sys, "platform", system)
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    environment.add_compiler("GPU", ["false"], {})
    printed = capfd.readouterr().out
    assert printed.startswith(f"No GPU compiler for {system} on {machine}: the book goes without")
    assert printed.count("\n") == 1


# Makes an environment at once: a folder with itself as its Python.
AT_ONCE = r"""#!/bin/sh
case "$*" in
  *ensurepip*) echo 3.13.0 True /nowhere ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.mark.slow
def test_every_starting_state_ends_ready(project):
    interpreter(project / "bin/python3", "3.9.1", True)
    interpreter(project / "bin/python3.13", "3.13.0", True)
    code, printed = venv(project, path=f"{project}/bin:/usr/bin:/bin")
    assert code == 0 and "Making .venv with python3.13" in printed, printed
    with_this = f"PYTHON={sys.executable}"
    assert venv(project, with_this) == (0, "")  # ready: nothing is done
    (project / "pyproject.toml").write_text("# changed\n")
    updated = venv(project)
    assert updated[0] == 0 and updated[1].startswith("Installing")
    at_once = project / "bin/python3.12"
    at_once.write_text(AT_ONCE)
    at_once.chmod(0o755)
    (project / ".venv/ready").unlink()  # half-made: interrupted while installing
    again = venv(project, "PYTHON=bin/python3.12")
    assert again[0] == 0 and again[1].startswith("Making .venv with bin/python3.12")
    moved = project.rename(project.with_name("moved"))
    anew = venv(moved, "PYTHON=bin/python3.12")
    assert anew[0] == 0 and anew[1].startswith("Making .venv")
    assert venv(moved) == (0, "")


def test_the_set_up_is_read_by_pythons_that_are_too_old():
    """They must get as far as the sentence that says so."""
    source = (ROOT / "environment.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    assert not re.search(r"capture_output|text=|missing_ok|removeprefix|from __future__", source)
