"""Makes `.venv` ready, as every target of the Makefile needs it, or says in one sentence why not.

Whichever Python 3 is found first runs this, however old, so nothing here is newer than Python 3.6.
The environment variable PYTHON names the interpreter that `.venv` is to be made with.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

KNOWN = ("3.11", "3.12", "3.13")
CANDIDATES = ("python3", "python3.13", "python3.12", "python3.11")
FOLDER = Path(".venv")
PINS = "requirements.txt"
COMPILER = "requirements-tpu.txt"  # what can be done without
PACKAGES = ("pyproject.toml", "book/pyproject.toml")
READY = FOLDER / "ready"  # written last: the folder and the pins that `.venv` was made for
QUIET = ("-qq", "--disable-pip-version-check")  # errors alone
PROBE = """\
import sys
from importlib.util import find_spec
able = bool(find_spec("venv") and find_spec("ensurepip"))
print("%d.%d.%d" % sys.version_info[:3], able, sys.base_prefix)
"""


class Python:
    """An interpreter by its name: `version` is empty where it does not run."""

    def __init__(self, name: str) -> None:
        try:
            told = subprocess.check_output([name, "-c", PROBE], stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            told = b"  "
        self.name = name
        self.version, able, self.home = told.decode().rstrip("\n").split(" ", 2)
        self.known = self.version.rpartition(".")[0] in KNOWN
        self.suits = self.known and able == "True"

    def same(self, other: "Python") -> bool:
        """Whether both are one installation, be it by a link or through an environment."""
        return (self.version, self.home) == (other.version, other.home)

    def lacks(self) -> str:
        """Why no environment can be made with it, and what to do."""
        versions = " or ".join([", ".join(KNOWN[:-1]), KNOWN[-1]])
        if not self.version:
            return (
                f"{self.name} does not run here: install Python {versions}, or name one, as in "
                "'make PYTHON=/path/to/python3.12'."
            )
        if not self.known:
            return (
                f"{self.name} is Python {self.version}, and Shardwise needs Python {versions}: "
                "install one of them, then name it, as in 'make PYTHON=python3.12'."
            )
        return (
            f"{self.name} (Python {self.version}) lacks its venv module: install it "
            "('apt install python3-venv' on Debian and Ubuntu), or name another Python, as in "
            "'make PYTHON=python3.12'."
        )


def wanted() -> "dict[str, str]":
    """What READY says of an environment that needs nothing: this folder, and the present pins."""
    pins = b"".join(Path(name).read_bytes() for name in (PINS, COMPILER, *PACKAGES))
    return {"folder": os.getcwd(), "pins": hashlib.sha256(pins).hexdigest()}


def known_state() -> "dict[str, str]":
    """What READY says; nothing where it is missing, or of another kind."""
    try:
        state = json.loads(READY.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def choose(asked: str) -> Python:
    """The first interpreter that suits; SystemExit with one sentence where none does."""
    tried = [Python(name) for name in ([asked] if asked else CANDIDATES)]
    for python in tried:
        if python.suits:
            return python
    sys.exit(tried[0].lacks())


def main() -> None:
    """Nothing to do, an update in place (other pins), or a new `.venv` (in any other state)."""
    asked, state, ready = os.environ.get("PYTHON", ""), known_state(), wanted()
    has = Python(str(FOLDER / "bin" / "python"))
    usable = bool(has.version) and (not asked or has.same(Python(asked)))
    if usable and state == ready:
        return
    if not usable or state.get("folder") != ready["folder"]:
        chosen = choose(asked)
        print(f"Making .venv with {chosen.name}", flush=True)
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.check_call([chosen.name, "-m", "venv", str(FOLDER)])
    print("Installing the pinned set (minutes, the first time)", flush=True)
    if READY.exists():
        READY.unlink()
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", *QUIET, "-r"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.check_call([*pip, PINS], env=outside)
    add_compiler("TPU", [*pip, COMPILER], outside)
    add_compiler("GPU", [*pip[:2], "shardwise.topology", *QUIET], outside)
    READY.write_text(json.dumps(ready))


def add_compiler(kind: str, install: "list[str]", outside: "dict[str, str]") -> None:
    """The compiler for "TPU" or "GPU"; one sentence, and no failure, where it cannot be had."""
    without = "the book goes without, and the chapters that need it say so"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(f"No {kind} compiler for {sys.platform} on {platform.machine()}: {without}.")
        return
    ran = subprocess.run(install, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ran.returncode:
        said = ran.stdout.decode(errors="replace").strip().splitlines()[-1:] or ["no word from pip"]
        again = " ".join(word for word in install if word not in QUIET)
        print(f"No {kind} compiler ({said[0]}): {without}; to try again, run {again}.")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # it has said itself what is wrong
    except KeyboardInterrupt:
        sys.exit(130)
