"""Cloud TPU VMs, by gcloud."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.run.launch import commands
from shardwise.run.launch.commands import Refused

ENVIRONMENT = "shardwise-venv"  # in the home folder of each worker


@dataclass(frozen=True)
class TpuVm:
    """All workers of a TPU VM that is there: install this commit, run, fetch worker 0's run folder.

    By gcloud alone. A slice of several workers needs a run folder that all see: on a disk that they
    share, or in a bucket that each has mounted (Cloud Storage FUSE). Written for TPU VMs, and not
    tried on one; Ctrl-C ends gcloud here, and not what runs there.
    """

    name: str
    """Of the TPU VM."""
    zone: str
    project: str | None = None
    python: str = "3.12"
    """The version that uv installs there."""
    source: Path = Path(".")
    """A clone of shardwise, of which the newest commit is installed."""
    output: Path | None = None
    """The folder of this machine that gets all files; without it, the run folder's place here."""
    dry_run: bool = False
    """Print what would run, and run nothing."""

    def launch(self, command: Sequence[str], program: Sequence[str]) -> int:
        """Install, run and fetch; the status of the run, or of what failed before it."""
        output = self._output(command)
        commit = self._commit()
        before = self._installing(output / f"shardwise-{commit[:12]}.tar.gz", commit)
        running = self._ssh([f"{ENVIRONMENT}/bin/python", "-m", "shardwise", *command])
        after = self._fetching(command, output)
        if self.dry_run:
            print(*map(commands.shown, [*before, running, *after]), sep="\n")
            return 0
        output.mkdir(parents=True, exist_ok=True)
        for step in before:
            if status := _run(step):
                return status
        status = _run(running)
        # What it wrote is worth having also where it failed.
        fetched = [_run(step) for step in after]
        return status or max(fetched, default=0)

    def _output(self, command):
        return commands.run_folder(command, "tpu-vm") if self.output is None else self.output

    def _commit(self):
        """The commit that is checked out, of a clone without changes.

        Raises:
          Refused: no clone, none of shardwise, or changes that no commit holds.
        """
        top = _git(self.source, "rev-parse", "--show-toplevel").strip()
        if not (Path(top) / "src" / "shardwise" / "__init__.py").exists():
            raise Refused(f"--source {self.source}: {top} is no clone of shardwise.")
        changed = _git(self.source, "status", "--porcelain", "--untracked-files=no")
        if changed:
            names = ", ".join(line[3:] for line in changed.splitlines()[:5])
            raise Refused(f"{top} has changes that no commit holds ({names}): commit them.")
        return _git(self.source, "rev-parse", "HEAD").strip()

    def _installing(self, archive, commit):
        python = f"{ENVIRONMENT}/bin/python"
        package = f"./{archive.name}"
        prefix = f"--prefix=shardwise-{commit[:12]}/"
        archiving = ["git", "-C", str(self.source), "archive", prefix, "-o", str(archive), commit]
        uv = ["python3", "-m", "uv"]
        return [
            archiving,
            self._gcloud("scp", str(archive), f"{self.name}:", "--worker=all"),
            self._ssh(["python3", "-m", "pip", "install", "--user", "uv"]),
            self._ssh([*uv, "venv", "--clear", "--python", self.python, ENVIRONMENT]),
            self._ssh([*uv, "pip", "install", "--python", python, "jax[tpu]", package]),
        ]

    def _fetching(self, command, output):
        run = commands.option(command, "--run")
        if run is None:
            return []
        found = f"{self.name}:{run.rstrip('/')}"
        into = output.parent if self.output is None else output  # which gets the folder's own name
        return [self._gcloud("scp", "--recurse", found, str(into), "--worker=0")]

    def _ssh(self, words):
        # ssh takes one string, which the worker's shell reads: every word is quoted for it.
        return self._gcloud("ssh", self.name, "--worker=all", f"--command={shlex.join(words)}")

    def _gcloud(self, what, *arguments):
        where = [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]
        return ["gcloud", "compute", "tpus", "tpu-vm", what, *arguments, *where]


def _run(step):
    print(f"[launch] {commands.shown(step)}", file=sys.stderr, flush=True)
    try:
        status = subprocess.run(step, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        raise Refused(f"{step[0]} cannot be found; install it first.") from None
    if status:
        print(f"[launch] that ended with status {status}", file=sys.stderr, flush=True)
    return 128 - status if status < 0 else status


def _git(folder, *words):
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"--source {folder}: git says: {done.stderr.strip()}")
    return done.stdout
