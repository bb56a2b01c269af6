"""slurm_submit_ddp.sh under a real Slurm, on nodes with addresses, names and processes of their own."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster import HOSTS, SLURM, Slurm, require, wait_until
from conftest import ROOT, SCRIPTS, weights

SUBMIT = ROOT / "slurm_submit_ddp.sh"
SMALL = ("--batch-size", 50, "--log-interval", 1)
TWO_PROCESSES = ("--gpus-per-node=1", "--cpus-per-task=1")  # one on each of two nodes


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, torchrun_on_path):
    require(*HOSTS, *SLURM)
    with Slurm(3, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def nothing_left(slurm):
    """A test that fails leaves no job behind that would keep the next ones waiting."""
    yield
    slurm.command("scancel", "--user=root")
    slurm.wait_until_empty()


@pytest.fixture
def train(slurm, small_mnist, tmp_path):
    """A function that submits a training from a folder of its own."""

    def submit(*flags, arguments=(), **env):
        return slurm.submit(*flags, SUBMIT, "--data-dir", small_mnist, *SMALL, *arguments, cwd=tmp_path, **env)

    return submit


@pytest.fixture(scope="module")
def undisturbed(slurm, small_mnist, tmp_path_factory):
    """The hash of two epochs on two nodes, one process each."""
    arguments = ("--data-dir", small_mnist, *SMALL, "--epochs", 2)
    job = slurm.submit(*TWO_PROCESSES, SUBMIT, *arguments, cwd=tmp_path_factory.mktemp("undisturbed"))
    state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log
    return weights(log)


@pytest.mark.parametrize("script", SCRIPTS)
def test_defaults(script, slurm, train, tmp_path):
    """Two nodes with two processes, as the file asks for; from another directory; an argument with spaces."""
    metrics = tmp_path / "a 'metrics' file*"
    job = train(arguments=("--epochs", 1, "--metrics", metrics), SCRIPT=script)
    state, code, log = slurm.finish(job)
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert metrics.exists()
    assert f"nodes node[0-1], master {slurm.nodes[0].address}:" in log
    assert "processes a node 2, CPUs a process 1\n" in log
    (command,) = re.findall("(?m)^command (.*)$", log)
    assert shlex.split(command)[-1] == str(metrics)
    assert re.search("rank 0, 1 on node0, .*\nrank 2, 3 on node1, ", log)
    assert script in command
    assert Path(slurm.job(job, "StdOut")).parent == tmp_path


def test_the_twins_end_on_one_hash(slurm, train, undisturbed):
    """With --gres, which has to win over the file's --gpus-per-node."""
    job = train("--gres=gpu:1", "--cpus-per-task=1", arguments=("--epochs", 2), SCRIPT=SCRIPTS[1])
    state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log
    assert "processes a node 1, CPUs a process 1\n" in log
    assert weights(log) == undisturbed


@pytest.mark.parametrize(
    ("flags", "env", "processes"),
    [
        (("--gpus-per-node=0",), {}, (1, 1)),
        (("--gpus-per-node=0", "--gpus=3"), {}, (2, 1)),
        (("--nodes=1", "--gpus-per-node=0", "--cpus-per-task=3"), {"NPROC_PER_NODE": 3}, (3,)),
    ],
)
def test_layouts(flags, env, processes, slurm, train):
    state, code, log = slurm.finish(train(*flags, arguments=("--epochs", 0), **env))
    assert (state, code) == ("COMPLETED", "0:0"), log
    found = [len(ranks.split(",")) for ranks in re.findall(r"(?m)^rank ([\d, ]+) on node\d", log)]
    assert found == list(processes)


@pytest.mark.parametrize("name", ["VENV", "MODULES"])
def test_the_environment_of_the_job(name, slurm, train, tmp_path):
    """--export keeps that of the shell out, torchrun on its path included."""
    if name == "MODULES":
        require("/usr/share/modules/init/bash")
    (tmp_path / "torch").write_text(f"#%Module\nprepend-path PATH {Path(sys.executable).parent}\n")
    variables = {"VENV": f"VENV={sys.prefix}", "MODULES": f"MODULES=torch,MODULEPATH={tmp_path}"}
    job = train("--nodes=1", "--gpus-per-node=0", f"--export={variables[name]}", arguments=("--epochs", 0))
    state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log


def test_a_head_node_that_is_127_0_1_1_to_itself(small_mnist, tmp_path, torchrun_on_path):
    """Where slurm.conf has no NodeAddr, Slurm goes by that name, too, and tells the head node a loopback address."""
    require(*HOSTS, *SLURM)
    with Slurm(2, tmp_path, addresses=False) as slurm:
        address = "srun --nodes=2 bash -c 'echo $SLURM_NODEID $SLURM_LAUNCH_NODE_IPADDR'"
        wrapped = slurm.submit("--nodes=2", "--wrap", address, cwd=tmp_path)
        assert "0 127." in slurm.finish(wrapped)[2]
        job = slurm.submit(SUBMIT, "--data-dir", small_mnist, *SMALL, "--epochs", 0, cwd=tmp_path)
        state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log
    assert "GLOO_SOCKET_IFNAME=eth0" in log


@pytest.fixture
def waiting(tmp_path):
    """A script in the place of the training. It waits for the file `end`, or a signal, unless it was requeued.

    With the argument "fail", it exits with 3 after a signal; with "fail1" at once, but only on the second node.
    """
    script = tmp_path / "waiting.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM):\n"
        "    signal.signal(number, lambda *_: sys.exit(3 if 'fail' in sys.argv else 0))\n"
        "sys.stdout.write(f'waiting {sys.argv[1:]}\\n')\n"  # in one piece, where print makes several under -u
        "while not os.path.exists('end') and os.environ['restarts'] == '0':\n"
        "    if 'fail' + os.environ['SLURM_NODEID'] in sys.argv:\n"
        "        sys.exit(3)\n"
        "    time.sleep(0.1)\n"
    )
    return {"SCRIPT": script}


def test_an_array(slurm, waiting, tmp_path):
    """Its tasks share their nodes, but no port; that one is out of time is nothing to the others."""
    array = slurm.submit("--array=0-1", *TWO_PROCESSES, SUBMIT, "--checkpoint", cwd=tmp_path, **waiting)
    tasks = [f"{array}_{i}" for i in range(2)]
    wait_until(lambda: all("waiting" in slurm.log(task) for task in tasks))
    one, other = sorted(tasks, key=lambda task: slurm.job(task, "JobId") == array)
    assert slurm.job(one, "NodeList") == slurm.job(other, "NodeList")
    slurm.command("scancel", "--signal=USR1", "--batch", other)  # whose id is also the array's
    assert slurm.finish(other)[0] == "COMPLETED"
    assert (slurm.job(one), slurm.job(one, "Restarts"), slurm.job(other, "Restarts")) == ("RUNNING", "0", "1")
    (tmp_path / "end").touch()
    assert slurm.finish(one)[0] == "COMPLETED"
    ports = re.findall(r"master [\d.]+:(\d+)", slurm.log(one) + slurm.log(other))
    assert len(ports) == len(set(ports)) == 3


def test_submitted_through_a_link(slurm, waiting, tmp_path):
    """By a relative path, from a directory that is not the job's; odd arguments come through."""
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "link").symlink_to(SUBMIT)
    (tmp_path / "end").touch()
    odd = ["", "new\nline", "* $HOME", " WorkDir=/ Command=/x"]
    flags = ("--nodes=1", f"--chdir={tmp_path}", f"--output={tmp_path}/log")
    job = slurm.submit(*flags, "a folder/link", *odd, cwd=tmp_path, **waiting)
    state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log
    assert f"waiting {odd}" in log


def test_a_failing_training_fails_the_job(slurm, train):
    state, code, log = slurm.finish(train(arguments=("--no-such-flag",)))
    assert (state, code) == ("FAILED", "1:0"), log
    assert "train_ddp.py: error: unrecognized arguments: --no-such-flag" in log


def test_a_failure_on_one_node_ends_the_other(slurm, waiting, tmp_path):
    state, code, log = slurm.finish(slurm.submit(SUBMIT, "fail1", cwd=tmp_path, **waiting))
    assert (state, code) == ("FAILED", "1:0"), log
    slurm.wait_until_empty()


def test_a_failure_to_save_fails_the_job(slurm, waiting, tmp_path):
    job = slurm.submit(SUBMIT, "--checkpoint", "fail", cwd=tmp_path, **waiting)
    wait_until(lambda: slurm.log(job).count("waiting [") == 4)
    slurm.command("scancel", "--signal=USR1", "--batch", job)
    state, code, log = slurm.finish(job)
    assert (state, code, slurm.job(job, "Restarts")) == ("FAILED", "1:0", "0"), log


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"SCRIPT": "none.py"}, f"there is no script {ROOT}/none.py"),
        ({"VENV": "none"}, "VENV=none cannot be activated"),
        ({"CONDA_ENV": "none"}, "CONDA_ENV=none: there is no conda here"),
        ({"MODULES": "none"}, "MODULES=none could not be loaded"),
        ({"NPROC_PER_NODE": "auto"}, "NPROC_PER_NODE=auto: give a number"),
    ],
)
def test_a_mistake(env, problem, slurm, train):
    state, _, log = slurm.finish(train(**env))
    assert state == "FAILED"
    assert f"error: {problem}" in log


def train_until(train, slurm, pattern="step 2/", **options):
    """Submit two epochs on two nodes with a checkpoint; return the job once `pattern` is in its log."""
    job = train(*TWO_PROCESSES, arguments=("--epochs", 2, "--checkpoint", "ck.pt", "--save-every", 1), **options)
    wait_until(lambda: slurm.job(job) == "RUNNING" and pattern in slurm.log(job))
    return job


def signal_workers(slurm, what):
    for node in slurm.nodes:
        for pid, line in node.processes().items():
            if f"-u {ROOT / SCRIPTS[0]}" in line:  # how torchrun calls it
                os.kill(pid, what)


def test_time_limit(slurm, train, undisturbed):
    """Slurm looks at limits every 30 s: until it has, the training stands still."""
    job = train_until(train, slurm)
    signal_workers(slurm, signal.SIGSTOP)
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    wait_until(lambda: "time is nearly up" in slurm.log(job))
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    signal_workers(slurm, signal.SIGCONT)
    state, code, log = slurm.finish(job)
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert slurm.job(job, "Restarts") == "1"
    assert "stopped early: requeued" in log and "restarts 1" in log
    assert "stopped by a signal in epoch " in log
    assert weights(log) == undisturbed


def test_no_more_requeues(slurm, train):
    job = train_until(train, slurm, MAX_REQUEUES=0)
    slurm.command("scancel", "--signal=USR1", "--batch", job)  # what Slurm does near the limit
    state, code, log = slurm.finish(job)
    assert (state, code) == ("FAILED", "1:0"), log
    assert "stopped early, and requeued 0 times before" in log


def test_without_a_checkpoint_the_time_is_used(slurm, waiting, tmp_path):
    job = slurm.submit(SUBMIT, cwd=tmp_path, **waiting)
    wait_until(lambda: slurm.log(job).count("waiting [") == 4)
    slurm.command("scancel", "--signal=USR1", "--batch", job)
    time.sleep(2)  # in which it would have been stopped
    assert slurm.job(job) == "RUNNING"
    (tmp_path / "end").touch()
    assert slurm.finish(job)[0] == "COMPLETED"


def test_preemption(slurm, train, undisturbed):
    job = train_until(train, slurm)
    urgent = train("--partition=urgent", "--nodes=3", arguments=("--epochs", 0))
    assert slurm.finish(urgent)[0] == "COMPLETED"
    assert slurm.job(job, "Restarts") == "1"
    state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log
    assert "stopped by a signal" in log
    assert weights(log) == undisturbed


def test_preemption_with_a_grace_time(slurm, waiting, tmp_path):
    """Slurm then only tells the processes, and the job ends before Slurm would requeue it."""
    job = slurm.submit("--partition=graceful", "--nodes=3", SUBMIT, "--checkpoint", cwd=tmp_path, **waiting)
    wait_until(lambda: slurm.log(job).count("waiting [") == 6)
    urgent = slurm.submit("--partition=urgent", "--nodes=3", SUBMIT, "--checkpoint", cwd=tmp_path, **waiting)
    wait_until(lambda: slurm.job(urgent) == "RUNNING")
    (tmp_path / "end").touch()
    assert slurm.finish(urgent)[0] == "COMPLETED"
    state, _, log = slurm.finish(job)
    assert (state, slurm.job(job, "Restarts")) == ("COMPLETED", "1"), log
    assert "stopped early: requeued" in log


def test_scancel(slurm, train, tmp_path):
    job = train_until(train, slurm)
    slurm.command("scancel", job)
    state, _, log = slurm.finish(job)
    assert state == "CANCELLED", log
    slurm.wait_until_empty()
    assert slurm.job(job, "Restarts") == "0"


def test_a_node_dies(small_mnist, undisturbed, tmp_path):
    """Slurm starts the job again, on the node that takes its place."""
    with Slurm(3, tmp_path) as slurm:
        arguments = ("--data-dir", small_mnist, *SMALL, "--epochs", 2, "--checkpoint", "ck.pt", "--save-every", 1)
        job = slurm.submit(*TWO_PROCESSES, SUBMIT, *arguments, cwd=tmp_path)
        wait_until(lambda: "step 2/" in slurm.log(job))
        slurm.nodes[1].power_off()
        state, _, log = slurm.finish(job)
    assert state == "COMPLETED", log
    assert "nodes node[0,2]" in log
    assert weights(log) == undisturbed
