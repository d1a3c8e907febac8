"""What an execution has read: found in every process, and what becomes of it noticed."""

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("jupyter_book", reason="the book is not built on this stack")
import nbformat

from shardwise_book import cache, execute, inputs


@pytest.fixture
def project(tmp_path):
    """A folder with a package `pack` of five modules, beside one that nobody imports."""
    package = tmp_path / "src/pack"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ["used", "lazy", "child", "killed", "unused"]:
        (package / f"{name}.py").write_text("VALUE = 1\n")
    (package / "table.json").write_text("[1]")
    (package / "script.js").write_text("1")
    return tmp_path


READS = """
import os, signal, subprocess, sys
from importlib import resources
sys.path.insert(0, "ROOT/src")
from pack import used
def later():
    from pack import lazy
later()
resources.files("pack").joinpath("script.js").read_text()
path = "import sys; sys.path.insert(0, 'ROOT/src'); "
table = "open('ROOT/src/pack/table.json').close()"
subprocess.run([sys.executable, "-c", path + "from pack import child; " + table])
kill = "; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
subprocess.run([sys.executable, "-c", path + "from pack import killed" + kill])
open("written.txt", "w").write("no input")
os.path.exists("ROOT/src/pack/unused.py")
try:
    open("ROOT/absent.json")
except FileNotFoundError:
    pass
print(used.VALUE)
"""
READ = {"__init__.py", "used.py", "lazy.py", "child.py", "killed.py", "table.json", "script.js"}
READ = {f"src/pack/{name}" for name in READ} | {"absent.json"}


def opened(project, source, **settings):
    """What a process that runs `source` is found to have opened; what it printed."""
    log = project.parent / f"{project.name}.log"
    log.unlink(missing_ok=True)
    env = {**os.environ, **inputs.environment(project, log), **settings}
    command = [sys.executable, "-c", source.replace("ROOT", str(project))]
    ran = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return inputs.opened(log), ran.stdout


def test_every_process_tells_what_it_reads(project):
    assert set(opened(project, READS)[0]) == READ
    assert set(opened(project, READS)[0]) == READ  # now from compiled modules, by their sources


def test_nothing_outside_of_the_project_counts(project):
    (project / ".venv").mkdir()
    (project / ".venv/settings").touch()
    assert opened(project, "import json; open('.venv/settings'); open('/dev/null')")[0] == {}


def test_another_sitecustomize_still_runs(project):
    (project / "own").mkdir()
    (project / "own/sitecustomize.py").write_text("print('own')")
    paths = os.pathsep.join([str(inputs.FOLDER), str(project / "own")])
    assert opened(project, "print('program')", PYTHONPATH=paths)[1] == "own\nprogram\n"


CHANGES = {
    "an edit": lambda package: (package / "used.py").write_text("VALUE = 2\n"),
    "an edit of what a child imports": lambda package: (package / "child.py").write_text("2"),
    "an edit of what a killed child imports": lambda package: (package / "killed.py").write_text(
        ""
    ),
    "an edit of what is imported late": lambda package: (package / "lazy.py").write_text("2"),
    "an edit of data": lambda package: (package / "table.json").write_text("[2]"),
    "a module deleted": lambda package: (package / "used.py").unlink(),
    "a package before a module": lambda package: [
        (package / "used").mkdir(),
        (package / "used/__init__.py").touch(),
    ],
    "an extension before a module": lambda package: (package / "used.abi3.so").touch(),
    "a file that was looked for": lambda package: (package / "../../absent.json").touch(),
}


def test_changes_are_noticed(project):
    found = opened(project, READS)[0]
    digests = {path: inputs.Files(project).digest(path) for path in found}
    assert digests["absent.json"] == "" and digests["src/pack/used.py"]
    kept = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    for name, change in CHANGES.items():
        change(project / "src/pack")
        assert not inputs.Files(project).same(digests), name
        for path in project.rglob("*"):
            if path.is_file() and path not in kept:
                path.unlink()
        for path, content in kept.items():
            path.write_bytes(content)
        assert inputs.Files(project).same(digests), name
    (project / "src/pack/unused.py").write_text("VALUE = 2\n")
    (project / "src/pack/new.py").touch()
    assert inputs.Files(project).same(digests)


def test_an_edit_after_a_file_was_opened(project):
    found = opened(project, READS)[0]
    assert inputs.Files(project).edited(found) == []
    (project / "src/pack/lazy.py").write_text("VALUE = 1\n")  # the same, but who knows since when
    (project / "src/pack/table.json").unlink()
    (project / "absent.json").touch()
    expected = ["absent.json", "src/pack/lazy.py", "src/pack/table.json"]
    assert inputs.Files(project).edited(found) == expected


def notebook(source):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])


@pytest.mark.slow
def test_only_what_read_an_edited_file_is_executed(project, tmp_path_factory):
    """The whole way, through kernels: one imports a module, another's child does, a third none."""
    path = "import sys; sys.path.insert(0, 'ROOT/src'); "
    child = (
        f'import subprocess, sys; subprocess.run([sys.executable, "-c", "{path}import pack.child"])'
    )
    sources = {"own": path + "import pack.used", "child": child, "none": "2 * 2"}
    books = {name: notebook(text.replace("ROOT", str(project))) for name, text in sources.items()}
    results = tmp_path_factory.mktemp("results") / ".results/state"

    def executed():
        data, failures, ran = cache.update(books, results, project, lambda line: None)
        assert not failures and set(data) == set(books)
        return sorted(ran)

    assert executed() == ["child", "none", "own"]
    assert executed() == []
    (project / "src/pack/used.py").write_text("VALUE = 2\n")
    assert executed() == ["own"]
    (project / "src/pack/child.py").write_text("VALUE = 2\n")
    assert executed() == ["child"]
    (project / "src/pack/unused.py").write_text("VALUE = 2\n")
    (project / "src/pack/__init__.py").write_text("# read by both\n")
    assert executed() == ["child", "own"]


def test_the_last_runs_of_a_page_are_kept_and_no_more(project, tmp_path_factory, monkeypatch):
    """Edits back and forth execute nothing; what was left behind long ago is deleted."""
    folder, clock = (
        tmp_path_factory.mktemp("results") / ".results",
        itertools.count(time.time() + 1),
    )
    utime, write = os.utime, Path.write_text

    def used(path, *when):  # in the order of use, however coarse the clock of the file system is
        utime(path, times=(next(clock),) * 2)

    def written(path, *args, **options):
        write(path, *args, **options)
        used(path)

    monkeypatch.setattr(os, "utime", used)
    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(execute, "run", lambda book, *_: execute.Run(book, 1.0))

    def executed(text, stack="state", **more):
        books = {"chapters/one": notebook(text)} | more
        return cache.update(books, folder / stack, project, lambda line: None)[2]

    versions, more = [str(n) for n in range(20)], {"two": notebook("'two'")}
    assert "two" in executed("0", **more)
    for text in versions[1:]:  # without the other, as before a page is named in the contents
        assert "chapters/one" in executed(text)
    assert executed(versions[-1]) == executed(versions[-2]) == executed(versions[-1]) == []
    assert executed(versions[-1], **more) == []
    assert len(list((folder / "state/chapters.one").iterdir())) == cache.KEPT
    assert executed(versions[0]) == ["chapters/one"]  # gone
    for stack in versions:
        executed("0", stack=stack)
    executed("0", stack=versions[-1])
    assert len(list(folder.iterdir())) == 1 + cache.KEPT


def test_results_that_another_user_left_serve_and_stay(project, tmp_path_factory, monkeypatch):
    """As where a cache is restored, or shared: nothing in it may be changed."""

    def refuse(*args, **options):
        raise PermissionError("not yours")

    results = tmp_path_factory.mktemp("results") / ".results/state"
    monkeypatch.setattr(execute, "run", lambda book, *_: execute.Run(book, 1.0))
    for text in range(cache.KEPT + 2):  # one more than is kept, which the next build would delete
        cache.update({"one": notebook(str(text))}, results, project, lambda line: None)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    last = {"one": notebook(str(text))}
    assert cache.update(last, results, project, lambda line: None)[2] == []
    assert len(list(results.rglob("*.json"))) == cache.KEPT + 1


def test_a_file_that_changed_before_it_was_read_is_known_as_it_was_read(project, tmp_path_factory):
    """The build had looked at it before; whoever takes the edit back gets another execution."""
    source = "import sys; sys.path.insert(0, 'ROOT/src'); import pack.used"
    book = notebook(source.replace("ROOT", str(project)))
    path = tmp_path_factory.mktemp("results") / ".results/state"
    used, known = project / "src/pack/used.py", cache.Results(path, project)
    before = known.files.digest("src/pack/used.py")
    used.write_text("VALUE = 2\n")
    found = opened(project, book.cells[0].source)[0]
    data = known.keep("book", book, execute.Run(book, 1.0), found)
    assert data["files"]["src/pack/used.py"] not in ("", before)
    assert cache.Results(path, project).find("book", book)
    used.write_text("VALUE = 1\n")
    assert cache.Results(path, project).find("book", book) is None


@pytest.fixture
def guarded(monkeypatch):
    """A function: the verdict of a watchdog over a cell that ends only when it is killed."""

    def guarded(spent, **limits):
        killed = threading.Event()
        for name, limit in {"LOOK_S": 0.001, **limits}.items():
            monkeypatch.setattr(execute, name, limit)
        with execute.Watchdog(spent, killed.set) as guard:
            assert killed.wait(600)
        return guard.verdict

    return guarded


def test_a_cell_that_stands_still_is_ended(guarded):
    assert "stood still" in guarded(lambda: 1.0, STILL_S=0.01, BUSY_S=1e9)


def test_a_cell_without_end_is_ended_by_processor_time(guarded):
    seconds = iter(range(10**9))
    assert "no end after 50 s" in guarded(lambda: float(next(seconds)), STILL_S=1e9, BUSY_S=50)


def test_a_kernel_that_stands_still_fails_with_the_reason(monkeypatch):
    monkeypatch.setattr(execute, "STILL_S", 1)
    monkeypatch.setattr(execute, "LOOK_S", 0.1)
    ran = execute.run(notebook("import time\ntime.sleep(3600)"), "sleeping")
    assert "sleeping: cell 1 `import time` failed:\n    it stood still" in ran.failure


def test_a_kernel_that_dies_tells_what_it_had_written():
    source = "import os\nos.write(2, b'a crash in compiled code')\nos.kill(os.getpid(), 9)"
    ran = execute.run(notebook(source), "dying")
    assert "the kernel died" in ran.failure and "a crash in compiled code" in ran.failure
