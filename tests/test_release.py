"""What a release holds: sdist and wheel built from this tree, and the workflow that publishes."""

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
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"shardwise-{PROJECT['version']}"

# Imports every module of an unpacked wheel, and says which files they came from.
IMPORTS = """\
import importlib, importlib.metadata, json, sys
sys.path.insert(0, sys.argv[1])
found = {name: importlib.import_module(name).__file__ for name in sys.argv[2:]}
wheel = next(importlib.metadata.distributions(name="shardwise", path=[sys.argv[1]]))
commands = {each.name: each.load().__code__.co_filename for each in wheel.entry_points}
print(json.dumps([found, commands]))
"""


def source():
    """{path below src: content} of the package in this tree."""
    files = [path for path in (SOURCE / "shardwise").rglob("*") if path.is_file()]
    kept = [path for path in files if "__pycache__" not in path.parts]
    return {path.relative_to(SOURCE).as_posix(): path.read_bytes() for path in kept}


def build(tree, folder, *options):
    """Build `tree` with what is installed, and nothing from an index."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder, *options]
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist and the wheel."""
    pytest.importorskip("hatchling", reason="nothing is built on this stack")
    if not SOURCE.exists():
        pytest.skip("the wheel is tested without the source")
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    built = {path.name for path in folder.iterdir()}
    assert built == {f"{STEM}.tar.gz", f"{STEM}-py3-none-any.whl"}
    return folder


def wheel_of(folder):
    """{name: content} of the wheel there."""
    with zipfile.ZipFile(folder / f"{STEM}-py3-none-any.whl") as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def sdist_of(folder):
    """{name below the sdist's folder: content}; regular files only, all in that folder."""
    found = {}
    with tarfile.open(folder / f"{STEM}.tar.gz") as sdist:
        for member in sdist.getmembers():
            top, _, name = member.name.partition("/")
            assert (top, member.isfile()) == (STEM, True), member.name
            found[name] = sdist.extractfile(member).read()
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(dist):
    held = wheel_of(dist)
    info = {name: held.pop(name) for name in list(held) if name.startswith(f"{STEM}.dist-info/")}
    assert held == source()
    assert {Path(name).suffix for name in held} == {".py", ".js", ".json"}
    files = ["METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"]
    assert set(info) == {f"{STEM}.dist-info/{name}" for name in files}
    assert info[f"{STEM}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_wheel_holds_every_script_that_its_code_names(dist):
    held = wheel_of(dist)
    code = b"\n".join(text for name, text in held.items() if name.endswith(".py")).decode()
    named = set(re.findall(r'"(\w+\.(?:js|css))"', code))
    assert named == {Path(name).name for name in held if name.endswith((".js", ".css"))}


@pytest.mark.slow
def test_metadata_say_what_pyproject_says(dist):
    held = wheel_of(dist)
    metadata = Parser().parsestr(held[f"{STEM}.dist-info/METADATA"].decode())
    described = (metadata["Name"], metadata["Version"], metadata["License-Expression"])
    assert described == ("shardwise", PROJECT["version"], PROJECT["license"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    extras = PROJECT["optional-dependencies"]
    assert sorted(metadata.get_all("Provides-Extra")) == sorted(extras)
    count = len(PROJECT["dependencies"]) + sum(map(len, extras.values()))
    assert len(metadata.get_all("Requires-Dist")) == count
    entries = configparser.ConfigParser()
    entries.read_string(held[f"{STEM}.dist-info/entry_points.txt"].decode())
    assert {name: dict(entries[name]) for name in entries.sections()} == {
        "console_scripts": PROJECT["scripts"]
    }


@pytest.mark.slow
def test_the_sdist_holds_what_builds_the_same_wheel(dist, tmp_path):
    held = sdist_of(dist)
    around = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert set(held) == {f"src/{name}" for name in source()} | around
    for name, content in held.items():
        if name != "PKG-INFO":
            assert content == (ROOT / name).read_bytes(), name
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    build(tmp_path / "unpacked", tmp_path, "-t", "wheel")
    assert wheel_of(tmp_path) == wheel_of(dist)


@pytest.mark.slow
def test_nothing_names_this_tree(dist):
    for name, content in [*wheel_of(dist).items(), *sdist_of(dist).items()]:
        assert not Path(name).is_absolute() and ".." not in Path(name).parts, name
        assert str(ROOT).encode() not in content, name


@pytest.mark.slow
def test_every_module_imports_from_the_wheel_alone(dist, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are an extra")
    with zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)
    paths = sorted(tmp_path.glob("shardwise/**/*.py"))
    parts = [path.relative_to(tmp_path).with_suffix("").parts for path in paths]
    names = [".".join(each).removesuffix(".__init__") for each in parts]
    command = [sys.executable, "-I", "-c", IMPORTS, tmp_path, *names]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found, commands = json.loads(ran.stdout)
    assert found == dict(zip(names, map(str, paths), strict=True))
    assert commands == {"shardwise": str(tmp_path / "shardwise/run/command.py")}


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
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"(?m)^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == version
