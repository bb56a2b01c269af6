"""launch_multinode_ddp.sh on hosts with addresses, names and processes of their own."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster import SMALL, TOOLS, WORKER, Network, require
from conftest import ROOT, SCRIPTS, SMALL_MODEL, TORCHRUN, Background, finish, run, weights

LAUNCHER = ROOT / "launch_multinode_ddp.sh"
ODD = 'it\'s "odd" * $HOME !x; true'  # as the name of a folder
HERE = "/run/here"  # on no other host than login
NOT_IGNORED = ("env", "--default-signal=HUP")  # as nohup, which pytest may run under, ignores it for all


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    require(*TOOLS)
    with Network.up(tmp_path_factory.mktemp("network")) as network:
        network.login.must("ln", "-s", Path(TORCHRUN).parent, HERE)
        yield network


@pytest.mark.parametrize("check", [["shellcheck"], ["shfmt", "--diff", "--indent", "4"]])
def test_shell(check):
    require(check[0], root=False)
    result = run([*check, LAUNCHER, "slurm_submit_ddp.sh", "tests/lesson/job.sh", ".ci/run"])
    assert result.returncode == 0, result.stdout


MISTAKES = {
    "--epochs 3": "unknown argument --epochs (see --help; those of the training script follow --)",
    "--script -- --epochs 3": "--script needs a value",
    "--nproc_per_node=two": "--nproc-per-node two: give a number from 1 to 9999",
    "--nproc-per-node=08": "--nproc-per-node 08: give a number from 1 to 9999",
    "--master-port=65536": "--master-port 65536: give a number from 1 to 65535",
    "--nnodes=2 --node-rank=2": "--node-rank 2: give a number from 0 to 1",
    "--nnodes=2 --node-rank=0": "--node-rank needs --master-addr, too",
    "--hosts=node0 --node-rank=0": "--hosts starts every node: no --nnodes, no --node-rank",
    **{f"--hosts={hosts}": f"--hosts {hosts}: a host name is empty" for hosts in ("a,,b", ",a", "a,", "me@,b")},
    "--script=none.py": f"there is no script {ROOT}/none.py",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(arguments, tmp_path):
    """Also through a link, as from ~/bin; what is beside the launcher is not beside the link."""
    (tmp_path / "launch").symlink_to(LAUNCHER)
    result = run([tmp_path / "launch", *arguments.split()])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"launch_multinode_ddp.sh: error: {MISTAKES[arguments]}\n"


def test_a_mistake_ends_it_also_where_its_log_is_on_a_full_disk():
    assert run(["bash", "-c", f"{LAUNCHER} --dry-run --epochs 3 2>/dev/full"]).returncode == 2


def test_what_is_printed(monkeypatch):
    for name in [*os.environ]:
        if re.match("(CUDA|GLOO|NCCL|OMP|PYTORCH|TORCH)_", name):  # as in images of containers
            monkeypatch.delenv(name)

    def printed(*flags, **env):
        return re.findall("(?m)^.*torchrun .*$", run([LAUNCHER, *flags], CUDA_VISIBLE_DEVICES=0, **env).stdout)

    assert "  --nproc-per-node N  processes on each node" in run([LAUNCHER, "--help"]).stdout
    assert "\nReplace NODE0_ADDRESS with the address " in run([LAUNCHER, "--nnodes=2"]).stdout
    first, second = printed()
    assert first.startswith("CUDA_VISIBLE_DEVICES=0 torchrun --nnodes=2 --node-rank=0 ")
    assert second == first.replace("--node-rank=0", "--node-rank=1") and "--master-addr=NODE0_ADDRESS " in first
    assert printed("--dry-run", "--nnodes=2", "--node-rank=1") == [second]
    (one,) = printed("--dry-run", "--nproc-per-node", "gpu", "--", "a b")
    assert one.endswith(f" torchrun --standalone --nproc-per-node=gpu {SCRIPTS[0]} a\\ b ")
    cores = len(os.sched_getaffinity(0))
    for processes, threads in ((1, cores), (cores, 1), (2 * cores, 1)):
        (one,) = printed("--dry-run", f"--nproc-per-node={processes}")
        assert f" OMP_NUM_THREADS={threads} torchrun " in one
    (one,) = printed("--dry-run", "--nproc-per-node=2", OMP_NUM_THREADS=7, NCCL_X="a\tb", TORCH_X=1, PYTORCH_X=1)
    assert " NCCL_X=$'a\\tb' OMP_NUM_THREADS=7 PYTORCH_X=1 TORCH_X=1 torchrun " in one
    assert "OMP_NUM_THREADS" not in "".join(printed("--dry-run", "--hosts=node0"))
    assert " --nnodes=2 --node-rank=1 --master-addr=a " in printed("--dry-run", "--hosts=a\nb")[1]
    assert " --master-addr=10.0.0.1 " in printed("--dry-run", "--hosts=a,b", "--master-addr=10.0.0.1")[1]
    first, second = printed("--dry-run", "--hosts=me@node0,node1", "--interface=eth0", "--master-port=1")
    assert "GLOO_SOCKET_IFNAME=eth0" in first and "NCCL_SOCKET_IFNAME=eth0" in first
    assert f"{TORCHRUN} --nnodes=2 --node-rank=1 --master-addr=node0 --master-port=1 " in second


def test_one_node_fails_as_torchrun_does(tmp_path):  # and saves at a signal in test_your_loop.py
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    assert run([LAUNCHER, "--script", tmp_path / "fails.py"]).returncode == 1


@pytest.mark.cluster
def test_two_hosts_and_one_end_on_the_same_hash(network, small_mnist, tmp_path):
    """Over ssh, with the twin, beside the launcher; by a printed command as it stands, and --node-rank; and here."""
    here = tmp_path / ODD
    here.mkdir()
    arguments = ("--", SCRIPTS[1], *SMALL, small_mnist, "--metrics", here / "m")
    threads = {"OMP_NUM_THREADS": 1}
    flags = ("--hosts=node0,node1", "--interface=eth0", "--script", SMALL_MODEL.relative_to(ROOT))  # not in `here`
    ssh = network.login.must(LAUNCHER, *flags, *arguments, cwd=here, **threads)
    assert all(re.match("node[01]: ", line) for line in ssh.splitlines()) and (here / "m").exists()
    flags = ("--nnodes=2", "--master-addr=node0", *flags[1:])
    (printed,) = re.findall("# node 0\n(.*)", run([LAUNCHER, *flags, *arguments], **threads).stdout)
    with Background(*network.nodes[0].inside("bash", "-c", printed), log=tmp_path / "log") as first:
        network.nodes[1].must(LAUNCHER, *flags, "--node-rank=1", *arguments, **threads)
        assert first.wait() == 0, first.output()
    assert weights(ssh) == weights(first.output()) == weights(finish(*arguments[1:]))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("hosts", "cwd", "path", "code", "words"),
    [
        ("node0,node1", ROOT, "", 1, "node1: started"),
        ("node0,nowhere", ROOT, "", 255, "nowhere: ssh: Could not resolve hostname nowhere"),
        ("node0", HERE, "", 1, f"node0: .*cd: {HERE}: No such file or directory"),
        ("node0", ROOT, f"{HERE}:", 127, f"node0: .*{HERE}/torchrun: No such file"),
    ],
)
def test_one_host_fails_and_all_stop(hosts, cwd, path, code, words, network, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    flags = ("--hosts", hosts, "--script", tmp_path / "worker.py", "--", "fail1", "two\n!lines")
    result = run(network.login.inside(LAUNCHER, *flags, cwd=cwd), PATH=f"{path}{os.environ['PATH']}")
    assert result.returncode == code and re.search(f"(?m)^{words}", result.stdout), result.stdout
    assert re.search(rf"(?m)^\w+ ended with exit code {code}: stopping all hosts$", result.stderr)
    assert ("look whether the training there goes on" in result.stderr) == (code == 255)
    network.wait_until_empty()


@pytest.mark.cluster
def test_a_host_fails_when_another_has_ended(network, tmp_path):
    """There, torchrun waits for up to five minutes, ignores SIGTERM, and has the port."""
    worker = "import os, time\nrank = int(os.environ['RANK'])\ntime.sleep(4 * rank)\nexit(rank)"
    (tmp_path / "worker.py").write_text(worker)
    flags = ("--hosts=node0,node1", "--script", tmp_path / "worker.py")
    result = run(network.login.inside(LAUNCHER, *flags), timeout=100, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1)
    assert "node1 ended with exit code 1: stopping all hosts\n" in result.stderr
    assert result.returncode == 1 and not network.nodes[0].processes()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("how", "speed"), [(signal.SIGINT, "slow"), (signal.SIGHUP, ""), (signal.SIGTERM, ""), (signal.SIGKILL, "")]
)
def test_the_launcher_is_stopped_and_the_hosts_save(how, speed, network, tmp_path):
    """The first two come as from a terminal, which signals what the launcher has started, too.

    Ctrl-C also ends `| tee`, here first. It comes late, as the 18 s that hosts have then must not count from the start.
    """
    (tmp_path / "worker.py").write_text(WORKER)
    flags = ("--hosts=node0,node1", "--script", tmp_path / "worker.py", "--", speed)
    tee = ("bash", "-c", 'trap : INT; "$@" 2>&1 | tee; exit ${PIPESTATUS[0]}', "") if how == signal.SIGINT else ()
    command = network.login.inside(*tee, *NOT_IGNORED, LAUNCHER, *flags)
    with Background(*command, log=tmp_path / "log", TORCH_ELASTIC_SHUTDOWN_TIMEOUT=8) as launcher:
        launcher.wait_for("node0: started(?s:.*)node1: started|node1: started(?s:.*)node0: started")
        time.sleep(12 if tee else 0)
        if tee:
            network.login.signal(how, "tee")
            launcher.wait_for(lambda: "tee " not in network.login.processes().values())
        network.login.signal(how, f"bash {LAUNCHER}" if how in (signal.SIGKILL, signal.SIGTERM) else "")
        assert launcher.wait() in (130, -signal.SIGKILL), launcher.output()
        if how == signal.SIGKILL:  # else it has waited for them
            network.wait_until_empty()
        assert (tmp_path / "worker.py0").exists() and (tmp_path / "worker.py1").exists()
        network.wait_until_empty()


@pytest.mark.cluster
def test_ctrl_c_where_ssh_shares_a_connection(network, tmp_path):
    """There, ssh does not ignore a Ctrl-C of its terminal."""
    require("script")
    (tmp_path / "worker.py").write_text(WORKER)
    sharing = f"-o ControlMaster=auto -o ControlPath={tmp_path}/%n -o ControlPersist=1"
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh {sharing} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    launch = f"{LAUNCHER} --hosts=node0,node1 --script {tmp_path}/worker.py -- slow"
    command = network.login.inside("script", "--quiet", "--return", "--command", launch, "/dev/null")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with Background(*command, log=tmp_path / "log", stdin=subprocess.PIPE, **path) as terminal:
        terminal.wait_for("node0: started(?s:.*)node1: started|node1: started(?s:.*)node0: started")
        os.write(terminal.process.stdin.fileno(), b"\x03")
        assert terminal.wait() == 130, terminal.output()
        assert (tmp_path / "worker.py0").exists() and (tmp_path / "worker.py1").exists()
        network.wait_until_empty()


def test_nobody_takes_what_the_hosts_print(tmp_path):
    """Here, ssh is a host that saves when its stdin ends, and must be able to print then."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho started; cat; echo saving && echo so && touch saved\n")
    (tmp_path / "ssh").chmod(0o755)
    command = ("bash", "-c", f"{LAUNCHER} --hosts=node0 >/dev/full")
    result = run(command, cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 1 and "No space left on device" in result.stderr
    assert (tmp_path / "saved").exists()


def test_a_closed_terminal(tmp_path):
    """It ends torchrun, in spite of nohup, before the ranks have saved, but no session of its own."""
    require("script", "setsid", root=False)
    (tmp_path / "worker.py").write_text(WORKER)

    def start(how):
        command = f"{how} torchrun --standalone worker.py > '{how}' 2>&1 & wait"
        terminal = (*NOT_IGNORED, "script", "-q", "-c", command, "/dev/null")
        return Background(*terminal, log=tmp_path / f"{how} log", cwd=tmp_path)

    with start("setsid nohup") as session, start("nohup") as nohup:
        for how, terminal in {"setsid nohup": session, "nohup": nohup}.items():
            terminal.wait_for(lambda log=tmp_path / how: log.exists() and "started" in log.read_text())
            terminal.process.kill()  # which closes it
        nohup.wait_for(lambda: not nohup.pids())
        assert 0 in session.pids() and not (tmp_path / "worker.py0").exists()


@pytest.mark.cluster
def test_a_cable_is_cut(network, small_mnist, tmp_path):
    """ssh notices it, here in seconds, and the processes that have lost each other end after --timeout."""
    ssh, options = tmp_path / "ssh", tmp_path / "options"
    short = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2"  # the first value of an option counts
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{options}\nexec /usr/bin/ssh {short} "$@"\n')
    ssh.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    flags = ("--hosts=node0,node1", "--interface=eth0", "--script", SMALL_MODEL, "--", SCRIPTS[0], *SMALL, small_mnist)
    endless = network.login.inside(LAUNCHER, *flags, "--epochs", 99999, "--timeout", 15)
    with Background(*endless, log=tmp_path / "log", **path) as launcher:
        launcher.wait_for("step 2 ")
        network.login.must("ip", "link", "set", "node1", "down")
        try:
            assert launcher.wait() != 0
            network.wait_until_empty()
        finally:
            network.login.must("ip", "link", "set", "node1", "up")
    assert "BatchMode=yes" in options.read_text() and "ConnectTimeout=10" in options.read_text()
    interval, count = re.findall(r"ServerAlive\w+=(\d+)", options.read_text())[:2]
    assert int(interval) * int(count) == 120  # a silent Wi-Fi is no cut cable
