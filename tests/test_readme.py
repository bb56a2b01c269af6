"""The README's commands run, print what it shows, and its flags are the scripts'."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from cluster import HOSTS, SLURM, Network, Slurm, require, wait_until
from conftest import ROOT, SCRIPTS, launch, own_lines, run

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
ENTER = "python3 -m venv .venv && . .venv/bin/activate && pip install -r "
FIRST, TESTS = COMMANDS[0], COMMANDS[1]
SOAKS = [command for command in COMMANDS if "tests/soak.py" in command]
TRAININGS = [command for command in COMMANDS[2:] if re.search(r" train_\w*\.py", command)]
TRAININGS = [command for command in TRAININGS if re.match("python train|torchrun", command)]
LAUNCHES = [command for command in COMMANDS if command.startswith("./launch_multinode_ddp.sh")]
ONE_NODE, PLAN, NODE0, NODE1, SSH = LAUNCHES
SUBMISSIONS = [command for command in COMMANDS if "sbatch" in command]


def shell(command, *flags):
    """Return the call of a shell with a command of the README; `flags` come last."""
    return ["bash", "-c", f"{command} {shlex.join(map(str, flags))}"]


def run_as_it_stands(command, *flags, **options):
    """Run a command of the README in a shell that has entered the virtual environment; `flags` come last."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(shell(command, *flags), PATH=path, **options)


def shape(text):
    """Return text with its numbers, host names and hashes made alike: these differ by machine."""
    text = re.sub(r"[0-9a-f]{64}", "HASH", text)
    text = re.sub(r" on \S+, ", " on HOST, ", text)
    text = re.sub(r"(?<!\S)/\S+", "PATH", text)
    text = re.sub(r"\S+:29500", "MASTER", text)
    return re.sub(r"\d[\d.,e+-]*\w*", "0", text)


def shapes(lines):
    """Return the shapes of lines of two nodes, which may come in any order, and more or fewer of each."""
    return {shape(line) for line in lines if not re.search(r"socket\.cpp|DUE TO JOB REQUEUE|^(node\d: )?\.*$", line)}


def shown_after(command):
    """Return the lines that the README shows after a command."""
    return re.search(r"```text\n(.*?)```", README.partition(command)[2], re.S).group(1).splitlines()


@pytest.fixture
def copy(tmp_path, torchrun_on_path):
    """A copy of the scripts, where commands may leave their files."""
    for script in (*SCRIPTS, "launch_multinode_ddp.sh", "slurm_submit_ddp.sh"):
        shutil.copy(ROOT / script, tmp_path)
    return tmp_path


def test_every_command_is_run_or_known():
    assert FIRST.startswith(ENTER + "requirements.txt && ")
    assert TESTS == ENTER + "tests/requirements.txt && pytest tests"  # which is how this test came to run
    known = {FIRST, TESTS, *TRAININGS, *SOAKS, *LAUNCHES, *SUBMISSIONS, f"diff {' '.join(SCRIPTS)}"}
    assert set(COMMANDS) == known
    assert len(TRAININGS) >= 6 and len(SOAKS) == 2 and len(SUBMISSIONS) == 4


def test_the_first_command_prints_what_is_shown():
    result = run_as_it_stands(FIRST.split(" && ")[-1])
    assert result.returncode == 0, result.stderr
    assert list(map(shape, own_lines(result))) == list(map(shape, shown_after(FIRST)))


@pytest.mark.parametrize("command", TRAININGS)
def test_training_command(command, small_mnist, copy):
    result = run_as_it_stands(command, "--data-dir", small_mnist, "--epochs", 1, cwd=copy)
    assert result.returncode == 0, result.stderr
    assert "the same on every rank" in result.stdout


@pytest.mark.parametrize("command", SOAKS)
def test_soak_command(command, small_mnist):
    result = run_as_it_stands(command, "--data-dir", small_mnist, "--batch-size", 16, "--kills", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(set(re.findall("weights sha256 [0-9a-f]{64}", result.stdout))) == 1
    assert " killed " in result.stdout


def test_the_launcher_on_one_node(small_mnist, copy):
    """Its command is the one beside it."""
    dry = run_as_it_stands(ONE_NODE.replace(" -- ", " --dry-run -- "), cwd=copy).stdout
    torchrun = COMMANDS[COMMANDS.index(ONE_NODE) + 1]
    assert sorted(dry.replace("nproc-per-node", "nproc_per_node").split()) == sorted(torchrun.split())
    assert run_as_it_stands(ONE_NODE, "--data-dir", small_mnist, "--epochs", 0, cwd=copy).returncode == 0


def test_the_launcher_prints_what_is_shown(copy):
    assert run_as_it_stands(PLAN, cwd=copy).stdout.splitlines() == shown_after(PLAN)


def test_the_launcher_on_several_nodes(copy):
    """On two hosts, by hand and over ssh, with a smaller data set."""
    require(*HOSTS)
    small = ("--train-size", 600, "--batch-size", 50)
    (copy / "network").mkdir()
    with Network(2, copy / "network") as network:
        shown = shapes(shown_after(SSH))
        result = network.login.run(*shell(SSH, *small), cwd=copy)
        assert result.returncode == 0, result.stderr
        assert shapes((result.stderr + result.stdout).splitlines()) == shown
        pairs = zip(network.nodes, (NODE0, NODE1), strict=True)
        nodes = [host.background(*shell(command, *small), cwd=copy, log=copy / host.name) for host, command in pairs]
        with nodes[0], nodes[1]:
            assert [node.wait() for node in nodes] == [0, 0]
        lines = "".join(node.output() for node in nodes).splitlines()
        assert shapes(lines) == {re.sub("^node0: ", "", line) for line in shown}


def test_slurm(small_mnist, copy):
    """On four nodes with eight GPUs that are none; one process each. The last is told that its time is nearly up."""
    require(*HOSTS, *SLURM)
    (copy / "cluster").mkdir()
    with Slurm(4, copy / "cluster", gpus=8) as slurm:

        def submit(command, *flags, **env):
            return slurm.login.must(*shell(command, *flags), cwd=copy, **slurm.env, **env).split()[-1]

        flags = ("--data-dir", small_mnist, "--epochs", 0)
        jobs = [submit(command, *flags, NPROC_PER_NODE=1) for command in SUBMISSIONS[:3]]
        assert [slurm.finish(job)[0] for job in jobs] == ["COMPLETED"] * 3
        (copy / "ck.pt").unlink()
        flags = ("--train-size", 2000, "--batch-size", 50)
        last = submit(SUBMISSIONS[3], *flags)
        wait_until(lambda: slurm.job(last) == "RUNNING" and "steps per epoch" in slurm.log(last))
        slurm.command("scancel", "--signal=USR1", "--batch", last)
        state, _, log = slurm.finish(last)
        assert state == "COMPLETED", log
        log = log.replace(shlex.join(map(str, flags)), "")
        assert shapes(line.rstrip() for line in log.splitlines()) == shapes(shown_after(SUBMISSIONS[3]))


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_are_those_of_the_table(script):
    table = set(re.findall(r"^\| `(--[a-z-]+)", README, re.M)) - {"--sync"}
    assert table
    flags = set(re.findall(r"^  (--[a-z-]+)", launch(ROOT / script, "--help").stdout, re.M))
    assert flags == table | ({"--sync"} if "manual" in script else set())
