"""launch_multinode_ddp.sh on one machine, and on hosts with addresses, names and processes of their own."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from cluster import HOSTS, Network, require, wait_until
from conftest import ROOT, SCRIPTS, Background, run, weights

LAUNCHER = ROOT / "launch_multinode_ddp.sh"
WORKER = f"-u {ROOT / SCRIPTS[0]}"  # how torchrun calls it
ODD = 'it\'s "odd" * $HOME; true'  # as the name of a file


pytestmark = pytest.mark.usefixtures("torchrun_on_path")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    require(*HOSTS)
    with Network(3, tmp_path_factory.mktemp("network")) as network:
        yield network


@pytest.fixture
def small(small_mnist):
    """Arguments that make a training short."""
    return ("--data-dir", small_mnist, "--batch-size", 50, "--log-interval", 1, "--epochs", 3)


@pytest.fixture(scope="module")
def undisturbed(network, small_mnist):
    """The hash of three epochs on two hosts, one process each."""
    arguments = ("--data-dir", small_mnist, "--batch-size", 50, "--epochs", 3)
    return weights(network.login.must(LAUNCHER, "--hosts=node0,node1", "--env=OMP_NUM_THREADS=1", "--", *arguments))


def printed(*arguments):
    """Return the commands that the launcher prints for the nodes."""
    result = run([LAUNCHER, *arguments])
    assert result.returncode == 0, result.stderr
    return re.findall(r"# node \d+\n(.*)", result.stdout)


@pytest.mark.parametrize("script", ["launch_multinode_ddp.sh", "slurm_submit_ddp.sh", ".ci/run"])
@pytest.mark.parametrize("check", [["shellcheck"], ["shfmt", "--diff", "--indent", "4"]])
def test_shell(check, script):
    require(check[0], root=False)
    result = run([*check, script])
    assert result.returncode == 0, result.stdout


def test_without_arguments_an_example_is_printed():
    first, second = printed()
    assert first.startswith("torchrun ") and "--node-rank=0" in first
    assert second == first.replace("--node-rank=0", "--node-rank=1")


@pytest.mark.parametrize("restarts", [0, 1])
def test_printed_commands_run_as_printed(restarts, small, free_port, tmp_path):
    """In two shells of one machine, which stand for two nodes."""
    metrics = tmp_path / ODD
    flags = ("--nnodes=2", "--nproc_per_node", 2, "--master-addr=127.0.0.1", "--master-port", free_port)
    arguments = ("--", *small, "--epochs", 0, "--metrics", metrics)
    commands = printed(*flags, "--max-restarts", restarts, "--env", f"VARIABLE={ODD}", *arguments)
    assert len(commands) == 2
    with contextlib.ExitStack() as stack:
        logs = [tmp_path / f"{i}.log" for i in range(2)]
        shells = [stack.enter_context(Background("bash", "-c", commands[i], log=logs[i])) for i in range(2)]
        assert [shell.wait() for shell in shells] == [0, 0]
    assert metrics.exists()
    assert "global batch 200 = 4 processes" in "".join(log.read_text() for log in logs)


def test_one_node(small, tmp_path):
    arguments = ("--", *small, "--epochs", 0, "--metrics", tmp_path / ODD)
    result = run([LAUNCHER, "--nproc-per-node=2", "--script", SCRIPTS[1], *arguments], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "global batch 100 = 2 processes" in result.stderr
    assert (tmp_path / ODD).exists()


def test_dry_run(network):
    def dry(*arguments):
        return network.nodes[0].must(LAUNCHER, *arguments, "--dry-run", "--", "a b")

    assert shlex.split(dry())[-1] == "a b"
    for processes in ("gpu", "cpu", "auto"):
        assert f"torchrun --nproc-per-node={processes} --standalone " in dry("--nproc-per-node", processes)
    one = dry("--nnodes=2", "--node-rank=0", "--master-addr=node0", "--env", "A=x y")
    assert shlex.split(one)[:4] == ["env", "GLOO_SOCKET_IFNAME=eth0", "A=x y", "torchrun"]
    one = dry("--nnodes=2", "--node-rank=0", "--master-addr=node0", "--interface=eth0")
    assert shlex.split(one)[1:3] == ["GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0"]
    one = ("--nnodes=2", "--node-rank=0", "--master-addr=node0", "--join-timeout=2")
    assert "--rdzv-conf=timeout=2" in shlex.split(dry(*one))
    restarting = shlex.split(dry(*one, "--max-restarts=1"))
    assert "--rdzv-conf=is_host=1,join_timeout=2" in restarting
    assert f"--local-addr={network.nodes[0].address}" in restarting
    flags = ("--nproc-per-node=3", "--max-restarts=1", "--master-port=1", "--join-timeout=2", "--interface=eth0")
    both = dry("--hosts=node0,node1", "--venv=a b", "--env=HOME", *flags).splitlines()
    assert [shlex.split(line)[-2] for line in both] == ["node0", "node1"]
    passed_on = shlex.split(shlex.split(both[1])[-1])
    venv = ("--python=a b/bin/python", f"--env=HOME={os.environ['HOME']}")
    for flag in (*flags, *venv, "--node-rank=1", "--nnodes=2", "--master-addr=node0", f"--script={ROOT}/train_ddp.py"):
        name, _, value = flag.partition("=")
        assert flag in passed_on or passed_on[passed_on.index(name) + 1] == value
    network.wait_until_empty()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--epochs", 3), "unknown argument --epochs (see --help; those of the script follow --)"),
        (("nnodes", "2"), "unknown argument nnodes"),
        (("--nnodes",), "--nnodes needs a value"),
        (("--nnodes=0",), "--nnodes 0: give a number from 1 to 9999"),
        (("--nproc-per-node=two",), "--nproc-per-node two: give a number from 1 to 9999"),
        (("--nnodes=2", "--node-rank=2"), "--node-rank 2: give a number from 0 to 1"),
        (("--nnodes=2", "--node-rank=0"), "--node-rank: give --master-addr, too"),
        (("--nnodes=2", "--node-rank=0", "--master-addr=nowhere.invalid"), "--master-addr nowhere.invalid: unknown"),
        (("--master-port=http",), "--master-port http: give a number from 1 to 65535"),
        (("--max-restarts=-1",), "--max-restarts -1: give a number from 0"),
        (("--join-timeout=0",), "--join-timeout 0: give a number from 1"),
        (("--hosts=node0,node0",), "--hosts names a host twice"),
        (("--hosts=node0,node1", "--nnodes=3"), "--hosts names 2 hosts, but --nnodes is 3"),
        (("--hosts=node0", "--node-rank=0"), "--hosts starts every node: leave out --node-rank"),
        (("--hosts=-oProxyCommand=x",), "--hosts: '-oProxyCommand=x' is not the name of a host"),
        (("--hosts=",), "--hosts needs a value"),
        (("--env==x",), "--env =x: give NAME or NAME=VALUE"),
        (("--env=NO_SUCH_VARIABLE",), "--env NO_SUCH_VARIABLE: there is no such variable here"),
        (("--script=none.py",), f"there is no script {ROOT}/none.py"),
        (("--venv=none",), "there is no none/bin/python"),
    ],
)
def test_a_mistake_is_one_line(arguments, problem):
    result = run([LAUNCHER, *arguments])
    assert result.returncode == 2
    assert result.stderr.startswith(f"launch_multinode_ddp.sh: error: {problem}")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_busy_port(free_port):
    with socket.create_server(("0.0.0.0", free_port)):
        result = run([LAUNCHER, "--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port", free_port])
    assert result.returncode == 2
    assert result.stderr.endswith(f"error: port {free_port} is in use: give another --master-port\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("restarts", "message"), [(0, "1/2 clients joined"), (1, "RendezvousTimeoutError")])
def test_a_node_that_never_comes(restarts, message, free_port):
    node = ("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port", free_port)
    result = run([LAUNCHER, *node, "--join-timeout=3", "--max-restarts", restarts])
    assert result.returncode == 1
    assert result.stderr.startswith(f"node 0 of 2: waiting for the others at 127.0.0.1:{free_port}, 3 s at most\n")
    assert message in result.stderr


def test_printed_commands_on_hosts(network, small, tmp_path):
    """On three, each of which takes its own name for 127.0.1.1."""
    flags = ("--nnodes=3", "--master-addr=node0", "--interface=eth0", "--env=OMP_NUM_THREADS=1")
    commands = printed(*flags, "--", *small)
    with contextlib.ExitStack() as stack:
        shells = []
        for node, command in zip(network.nodes, commands, strict=True):
            shells.append(stack.enter_context(node.background("bash", "-c", command, log=tmp_path / node.name)))
        assert [shell.wait() for shell in shells] == [0, 0, 0], [shell.output() for shell in shells]
    assert weights(shells[0].output())


def test_a_restart_between_hosts(network, small, tmp_path):
    """The interface is found, and torchrun starts all processes again when one has been killed."""
    flags = ("--nnodes=3", "--master-addr=node0", "--max-restarts=1", "--env=OMP_NUM_THREADS=1")
    arguments = ("--", *small, "--checkpoint", "ck.pt", "--save-every", 1)
    with contextlib.ExitStack() as stack:
        shells = []
        for rank, node in enumerate(network.nodes):
            command = (LAUNCHER, *flags, "--node-rank", rank, *arguments)
            shells.append(stack.enter_context(node.background(*command, cwd=tmp_path, log=tmp_path / node.name)))
        wait_until(lambda: any("step 2/" in shell.output() for shell in shells))
        network.nodes[2].kill(WORKER)
        assert [shell.wait() for shell in shells] == [0, 0, 0], [shell.output() for shell in shells]
    output = "".join(shell.output() for shell in shells)
    assert "going on from " in output
    assert weights(output)


@pytest.mark.parametrize(("script", "hosts"), [(SCRIPTS[0], 3), (SCRIPTS[1], 2)])
def test_over_ssh(script, hosts, network, small, undisturbed, tmp_path):
    """From one of the hosts, which reaches itself by a loopback address."""
    names = ",".join(f"node{i}" for i in range(hosts))
    arguments = ("--", *small, "--metrics", tmp_path / ODD)
    flags = ("--hosts", names, "--script", script, "--env=OMP_NUM_THREADS=1")
    result = network.nodes[0].run(LAUNCHER, *flags, *arguments)
    assert result.returncode == 0, result.stderr
    assert all(line.startswith("node0: ") for line in result.stdout.splitlines())
    assert all(re.match(r"node\d: ", line) for line in result.stderr.splitlines())
    assert re.search(rf"node0: rank {hosts - 1} on node{hosts - 1}, CPU, CPU threads: 1\n", result.stderr)
    assert (tmp_path / ODD).exists()
    assert hosts != 2 or weights(result.stdout) == undisturbed
    network.wait_until_empty()


@pytest.fixture
def repository(tmp_path):
    """A copy of what the launcher needs, which a test may hide from some hosts."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in (*SCRIPTS, LAUNCHER.name):
        shutil.copy(ROOT / name, folder)
    return folder


def test_hosts_that_are_not_ready(network, repository, small, tmp_path):
    """Each says in one line what is wrong with it, and nothing starts."""
    version = Path(torch.__file__).with_name("version.py")
    (tmp_path / "version.py").write_text("__version__ = '1.0'\ncuda = hip = xpu = git_version = None\ndebug = False\n")
    node0, node1, node2 = network.nodes

    def complaints(hosts, *flags):
        command = (repository / LAUNCHER.name, "--hosts", hosts, *flags, "--", "--epochs", 0)
        result = network.login.run(*command, cwd=repository)
        assert result.returncode == 1 and not result.stdout, result
        network.wait_until_empty()
        return [re.sub(r"(hostname nowhere|denied|port 22): .*", r"\1", line) for line in result.stderr.splitlines()]

    no_cache = "--env=PYTHONDONTWRITEBYTECODE=1"  # of the module that takes the place of torch's
    with contextlib.ExitStack() as stack:

        def mount(host, *arguments):
            host.must("mount", *arguments)
            stack.callback(host.must, "umount", arguments[-1])

        mount(node0, "-t", "tmpfs", "none", repository)
        assert complaints("node0,node1") == [f"node0: error: there is no {repository}/train_ddp.py"]
        mount(node2, "-t", "tmpfs", "none", tmp_path)
        mount(node1, "--bind", tmp_path / "version.py", version)
        assert complaints("node1,node2,nowhere") == [
            f"node2: error: there is no directory {repository}",
            "nowhere: error: cannot log in: ssh: Could not resolve hostname nowhere",
        ]
        assert complaints("login,node1", no_cache) == [f"node1: error: torch 1.0, not {torch.__version__}"]
        assert complaints("login,node1", "--python=/bin/false")[0] == "login: error: /bin/false cannot import torch: "
        network.cable(node2, "down")
        stack.callback(network.cable, node2, "up")
        assert complaints("login,node2") == ["node2: error: cannot log in: ssh: connect to host node2 port 22"]
        mount(node1, "--bind", "/dev/null", network.folder / "user_key.pub")
        assert complaints("login,node1") == [
            "node1: error: cannot log in: root@node1: Permission denied (publickey,password,keyboard-interactive)."
        ]
        mount(network.login, "--bind", "/dev/null", network.folder / "known_hosts")
        assert complaints("login") == ["login: error: cannot log in: Host key verification failed."]
    gpu = "error: 0 GPUs, but 1 needed"
    assert complaints("node0,node1", "--nproc-per-node=gpu") == [f"node0: {gpu}", f"node1: {gpu}"]
    listen = (
        "import socket, time; server = socket.create_server(('', 29500)); print('ready', flush=True); time.sleep(99)"
    )
    with node0.background(sys.executable, "-c", listen, log=tmp_path / "log") as server:
        server.wait_for("ready")
        result = network.login.run(LAUNCHER, "--hosts=node0,node1", "--", "--epochs", 0)
        alone = network.login.run(LAUNCHER, "--hosts=node0", "--", *small, "--epochs", 0)
    assert alone.returncode == 0, alone.stderr  # one node does not need the port
    assert result.returncode == 1
    assert result.stderr == "node0: error: port 29500 is in use: give another --master-port\n"


def launch(network, tmp_path, small, *flags):
    """Start a training with a checkpoint on two hosts; return it once it has trained a few steps."""
    arguments = ("--", *small, "--checkpoint", "ck.pt", "--save-every", 1, "--timeout", 10)
    command = (LAUNCHER, "--hosts=node0,node1", "--env=OMP_NUM_THREADS=1", *flags, *arguments)
    return network.login.background(*command, cwd=tmp_path, log=tmp_path / "log")


def test_a_worker_dies(network, small, tmp_path):
    with launch(network, tmp_path, small) as launcher:
        launcher.wait_for("step 2/")
        network.nodes[1].kill(WORKER)
        assert launcher.wait() == 1
        assert re.search(r"(?m)^node\d ended with exit code 1: stopping all hosts$", launcher.output())
        network.wait_until_empty()


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stop_saves(how, code, network, small, tmp_path):
    with launch(network, tmp_path, small) as launcher:
        launcher.wait_for("step 2/")
        for process in network.login.processes():  # as a terminal does
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, how)
        assert launcher.wait() == code
        assert "node0: stopped by a signal in epoch " in launcher.output()
        network.wait_until_empty()


def test_the_launcher_is_killed_and_a_cable_pulled(network, small, undisturbed, tmp_path):
    """Whatever ends a run, no process is left, and the same command goes on to the same weights."""
    with launch(network, tmp_path, small) as launcher:
        launcher.wait_for("step 2/")
        network.login.kill(str(LAUNCHER))
        network.wait_until_empty()
    with launch(network, tmp_path, small) as launcher:
        launcher.wait_for(r"going on from (?s:.*) step \d")
        network.cable(network.nodes[1], "down")
        try:
            assert launcher.wait() != 0
            network.wait_until_empty()
        finally:
            network.cable(network.nodes[1], "up")
        assert re.search(r"(?m)^node\d ended with exit code \d+: stopping all hosts$", launcher.output())
    with launch(network, tmp_path, small) as launcher:
        assert launcher.wait() == 0, launcher.output()
        assert weights(launcher.output()) == undisturbed


def test_what_does_not_stop_is_killed(network, tmp_path):
    """After the time that torchrun leaves its workers, even what has left their session."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('started', flush=True)\n"
        "subprocess.run(['sleep', '999'], start_new_session=True)\n"
    )
    command = (LAUNCHER, "--hosts=node0,node1", "--script", script)
    with network.login.background(*command, log=tmp_path / "log") as launcher:
        launcher.wait_for("node0: started(?s:.*)node1: started|node1: started(?s:.*)node0: started")
        network.login.kill(str(LAUNCHER), signal.SIGTERM)
        assert launcher.wait() == 143
        network.wait_until_empty()
