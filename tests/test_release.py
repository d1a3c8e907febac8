"""What a release holds: sdists and wheels built from this tree, and the workflow that publishes."""

import configparser
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


class Package:
    """One of the two that are released, of the project in `folder`."""

    def __init__(self, name, folder, suffixes):
        self.name, self.folder, self.suffixes = name, folder, suffixes
        self.project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        self.stem = f"{name}-{self.project['version']}"
        self.wheel, self.sdist = f"{self.stem}-py3-none-any.whl", f"{self.stem}.tar.gz"

    def source(self):
        """{path below src: content} of the package in this tree."""
        src = self.folder / "src"
        files = [path for path in (src / self.name).rglob("*") if path.is_file()]
        kept = [path for path in files if "__pycache__" not in path.parts]
        return {path.relative_to(src).as_posix(): path.read_bytes() for path in kept}

    def wheel_of(self, folder):
        """{name: content} of its wheel there."""
        with zipfile.ZipFile(folder / self.wheel) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}

    def sdist_of(self, folder):
        """{name below the sdist's folder: content}; regular files only, all in that folder."""
        found = {}
        with tarfile.open(folder / self.sdist) as sdist:
            for member in sdist.getmembers():
                top, _, name = member.name.partition("/")
                assert (top, member.isfile()) == (self.stem, True), member.name
                found[name] = sdist.extractfile(member).read()
        return found


LIBRARY = Package("shardwise", ROOT, {".py", ".json"})
BOOK = Package("shardwise_book", ROOT / "book", {".py", ".js", ".css", ".gz"})
both = pytest.mark.parametrize("package", [LIBRARY, BOOK], ids=["library", "book"])

# Imports modules of unpacked wheels, and says which files they came from.
IMPORTS = """\
import importlib, importlib.metadata, json, sys
sys.path.insert(0, sys.argv[1])
found = {name: importlib.import_module(name).__file__ for name in sys.argv[2:]}
wheel = next(importlib.metadata.distributions(name="shardwise", path=[sys.argv[1]]))
commands = {each.name: each.load().__code__.co_filename for each in wheel.entry_points}
print(json.dumps([found, commands]))
"""


def build(tree, folder, *options):
    """Build `tree` with what is installed, and nothing from an index."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder, *options]
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdists and the wheels."""
    pytest.importorskip("hatchling", reason="nothing is built on this stack")
    if not (ROOT / "src").exists():
        pytest.skip("the wheels are tested without the source")
    folder = tmp_path_factory.mktemp("dist")
    for package in LIBRARY, BOOK:
        build(package.folder, folder)
    built = {path.name for path in folder.iterdir()}
    assert built == {LIBRARY.wheel, LIBRARY.sdist, BOOK.wheel, BOOK.sdist}
    return folder


@pytest.mark.slow
@both
def test_the_wheel_holds_the_package_and_nothing_else(dist, package):
    held, info = package.wheel_of(dist), f"{package.stem}.dist-info"
    about = {name: held.pop(name) for name in list(held) if name.startswith(f"{info}/")}
    assert held == package.source()
    assert {Path(name).suffix for name in held} == package.suffixes
    files = ["METADATA", "WHEEL", "RECORD", "licenses/LICENSE"]
    files += ["entry_points.txt"] * ("scripts" in package.project)
    assert set(about) == {f"{info}/{name}" for name in files}
    assert about[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_wheel_holds_every_script_that_its_code_names(dist):
    held = BOOK.wheel_of(dist)
    drawn = {name: text for name, text in held.items() if "/figures/" in name}
    code = b"\n".join(text for name, text in drawn.items() if name.endswith(".py")).decode()
    named = set(re.findall(r'"(\w+\.(?:js|css))"', code))
    assert named == {Path(name).name for name in held if name.endswith((".js", ".css"))}


@pytest.mark.slow
@both
def test_metadata_say_what_pyproject_says(dist, package):
    held, project = package.wheel_of(dist), package.project
    metadata = Parser().parsestr(held[f"{package.stem}.dist-info/METADATA"].decode())
    described = (metadata["Name"], metadata["Version"], metadata["License-Expression"])
    assert described == (project["name"], project["version"], project["license"])
    assert metadata["Requires-Python"] == project["requires-python"]
    extras = project.get("optional-dependencies", {})
    assert sorted(metadata.get_all("Provides-Extra", [])) == sorted(extras)
    count = len(project["dependencies"]) + sum(map(len, extras.values()))
    assert len(metadata.get_all("Requires-Dist")) == count
    entries = configparser.ConfigParser()
    entries.read_string(held.get(f"{package.stem}.dist-info/entry_points.txt", b"").decode())
    scripts = {"console_scripts": project["scripts"]} if "scripts" in project else {}
    assert {name: dict(entries[name]) for name in entries.sections()} == scripts


@pytest.mark.slow
def test_the_library_is_described_by_the_readme(dist):
    metadata = Parser().parsestr(
        LIBRARY.wheel_of(dist)[f"{LIBRARY.stem}.dist-info/METADATA"].decode()
    )
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


@pytest.mark.slow
@both
def test_the_sdist_holds_what_builds_the_same_wheel(dist, package, tmp_path):
    held = package.sdist_of(dist)
    around = {"pyproject.toml", "LICENSE", "PKG-INFO", ".gitignore"}
    around |= {"README.md"} if package is LIBRARY else set()
    assert set(held) == {f"src/{name}" for name in package.source()} | around
    for name, content in held.items():
        if name not in ("PKG-INFO", ".gitignore"):
            assert content == (package.folder / name).read_bytes(), name
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert held[".gitignore"] == (ROOT / ".gitignore").read_bytes()
    build(tmp_path / "unpacked", tmp_path, "-t", "wheel")
    assert package.wheel_of(tmp_path) == package.wheel_of(dist)


@pytest.mark.slow
@both
def test_nothing_names_this_tree(dist, package):
    for name, content in [*package.wheel_of(dist).items(), *package.sdist_of(dist).items()]:
        assert not Path(name).is_absolute() and ".." not in Path(name).parts, name
        assert str(ROOT).encode() not in content, name


@pytest.mark.slow
def test_every_module_imports_from_the_wheels_alone(dist, tmp_path):
    """Of the book's package what chapters import: the rest builds the site, in a clone."""
    for package in LIBRARY, BOOK:
        with zipfile.ZipFile(dist / package.wheel) as wheel:
            wheel.extractall(tmp_path)
    folders = [f"{name}/**/*" for name in ("shardwise", "shardwise_book/figures")]
    folders += ["shardwise_book/puzzles/**/*", "shardwise_book/compilers"]
    paths = [path for folder in folders for path in sorted(tmp_path.glob(f"{folder}.py"))]
    parts = [path.relative_to(tmp_path).with_suffix("").parts for path in paths]
    names = [".".join(each).removesuffix(".__init__") for each in parts]
    command = [sys.executable, "-I", "-c", IMPORTS, tmp_path, *names]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found, commands = json.loads(ran.stdout)
    assert found == dict(zip(names, map(str, paths), strict=True))
    assert commands == {"shardwise": str(tmp_path / "shardwise/__main__.py")}


@pytest.fixture(scope="module")
def workflow():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def test_actions_are_named_by_commit_and_only_publishing_has_a_token(workflow):
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    used = [step.get("uses") for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used if one)
    assert workflow["permissions"] == {"contents": "read"}
    permissions = {name: job.get("permissions") for name, job in workflow["jobs"].items()}
    assert permissions == {"dist": None, "wheel": None, "publish": {"id-token": "write"}}
    publish = workflow["jobs"]["publish"]
    assert (publish["needs"], publish["environment"]["name"]) == (["dist", "wheel"], "pypi")
    # What can ask for a token runs nothing of this repository.
    assert not [step for step in publish["steps"] if "run" in step]


@pytest.mark.parametrize(
    "tag, version, heading, said",
    [
        ("v1.20.3", "1.20.3", "## [1.20.3] - 2026-11-22", ""),
        ("v1.20.4", "1.20.3", "## [1.20.3] - 2026-11-22", "v1.20.4, and pyproject.toml says"),
        ("1.20.3", "1.20.3", "## [1.20.3] - 2026-11-22", "tag is 1.20.3"),
        ("v1.20.3", "1.20.3", "## [1.20.3] - unreleased", "has no line '## [1.20.3] - YYYY"),
        ("v1.20.3", "1.20.3", "## [1a20.3] - 2026-11-22", "has no line"),
    ],
)
def test_a_tag_is_the_version_that_the_changelog_dates(
    workflow, tmp_path, tag, version, heading, said
):
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    (tmp_path / "python").symlink_to(sys.executable)
    steps = workflow["jobs"]["dist"]["steps"]
    [script] = [step["run"] for step in steps if step.get("name", "").startswith("The tag is")]
    ran = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, said in ran.stdout) == (int(bool(said)), True), ran
    assert bool(ran.stdout) == bool(said)


def test_one_version_everywhere():
    version = LIBRARY.project["version"]
    assert BOOK.project["version"] == version
    assert f"shardwise=={version}" in BOOK.project["dependencies"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"(?m)^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == version
