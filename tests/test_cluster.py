"""The cluster to practise on, as one types in a terminal."""

import os
import subprocess
import sys

import pytest
from cluster import SLURM_TOOLS, TRY, WORKER, require
from conftest import Background, run, wait_until

pytestmark = pytest.mark.cluster
START = (sys.executable, "tests/cluster.py")


@pytest.fixture
def terminal(tmp_path):
    """A terminal in which the cluster starts, and must leave nothing when it ends."""
    require(*SLURM_TOOLS)
    temporary, interfaces = tmp_path / "tmp", {*os.listdir("/sys/class/net")}
    temporary.mkdir()
    command = ("script", "--quiet", "--return", "--command", " ".join(START), "/dev/null")
    with Background(*command, log=tmp_path / "log", stdin=subprocess.PIPE, TMPDIR=temporary) as terminal:
        yield terminal
        terminal.wait(60)
        wait_until(lambda: not terminal.pids(), timeout=20)
        assert ([*temporary.iterdir()], {*os.listdir("/sys/class/net")}) == ([], interfaces)


def press(terminal, keys):
    os.write(terminal.process.stdin.fileno(), keys.encode())


def test_a_node_is_taken_away_and_given_back(terminal, tmp_path):
    """By the lines that the cluster says to try, as they stand."""
    words = ("FLAGS=", "$(sbatch ", "tail -F", "scontrol ")
    (flags,), (sbatch,), (tail,), (down, resume) = ([line for line in TRY.splitlines() if w in line] for w in words)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    terminal.wait_for("login:.*# ")
    press(terminal, f"export SCRIPT={worker}\n{flags}\n{sbatch}\n{tail}\n")
    terminal.wait_for("\nstarted 1 1 (?s:.*)\nstarted 1 1 ")
    press(terminal, "\x03")  # ends `tail`, and nothing else
    press(terminal, f"{down}\n{resume}\n{tail}\n")
    terminal.wait_for("restart 1(?s:.*)\nstarted 1 1 (?s:.*)\nstarted 1 1 ")
    (tmp_path / "worker.py.end").touch()
    press(terminal, "\x03")
    press(terminal, "until scontrol show job $JOB | grep JobState=COMPLETED; do sleep 0.1; done; exit\n")


def test_ctrl_c_while_it_starts(terminal, tmp_path):
    wait_until(lambda: [*tmp_path.glob("tmp/*/node0.hosts")])
    press(terminal, "\x03")
    assert (terminal.wait(60), "Traceback" in terminal.output()) == (130, False)


def test_the_terminal_is_closed(terminal):
    terminal.wait_for("login:.*# ")
    terminal.process.kill()


def test_what_is_missing_is_named():
    result = run(START, PATH="")
    assert result.stderr.startswith("tests/cluster.py: needs unshare, ") and result.stderr.count("\n") == 1
    assert "slurmd (Debian: apt install util-linux " in result.stderr and "slurm-client" in result.stderr
