"""What `make stacks` says of a stack that it cannot run, and the clone that Colab installs from."""

import re
import subprocess
import sys
import tomllib

import pytest
import stacks


def test_a_stack_without_an_interpreter_is_named(monkeypatch, capsys):
    monkeypatch.setattr(stacks, "interpreter", lambda version: None)
    assert stacks.main(["colab"]) == 1
    printed = capsys.readouterr().out
    assert "colab" in printed and "not run: no Python 3.13" in printed
    assert "uv python install 3.13" in printed
    assert stacks.main(["colab", "--allow-missing"]) == 0


def test_an_unknown_stack_is_refused(capsys):
    with pytest.raises(SystemExit):
        stacks.main(["newest", "oldest"])
    assert "no stack oldest: there are newest, python3.11, colab, jax0.8" in capsys.readouterr().err


def test_make_names_stacks_by_the_environment(monkeypatch, capsys):
    monkeypatch.setattr(stacks, "interpreter", lambda version: None)
    monkeypatch.setenv("STACKS", "colab jax0.9")
    stacks.main([])
    listed = capsys.readouterr().out.split("Stacks\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == ["colab", "jax0.9"]


def test_each_stack_is_one_that_the_package_accepts():
    """Its range, by pip's own reading, takes each JAX that the stacks run, and none that breaks."""
    packaging = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((stacks.ROOT / "pyproject.toml").read_text())["project"]
    ranges = {
        one.name: one.specifier for one in map(packaging.Requirement, project["dependencies"])
    }
    seen = set()
    for stack in stacks.STACKS.values():
        pinned = re.findall(r"(?m)^(jax|flax)==([\d.]+)", stack.pins())
        assert {name for name, _ in pinned} == {"jax", "flax"}
        assert all(version in ranges[name] for name, version in pinned), pinned
        seen.update(pinned)
    assert {("jax", "0.8.3"), ("jax", "0.9.2"), ("jax", "0.11.1"), ("jax", "0.7.2")} <= seen
    for broken in ["0.7.1", "0.8.2", "0.10.2", "0.11.2"]:
        assert broken not in ranges["jax"]


def test_each_stack_has_the_compilers_of_its_jax(monkeypatch, capsys, tmp_path):
    """Ours where JAX is pinned by us; where there is none, the stack is run without."""
    asked = []

    def pip(command, **_):
        asked.append(command[5:] if "pip" in command else command[1:3])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(stacks, "installed", lambda python: {"jax": "0.8.3"})
    monkeypatch.setattr(stacks.subprocess, "run", pip)
    monkeypatch.setattr(stacks.sys, "platform", "linux")
    monkeypatch.setattr(stacks.platform, "machine", lambda: "x86_64")
    for name in ("newest", "python3.11", "colab", "jax0.8"):
        stacks.add_compiler(name, stacks.STACKS[name], tmp_path / "python")
    ours, theirs = ["-r", str(stacks.ROOT / "requirements-tpu.txt")], ["jax[tpu]==0.8.3"]
    gpus = ["-m", "shardwise.topology"]
    assert asked == [ours, gpus, ours, gpus, theirs, gpus, theirs, gpus]
    assert capsys.readouterr().out.count("PU compiler could be installed") == 8
    monkeypatch.setattr(stacks.platform, "machine", lambda: "aarch64")
    stacks.add_compiler("colab", stacks.STACKS["colab"], tmp_path / "python")
    assert len(asked) == 8 and "colab: no TPU or GPU compiler for linux" in capsys.readouterr().out


def test_every_stack_runs_in_the_workflow():
    workflow = (stacks.ROOT / ".github/workflows/book.yml").read_text()
    assert re.findall(r"stack: ([\w.]+)", workflow) == list(stacks.STACKS)


def test_interpreters_are_found_where_pyenv_keeps_them(monkeypatch, tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = tmp_path / f"versions/{version}.99/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert stacks.interpreter(version) == python
    assert stacks.interpreter("3.2") is None


@pytest.mark.slow
def test_the_clone_installs_from_itself(tmp_path):
    pytest.importorskip("jupytext", reason="the book is not built on this stack")
    clone = tmp_path / "clone"
    stacks.publish(clone)
    notebooks = sorted((clone / "chapters").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == [
        path.stem for path in sorted((stacks.ROOT / "chapters").glob("*.md"))
    ]
    assert all(f'REPOSITORY = \\"{clone.as_uri()}\\"' in path.read_text() for path in notebooks)
    status = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True)
    assert (status.returncode, status.stdout) == (0, "")
