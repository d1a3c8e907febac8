"""`shardwise launch local`, with small scripts in place of the training program."""

import itertools
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shardwise.run import launch
from shardwise.run.launch import supervising
from shardwise.run.launch.children import Child, ended

CHILD = """
import json, os, signal, subprocess, sys, time
given = sys.argv[1:]
def flag(name): return given[given.index(name) + 1]
index, count, run = int(flag("--processes.index")), int(flag("--processes.count")), flag("--run")
def note(step, doing, line="", **other):
    state = dict(process=index, pid=os.getpid(), host="here", step=step, doing=doing, time=0.0)
    file = f"{run}/processes/{index}.json"
    os.makedirs(os.path.dirname(file), exist_ok=True)
    open(file + ".new", "w").write(json.dumps(state | dict(line=line) | other))
    os.replace(file + ".new", file)
def mark(name):
    open(f"{run}/{name}.{index}", "w").close()
def wait_for(name, who=range(count)):
    while not all(os.path.exists(f"{run}/{name}.{i}") for i in who): time.sleep(0.01)
def forever():
    while True: time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """run(script, flag, ...): the status, what was printed, and what was said beside it."""

    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def go(script, *flags, processes=3):
        body = tmp_path / "child.py"
        body.write_text(CHILD + textwrap.dedent(script))
        argv = ["local", "--processes", str(processes), *flags, "--", "train", "--run"]
        status = launch.main([*argv, str(tmp_path)], (sys.executable, "-S", str(body)))
        return status, *capfd.readouterr()

    return go


def is_gone(pid):
    """Whether a process has ended; an orphan's parent may be slow to wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def await_end(pids):
    deadline = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if not is_gone(pid)]
        time.sleep(0.02)


def pids(folder):
    return [int(file.read_text()) for file in folder.glob("pid.*")]


def test_every_line_of_every_process_is_shown_in_order_with_its_number(run):
    draw = random.Random(0)
    each = [["x" * draw.choice([0, 1, 70, 70000]) + str(i) for i in range(40)] for _ in range(3)]
    status, out, err = run(f"""
        for i, line in enumerate({each!r}[index]):
            print(line, file=(sys.stdout, sys.stderr)[i % 2])
        """)
    assert (status, err) == (0, "")
    for index, lines in enumerate(each):
        shown = [line[4:] for line in out.splitlines() if line.startswith(f"[{index}] ")]
        assert shown == lines
    assert len(out.splitlines()) == sum(map(len, each))


def test_what_a_process_wrote_last_is_shown_however_it_died(run):
    _, out, _ = run(
        r"""
        print("printed by Python", end="")
        os.write(1, b" and not \xff text")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        processes=1,
    )
    assert out == "[0] printed by Python and not \\xff text\n"


def test_a_process_is_given_its_place_and_an_address_of_this_machine_alone(run):
    status, out, _ = run("print(*given[3:])")
    assert status == 0
    found = sorted(line.split()[1:] for line in out.splitlines())
    address = found[0][1]
    assert address.startswith("127.0.0.1:") and 1024 < int(address.partition(":")[2]) < 65536
    flags = ["--processes.address", address, "--processes.count", "3", "--processes.index"]
    assert found == [[*flags, str(index)] for index in range(3)]


@pytest.mark.parametrize("codes", [*itertools.product([0, 75, 3, -9], repeat=2)])
def test_the_status_for_all_is_that_of_the_first_failure(codes):
    failed = {3: 3, -9: 137}
    expected = next((failed[code] for code in codes if code in failed), 75 if 75 in codes else 0)
    assert supervising.overall(codes) == expected


@pytest.mark.parametrize("codes, expected", [((0, 0, 0), 0), ((0, 75, 0), 75), ((75, 0, 4), 4)])
def test_the_launcher_exits_with_the_status_for_all(run, codes, expected):
    status, _, err = run(f"sys.exit({codes!r}[index])")
    assert status == expected
    assert ("process 2" in err.splitlines()[-1]) if expected == 4 else not err


@pytest.mark.parametrize(
    "end, status, told, raised",
    [
        ("sys.exit(3)", 3, "exited with status 3", ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV (11)", ""),
        ("raise ValueError('no such batch')", 1, "exited with status 1", "no such batch"),
        # The runtime's own words after it, more than are remembered.
        (
            r"print('Traceback (most recent call last):\n  File\nValueError: no such batch');"
            r"print('and so on\n' * 30); os._exit(1)",
            1,
            "exited with status 1",
            "no such batch",
        ),
    ],
)
def test_the_first_failure_ends_those_who_ignore_sigterm_and_is_shown_last(
    run, tmp_path, end, status, told, raised
):
    found, _, err = run(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{{run}}/pid.{{index}}", "w").write(str(os.getpid()))
        note(17, "stepping", "loss 2.5")
        mark("ready")
        wait_for("ready")
        if index == 1:
            note(17, "reading", "batch 18")
            print("the last line")
            {end}
        forever()
        """,
        "--grace",
        "0.2",
    )
    assert found == status
    *others, last = err.splitlines()
    assert last.startswith("[launch] process 1 (pid ") and last.endswith(
        f"at step 17, reading, {told}; its note says: batch 18"
        + f"; its last traceback ends: ValueError: {raised}" * bool(raised)
    )
    assert any("[launch] [1] " in line for line in others)
    assert all(f"process {i} was killed by SIGKILL (9)" in err for i in (0, 2))
    assert len(pids(tmp_path)) == 3 and all(map(is_gone, pids(tmp_path)))


def test_of_several_that_end_at_once_one_that_aborts_comes_last():
    """The runtime aborts those whose peer is gone."""
    each = "os.abort()", "sys.exit(3)", "os.kill(os.getpid(), 9)"
    words = [[sys.executable, "-S", "-c", f"import os, sys; {end}"] for end in each]
    children = [Child(index, command, {}) for index, command in enumerate(words)]
    await_end([child.pid for child in children])
    assert [child.code for child in ended(children)] == [3, -9, -6]


def test_after_a_failure_the_others_may_leave_by_themselves(run, tmp_path):
    status, out, err = run(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("left by itself"))
        mark("ready")
        wait_for("ready")
        if index == 1: sys.exit(3)
        forever()
        """,
        *("--grace", "1000"),
    )
    assert status == 3 and err.splitlines()[-1].endswith("exited with status 3")
    assert sorted(out.splitlines()) == ["[0] left by itself", "[2] left by itself"]


def test_what_a_process_started_ends_with_it(run, tmp_path):
    status, _, _ = run("""
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        open(f"{run}/pid.{index}", "w").write(str(child.pid))
        os._exit(0)
        """)
    assert status == 0 and len(pids(tmp_path)) == 3
    await_end(pids(tmp_path))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_passed_on_once_and_all_may_save_and_leave(run, tmp_path, name):
    before = signal.getsignal(getattr(signal, name))
    status, out, err = run(f"""
        seen = []
        signal.signal(signal.{name}, lambda number, _: seen.append(number))
        mark("ready")
        wait_for("ready")
        if index == 0: os.kill(os.getppid(), signal.{name})
        while not seen: time.sleep(0.01)
        time.sleep(0.3)
        print("saved after", *[signal.Signals(number).name for number in seen])
        sys.exit(75)
        """)
    assert status == 75
    assert sorted(out.splitlines()) == [f"[{index}] saved after {name}" for index in range(3)]
    assert name in err and "process" not in err
    assert signal.getsignal(getattr(signal, name)) == before


def test_a_second_signal_kills_those_that_wait(run, tmp_path):
    status, _, err = run(
        """
        signal.signal(signal.SIGTERM, lambda *_: mark("told"))
        mark("ready")
        wait_for("ready")
        if index == 0: os.kill(os.getppid(), signal.SIGTERM)
        wait_for("told")
        if index == 0: os.kill(os.getppid(), signal.SIGTERM)
        forever()
        """,
        "--grace",
        "1000",
    )
    assert status == 137
    assert err.splitlines()[-1] == "[launch] a second signal, SIGTERM (15), killed those that ran"


@pytest.mark.slow
def test_signals_arrive_also_while_nobody_reads_what_is_printed(tmp_path):
    launcher = start_launcher(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, lambda *_: mark("told"))
        open(f"{run}/pid.{index}", "w").write(str(os.getpid()))
        os.set_blocking(1, False)
        full = 0
        while True:  # until there is no room left, here and in the launcher
            try:
                os.write(1, b"x" * 4095 + b"\\n")
                full = 0
            except BlockingIOError:
                full += 1
                time.sleep(0.01)
            if full == 50: mark("full")
        """,
        stdout=subprocess.PIPE,
    )
    try:
        for name in "full", "told":
            wait_until(lambda: len(list(tmp_path.glob(f"{name}.*"))) == 3, launcher)  # noqa: B023
            launcher.send_signal(signal.SIGTERM)
        await_end(pids(tmp_path))
    finally:
        launcher.kill()
        launcher.communicate()


def wait_until(true, launcher):
    deadline = time.monotonic() + 60
    while not true():
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


HANGING = """
    step, doing = {notes!r}[index]
    note(step, doing, f"line of {{index}}")
    print("words of", index)
    {then}
    forever()
    """


@pytest.mark.parametrize(
    "notes, then, odd",
    [
        ([(17, "stepping"), (17, "stepping"), (17, "reading")], "", (2,)),
        ([(17, "reading"), (18, "stepping"), (18, "stepping")], "", (0,)),
        ([(10, "stepping"), (9, "stepping"), (10, "stepping")], "", (1,)),
        (
            [(4, "stepping"), (4, "stepping"), (4, "stepping")],
            "if index == 1: os.kill(os.getpid(), signal.SIGSTOP)",
            (1,),
        ),
        ([(4, "stepping"), (4, "stepping"), (4, "stepping")], "", ()),
    ],
)
def test_processes_that_hang_are_ended_and_the_odd_one_is_named(run, notes, then, odd):
    script = HANGING.format(notes=notes, then=then)
    status, _, err = run(script, "--hang-after", "0.4", "--grace", "0.2")
    assert status in (137, 143)  # which of them ended first does not matter
    last = err.splitlines()[-1]
    for index in odd:
        assert (
            f"process {index} " in last and f"at step {notes[index][0]}, {notes[index][1]}" in last
        )
        alone = "hangs, while the others wait" if notes[index][1] == "reading" else "differs from"
        assert ("is stopped" if "SIGSTOP" in then else alone) in last
        assert f"[launch] [{index}] words of {index}" in err
    if not odd:
        assert "cannot be told" in last
    for index, (step, doing) in enumerate(notes):
        assert f"process {index}: step {step}, {doing}, for" in err


@pytest.mark.parametrize("end", ["sys.exit(70)", "time.sleep(1); os.abort()"])
def test_one_that_ends_for_having_waited_is_not_the_one_that_is_named(run, monkeypatch, end):
    """Its own watchdog ends it, or the runtime's heartbeat aborts it."""
    monkeypatch.setattr(supervising, "STANDSTILL", 0.2)
    status, _, err = run(
        f"""
        note(17, "reading" if index == 1 else "stepping")
        mark("ready")
        wait_for("ready")
        if index == 2: {end}
        forever()
        """,
        *("--grace", "1000"),
    )
    told = {70: "exited with status 70 (no progress)", 134: "was killed by SIGABRT (6)"}[status]
    assert f"process 2 {told}; ending the others" in err
    last = err.splitlines()[-1]
    assert last.startswith("[launch] process 1 ") and "at step 17, reading, hangs" in last


def test_one_that_fails_while_others_move_is_the_one_that_is_named(run):
    status, _, err = run(
        """
        note(17, "reading" if index == 1 else "stepping")
        mark("ready")
        wait_for("ready")
        if index == 2: os.abort()
        forever()
        """
    )
    last = err.splitlines()[-1]
    assert status == 134 and last.startswith("[launch] process 2 ") and "SIGABRT" in last


def test_notes_of_an_earlier_run_do_not_count(run, tmp_path):
    status, _, err = run(
        """
        note(9, "stepping", pid=1)
        time.sleep(0.8)
        """,
        "--hang-after",
        "0.1",
        "--hang-after-long",
        "0.1",
    )
    assert (status, err) == (0, "")


def test_a_note_that_is_none_ends_nobody(run, tmp_path):
    status, _, err = run(
        """
        note(9, "stepping")
        if index == 1: open(f"{run}/processes/1.json", "w").write("[")
        time.sleep(0.8)
        """,
        "--hang-after",
        "0.1",
    )
    assert status == 0
    assert len(err.splitlines()) == 1 and "1.json is no note" in err


LAUNCHER = """
import sys
from shardwise.run import launch
open(sys.argv[1] + ".begun", "w").close()
sys.exit(launch.main(sys.argv[2:], (sys.executable, "-S", sys.argv[1])))
"""

# A launcher for each folder that it reads, and each a process of its own: imported once.
FORKING = """
import os, sys
from shardwise.run import launch
for folder in map(str.strip, sys.stdin):
    if pid := os.fork():
        print(pid, flush=True)
        os.waitpid(pid, 0)
        continue
    given = ["local", "--processes", "3", "--", "train", "--run", folder]
    os._exit(launch.main(given, (sys.executable, "-S", sys.argv[1])))
"""


def start_launcher(folder, script, stdout=subprocess.DEVNULL):
    body = folder / "child.py"
    body.write_text(CHILD + textwrap.dedent(script))
    argv = ["local", "--processes", "3", "--", "train", "--run", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(body), *argv],
        stdout=stdout,
        stderr=subprocess.DEVNULL,
    )


STUBBORN = """
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(each, signal.SIG_IGN)
    open(f"{run}/pid.new.{index}", "w").write(str(os.getpid()))
    os.replace(f"{run}/pid.new.{index}", f"{run}/pid.{index}")
    mark("ready")
    forever()
    """


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    launcher = start_launcher(tmp_path, STUBBORN)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 3, launcher)
    finally:
        launcher.kill()
        launcher.wait()
    assert len(pids(tmp_path)) == 3
    await_end(pids(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_no_process_outlives_a_launcher_that_is_killed_while_it_starts_them(tmp_path):
    body = tmp_path / "child.py"
    body.write_text(CHILD + textwrap.dedent(STUBBORN))
    command = [sys.executable, "-c", FORKING, str(body)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as forking:

        def begin(name):
            folder = tmp_path / name
            folder.mkdir()
            print(folder, file=forking.stdin)
            return folder, int(forking.stdout.readline()), time.monotonic()

        def end(folder, launcher):
            os.kill(launcher, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while found := running_in(folder):  # those that were on their way, too
                assert time.monotonic() < deadline, found
                time.sleep(0.02)

        folder, launcher, begun = begin("whole")
        while len(list(folder.glob("ready.*"))) < 3:
            time.sleep(0.001)
        takes = time.monotonic() - begun
        end(folder, launcher)
        for i in range(20):
            folder, launcher, _ = begin(str(i))
            time.sleep(takes * (0.5 + i / 40))
            end(folder, launcher)
        forking.stdin.close()


def running_in(folder):
    """Processes whose arguments name the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in file.read_bytes():
                found.append(file.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_dry_run_prints_the_argument_lists_and_starts_nothing(run, tmp_path):
    status, out, _ = run("mark('started')", "--dry-run")
    lines = [shlex.split(line) for line in out.splitlines()]
    assert status == 0 and [line[-1] for line in lines] == ["0", "1", "2"]
    for line in lines:
        assert line[:5] == [sys.executable, "-S", str(tmp_path / "child.py"), "train", "--run"]
        assert line[6:9:2] == ["--processes.address", "--processes.count"]
    assert not list(tmp_path.glob("started.*"))


@pytest.mark.parametrize(
    "argv, told",
    [
        (["local"], "after -- stands nothing"),
        (["local", "--", "--run", "x"], "after -- stands '--run'"),
        (
            ["local", "--", "train", "--processes.count", "2"],
            "--processes.count is what the launcher",
        ),
        (["local", "--processes", "0", "--", "train"], "--processes 0: expected 1 or more"),
        (["local", "--grace", "-1", "--", "train"], "--grace -1.0: expected 0"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_runs(capfd, argv, told):
    assert launch.main(argv, ("/no/such/program",)) == 2
    assert told in capfd.readouterr().err


def test_a_flag_that_there_is_not_is_named(capfd):
    with pytest.raises(SystemExit) as left:
        launch.main(["local", "--proceses", "4", "--", "train"])
    assert left.value.code == 2
    assert "--proceses" in capfd.readouterr().err


@pytest.mark.parametrize("launcher", ["local", "slurm", "ray"])
@pytest.mark.parametrize("run", [["--run", "gs://bucket/run"], ["--run=s3://bucket/run"]])
def test_a_run_folder_that_is_an_address_is_refused(launcher, run, capfd):
    assert launch.main([*launcher.split(), "--", "train", *run]) == 2
    assert "bucket/run is an address, and a run folder lies on a disk" in capfd.readouterr().err


def test_a_file_of_one_s_own_is_launched_with_the_same_flags(tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text("import sys; print(*sys.argv[1:])")
    argv = ["local", "--processes", "2", "--", str(file), "--run", str(tmp_path)]
    assert launch.main([*argv, "--processes.hang", "9"]) == 0  # which no launcher sets
    printed = capfd.readouterr().out
    for index in range(2):
        assert re.search(
            rf"--run .*--processes.hang 9 --processes.address .*--processes.index {index}", printed
        )
