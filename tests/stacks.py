"""Runs all chapters and tests on each stack: `make stacks`, or `python tests/stacks.py colab`.

Each stack has an environment of its own in .stacks, made with an interpreter found on the PATH or
where pyenv and uv keep theirs. A stack that cannot be run is named, and the exit status is then 1,
as after a failure; `--allow-missing` makes it 0. `--env colab=/path/to/python` takes an environment
that exists, as it is. The site's own tests do not run here: they test pages, not a stack.
"""

import argparse
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "src", ROOT / "book/src"]
PACKAGES = ["shardwise", "shardwise-book"]
RUNNER = ["-m", "shardwise_book.execute"]
# One chapter asks JAX for a default of which JAX 0.8 announces that it will change.
ANNOUNCED = "ignore:The default axis_types will change:DeprecationWarning"
SITE_TESTS = ["tests/test_site.py", "tests/test_theme.py"]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Its Pythons, the best first, and the requirements file that makes its environment.

    `jax` (and jaxlib) and `flax`, where given, take the place of the versions in that file.
    """

    pythons: tuple[str, ...]
    requirements: str = "requirements.txt"
    jax: str = ""
    flax: str = ""

    def pins(self) -> str:
        """The text of its requirements."""
        text = (ROOT / self.requirements).read_text()
        for name, version in {"jax": self.jax, "jaxlib": self.jax, "flax": self.flax}.items():
            if version:
                text = re.sub(rf"(?m)^{name}==[^;\s]+", f"{name}=={version}", text)
        return text

    def compiler(self, jax: str) -> list[str]:
        """What pip installs for Google's TPU compiler: our pin, or what this JAX names itself."""
        ours = self == Stack(self.pythons)
        return ["-r", str(ROOT / "requirements-tpu.txt")] if ours else [f"jax[tpu]=={jax}"]


# The last three are releases of JAX in between, each with the newest Flax that pip takes beside it.
STACKS = {
    "newest": Stack(("3.13", "3.12")),
    "python3.11": Stack(("3.11",)),
    "colab": Stack(("3.13",), "tests/colab.txt"),
    "jax0.8": Stack(("3.13", "3.12"), jax="0.8.3", flax="0.12.6"),
    "jax0.9": Stack(("3.13", "3.12"), jax="0.9.2", flax="0.12.6"),
    "jax0.11": Stack(("3.13", "3.12"), jax="0.11.1", flax="0.12.12"),
}


def interpreter(version: str) -> Path | None:
    """The path of a Python `version` that can make environments, or None."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local/share/uv/python"))
    candidates = [Path(folder, f"python{version}") for folder in os.get_exec_path()]
    candidates += sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    candidates += sorted(uv.glob(f"cpython-{version}.*/bin/python{version}"), reverse=True)
    probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for path in filter(Path.exists, candidates):
        ran = subprocess.run([path, "-c", probe], capture_output=True, text=True)
        if ran.stdout.strip() == version:
            return path
    return None


def environment(name: str, stack: Stack) -> Path | None:
    """The interpreter of the stack's environment, made or brought up to date; None without one.

    subprocess.CalledProcessError where pip fails.
    """
    found = next(filter(None, map(interpreter, stack.pythons)), None)
    if found is None:
        return None
    folder, pins = ROOT / ".stacks" / name, stack.pins()
    ready, state = folder / "ready", f"{ROOT}\n{found}\n{pins}\n{stack.compiler('pinned')}"
    python = folder / "bin/python"
    if not ready.exists() or ready.read_text() != state:
        say(f"{name}: making its environment with {found}")
        shutil.rmtree(folder, ignore_errors=True)
        check([found, "-m", "venv", folder])
        (folder / "requirements.txt").write_text(pins)
        install = [python, "-m", "pip", "install", "-qq", "-r", folder / "requirements.txt"]
        check(install, cwd=ROOT)  # the last lines there install both packages, from here
        add_compiler(name, stack, python)
        ready.write_text(state)
    return python


def add_compiler(name: str, stack: Stack, python: Path) -> None:
    """Beside what is there; tests and cells that need one are skipped where it cannot be had."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return say(f"{name}: no TPU or GPU compiler for {sys.platform} on {platform.machine()}")
    tpu = [python, "-m", "pip", "install", "-qq", *stack.compiler(installed(python)["jax"])]
    for kind, install in {"TPU": tpu, "GPU": [python, "-m", "shardwise.topology", "-qq"]}.items():
        if subprocess.run(install, cwd=ROOT, env=os.environ | paths()).returncode:
            say(f"{name}: no {kind} compiler could be installed; what needs it is left out")


def chapters_here(python: Path) -> bool:
    """Execute every chapter; warnings of deprecation from our code and the cells are errors."""
    notebooks = sorted((ROOT / "chapters").glob("*.ipynb"))
    modules = [module_name(path, source) for source in SOURCES for path in source.rglob("*.py")]
    modules = ["__main__", *sorted(modules)]
    filters = [*(f"error::DeprecationWarning:{module}" for module in modules), ANNOUNCED]
    return succeeds([python, *RUNNER, *notebooks], {**paths(), "PYTHONWARNINGS": ",".join(filters)})


def chapters_as_on_colab(python: Path) -> bool:
    """Execute every notebook alone: its first cell installs both packages from a clone.

    What is installed before must be there afterwards, in the same version.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone, standin = Path(folder, "shardwise"), Path(folder, "standin")
        publish(clone)
        (standin / "google/colab").mkdir(parents=True)
        for module in ["__init__.py", "output.py"]:  # JAX imports the second where it sees Colab
            (standin / "google/colab" / module).touch()
        before, passed = installed(python), True
        for notebook in sorted((clone / "chapters").glob("*.ipynb")):
            command = [python, *RUNNER, "--preload", "google.colab", notebook]
            # The runner finds our package in the folder that it starts in, and the kernel, which
            # starts elsewhere, finds what the first cell has installed.
            passed &= succeeds(command, {"PYTHONPATH": str(standin)}, folder=ROOT / "book/src")
            after = installed(python)
            added = {name: after.pop(name, None) for name in PACKAGES}
            if None in added.values() or after != before:
                changed = sorted(set(before.items()) ^ set(after.items()))
                say(f"  {notebook.name}: installed {added}, and changed {changed}")
                passed = False
            check([python, "-m", "pip", "uninstall", "--quiet", "--yes", *PACKAGES])
    return passed


def publish(clone: Path) -> None:
    """A repository at `clone` with this working tree, whose notebooks install from itself."""
    made = (".git", ".venv", ".stacks", ".engines", "_build", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*made))
    check([sys.executable, "-m", "shardwise_book.address", clone.as_uri()], cwd=clone)
    author = ["-c", "user.name=stacks", "-c", "user.email=stacks@localhost"]
    for command in [["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "As it is"]]:
        check(["git", *command], cwd=clone)


def tests(python: Path) -> bool:
    """Run all tests but the site's, with stages under every schedule, mesh and model."""
    ignored = [f"--ignore={path}" for path in SITE_TESTS]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored]
    return succeeds(command, {**paths(), "IN_FULL": "1"})


def run(name: str, python: Path) -> str:
    """Chapters, then tests, on one stack; what to print of each."""
    chapters = chapters_as_on_colab if name == "colab" else chapters_here
    verdicts = []
    for part, action in [("chapters", chapters), ("tests", tests)]:
        say(f"{name}: {part}")
        verdicts.append(f"{part} {'pass' if action(python) else 'FAIL'}")
    return ", ".join(verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    asked = os.environ.get("STACKS", "").split()  # as `make stacks STACKS="..."` gives them
    parser.add_argument("names", nargs="*", default=asked or list(STACKS), metavar="stack")
    parser.add_argument("--allow-missing", action="store_true")
    parser.add_argument("--env", action="append", default=[], metavar="STACK=PYTHON")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(STACKS))
    if unknown:
        parser.error(f"no stack {', '.join(unknown)}: there are {', '.join(STACKS)}")
    given, verdicts = dict(item.split("=", 1) for item in options.env), {}
    for name in options.names:
        try:
            python = given.get(name) or environment(name, STACKS[name])
            verdicts[name] = run(name, python) if python else missing(STACKS[name])
        except subprocess.CalledProcessError as error:
            verdicts[name] = f"FAIL: {' '.join(map(str, error.cmd))} exited {error.returncode}"
    say("\nStacks", *(f"  {name:<11} {verdict}" for name, verdict in verdicts.items()), sep="\n")
    bad = ["FAIL"] if options.allow_missing else ["FAIL", "not run"]
    return int(any(word in verdict for verdict in verdicts.values() for word in bad))


def missing(stack: Stack) -> str:
    """Why a stack was not run, and what to do."""
    wanted = " or ".join(stack.pythons)
    return (
        f"not run: no Python {wanted} with venv on the PATH, nor where pyenv and uv keep theirs: "
        f"install one, for example with `uv python install {stack.pythons[0]}`"
    )


def installed(python: Path) -> dict[str, str]:
    """Versions by package name, as pip sees them."""
    command = [python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.split("==", 1) for line in listed.split() if "==" in line)


def paths():
    """Where an environment that has neither package finds them."""
    return {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))}


def module_name(path, source):
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def succeeds(command, settings, folder=ROOT):
    return subprocess.run(command, cwd=folder, env={**os.environ, **settings}).returncode == 0


def check(command, **settings):
    subprocess.run(command, check=True, **settings)


def say(*lines, sep="\n"):
    print(*lines, sep=sep, flush=True)


if __name__ == "__main__":
    sys.exit(main())
