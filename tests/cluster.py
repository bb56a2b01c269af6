"""Real hosts and a real Slurm on this machine, which leave no trace outside their namespaces.

`python tests/cluster.py` opens a shell on them.
"""

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, environment, run, wait_until

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
ADDRESSES = {"login": "10.213.0.1", "node0": "10.213.0.10", "node1": "10.213.0.11"}
TOOLS = ("unshare", "nsenter", "ip", "ssh-keygen", "sshd", "tcsh")
SLURM_TOOLS = (*TOOLS, "sbatch", "script", "slurmctld", "slurmd")
# Debian's packages, where a program's name is not that of its package.
PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "script": "bsdutils", "ip": "iproute2", "tc": "iproute2"}
PACKAGES |= {"ssh-keygen": "openssh-client", "sshd": "openssh-server", "sbatch": "slurm-client"}
PASSWD = Path("/etc/passwd")
SMALL = ("--train-size", 200, "--batch-size", 50, "--log-interval", 1, "--epochs", 2, "--data-dir")

# What takes the place of a training. Asked to stop, it takes a second to save, or 6. It writes lines in one piece.
# If it is late, it starts when there is a file for that.
WORKER = """import os, signal, sys, time
def save(*_):
    for _ in range(6 if "slow" in sys.argv else 1):
        time.sleep(1)
        print("saving", flush=True)  # which must not fail
    open(__file__ + os.environ["RANK"], "w")
    sys.exit(3 if "fail" in sys.argv else 0)
while "late" in sys.argv and not os.path.exists(__file__ + ".start"): time.sleep(0.1)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
names = ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
sys.stdout.write(f"started {' '.join(os.environ.get(name, '-') for name in names)}\\n")
if "fail" + os.environ["RANK"] in sys.argv: sys.exit(3)
for _ in range(50 if "short" in sys.argv else 6000):
    time.sleep(0 if os.path.exists(__file__ + ".end") else 0.1)
"""


def require(*programs, root=True):
    missing = [program for program in programs if not shutil.which(program)]
    needs = ["root"] * (root and os.geteuid() != 0) + missing
    packages = {PACKAGES.get(program, program): None for program in missing}
    if needs:
        pytest.skip(f"needs {', '.join(needs)}" + f" (Debian: apt install {' '.join(packages)})" * bool(missing))


class Host:
    """A network, mounts and processes of its own, which die with the first, and a name: 127.0.1.1, as on Debian."""

    def __init__(self, name, folder):
        self.name = name
        others = "".join(f"{address} {other}\n" for other, address in ADDRESSES.items() if other != name)
        (folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        shell = shutil.which("tcsh" if name == "node0" else "bash")  # what ssh starts
        (folder / f"{name}.passwd").write_text(re.sub("(?m)^(root:.*:).*", rf"\1{shell}", PASSWD.read_text()))
        # The first process is bash, which reaps orphans, and ends when the tests do.
        mounts = f"{folder}/{name}.hosts /etc/hosts && mount --bind {folder}/ssh_config /etc/ssh/ssh_config"
        setup = f"hostname {name} && ip link set lo up && mount --bind {mounts} && mount -t tmpfs none /run"
        setup += f" && mount --bind {folder}/{name}.passwd {PASSWD} && mkdir /run/sshd && echo ready && read -r"
        command = ["unshare", *NAMESPACES, "--mount-proc", "--fork", "--kill-child", "bash", "-c", setup]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n", f"{name} has not started"
        self.init = psutil.Process(self.process.pid).children()[0].pid

    def inside(self, *command, cwd=ROOT):
        enter = ["nsenter", f"--target={self.init}", *NAMESPACES]
        return [*enter, "bash", "-c", 'cd "$0" && exec "$@"', str(cwd), *map(str, command)]

    def must(self, *command, cwd=ROOT, **options):
        """Run a command that must succeed; return its stdout."""
        result = run(self.inside(*command, cwd=cwd), **options)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        return result.stdout

    def processes(self):
        """Return the command lines of the processes here that are not servers, by their ids here."""
        found = {}
        for path in Path(f"/proc/{self.init}/root/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # as the process may end meanwhile
                # A zombie has none; an sshd waits for a lost connection longer than we do.
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line and path.name != "1" and not line.startswith(("/usr/sbin/", "sshd: ", "slurm")):
                    found[int(path.name)] = line
        return found

    def signal(self, how, words=""):
        """Send a signal to the processes here whose command line has `words`."""
        pids = [str(pid) for pid, line in self.processes().items() if words in line]
        self.must("bash", "-c", f"kill -{how:d} {' '.join(pids)}; true")


class Network:
    """The hosts of ADDRESSES; from each, one can ssh to any other."""

    @classmethod
    @contextlib.contextmanager
    def up(cls, folder):
        network = cls()
        network.folder, network.hosts = folder, []
        try:
            network.start()
            yield network
        finally:
            for host in network.hosts:
                host.process.stdin.close()  # which ends its first process, and with that, all others
                host.process.wait()

    def start(self):
        folder = self.folder
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        (folder / "known_hosts").write_text(f"* {(folder / 'key.pub').read_text()}")
        (folder / "ssh_config").write_text(f"IdentityFile {folder}/key\nUserKnownHostsFile {folder}/known_hosts\n")
        self.hosts += [Host(name, folder) for name in ADDRESSES]
        self.login, *self.nodes = self.hosts
        self.login.must("ip", "link", "add", "eth0", "type", "bridge")
        # In login's network, but not among its processes: there, a host's id would mean another one.
        link = ["nsenter", f"--target={self.login.init}", "--net", "ip", "link"]
        for node in self.nodes:
            run([*link, "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.init])
            run([*link, "set", node.name, "master", "eth0", "up"])
        for host in self.hosts:
            host.must("ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "eth0")
            host.must("ip", "link", "set", "eth0", "up")
            options = (f"-oAuthorizedKeysFile={folder}/key.pub", "-oStrictModes=no", f"-oSetEnv=TMPDIR={folder}")
            host.must("/usr/sbin/sshd", "-f", "/dev/null", "-h", folder / "key", *options)
            wait_until(lambda host=host: ":22 " in host.must("ss", "--listening", "--tcp", "--numeric"))

    def wait_until_empty(self):
        wait_until(lambda: not any(host.processes() for host in self.hosts))


class Slurm(Network):
    """A network with a Slurm: slurmctld on `login`; a slurmd on each node, with 32 CPUs and 2 GPUs that are none."""

    # Intervals and time-outs are short, so that tests are. Only jobs that ask for it are requeued. Their numbers are
    # large, as on a cluster of some years: jobs make ports of them.
    CONF = """
        ClusterName=lab
        FirstJobId=1234567
        SlurmctldHost=login(10.213.0.1)
        SlurmUser=root
        AuthType=auth/none
        AuthInfo=cred_expire=5
        CredType=cred/none
        StateSaveLocation={folder}/state
        SlurmdSpoolDir=/run/slurmd
        ProctrackType=proctrack/linuxproc
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core
        GresTypes=gpu
        SlurmdParameters=config_overrides
        SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=100000
        JobRequeue=0
        PreemptType=preempt/partition_prio
        PreemptMode=REQUEUE
        NodeName=node[0-1] NodeAddr=10.213.0.[10-11] CPUs=32 Gres=gpu:lab:2
        PartitionName=debug Nodes=ALL PriorityTier=10 Default=YES
        PartitionName=graceful Nodes=ALL PriorityTier=10 GraceTime=30
        PartitionName=cancel Nodes=ALL PriorityTier=10 PreemptMode=CANCEL
        PartitionName=cancel_graceful Nodes=ALL PriorityTier=10 PreemptMode=CANCEL GraceTime=30
        PartitionName=urgent Nodes=ALL PriorityTier=100 PreemptMode=OFF
    """

    def start(self):
        super().start()
        self.env = {"SLURM_CONF": self.folder / "slurm.conf", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": self.folder}
        self.env["SLURM_CONF"].write_text(self.CONF.format(folder=self.folder))
        gpus = "Name=gpu Type=lab File=/dev/null,/dev/zero Flags=no_gpu_env"  # or a job would choose among real ones
        (self.folder / "gres.conf").write_text(f"NodeName=node[0-1] {gpus}\n")
        self.command = functools.partial(self.login.must, **self.env)
        self.command("/usr/sbin/slurmctld")
        for node in self.nodes:
            node.must("/usr/sbin/slurmd", "-N", node.name, **self.env)
        sinfo = self.login.inside("sinfo", "--noheader", "--format=%T")
        wait_until(lambda: run(sinfo, **self.env).stdout == "idle\n")

    def job(self, job, field="JobState"):
        return re.search(rf"(?m)\b{field}=(.*?)( \w+=|$)", self.command("scontrol", "show", "job", job)).group(1)

    def log(self, job):
        log = Path(self.job(job, "StdOut"))
        return log.read_text() if log.exists() else ""

    def finish(self, job):
        """Wait for a job's end, through requeues; return its state, its exit code as Slurm has it, and its log."""
        ends = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"
        wait_until(lambda: self.job(job) in ends)
        return self.job(job), self.job(job, "ExitCode"), self.log(job)


class Practice(Slurm):
    """A node that says nothing is down after seconds, not minutes; with its cable back, it takes jobs again."""

    CONF = Slurm.CONF + "SlurmdTimeout=10\nReturnToService=1\n"


TRAINING = "--dataset synthetic --train-size 7680"
TRY = f"""
This is `login`. You are root, and your files are those of your machine, which two nodes share: node0 and node1. They
only pretend to have GPUs, so jobs ask for none. `exit` ends all three and deletes $SCRATCH. Paste line by line:

sinfo
./launch_multinode_ddp.sh --hosts node0,node1 --interface eth0 -- {TRAINING}

# The same training as a job. It takes a minute or two and ends on the same weights_sha256, whatever its nodes do.
FLAGS="{TRAINING} --checkpoint $SCRATCH/ck.pt --save-every 10"
rm -f $SCRATCH/ck.pt; JOB=$(sbatch --parsable --gpus-per-node=0 slurm_submit_ddp.sh $FLAGS)
squeue                             # PD: it waits, R: it runs, CG: it is being ended
tail -F $SCRATCH/slurm-$JOB.out    # Ctrl-C ends `tail`, not the job

# While it trains, take a node away: all ranks save, torchrun shows a traceback, and the job is requeued.
scontrol update nodename=node1 state=down reason=practice
# Give it back half a minute later, as Slurm kills what is left of the job until then: it resumes after some 10 s.
scontrol update nodename=node1 state=resume

# While a job trains, pull a node's cable: nobody can save. Slurm notices it within half a minute.
ip link set node1 down
# Put it back a minute later: the job resumes from its last save, within two minutes. Put back earlier, Slurm may kill
# what is left on node1 too late, and the new run with it. Then submit it again, without `rm`: it resumes, too.
ip link set node1 up
"""


def main():
    argparse.ArgumentParser(description="Start a login host, two nodes and Slurm; open a shell.").parse_args()
    for how in (signal.SIGHUP, signal.SIGTERM):  # of a closed terminal, say
        signal.signal(how, lambda *_: sys.exit(1))
    try:
        require(*SLURM_TOOLS)
        assert sys.stdin.isatty(), "needs a terminal"
        with tempfile.TemporaryDirectory(prefix="practice-") as folder, Practice.up(Path(folder)) as slurm:
            scratch = Path(folder, "scratch")
            scratch.mkdir()
            print(TRY)
            names = {"SCRATCH": scratch, "SBATCH_OUTPUT": scratch / "slurm-%j.out", "OMP_NUM_THREADS": 1}
            # A ~/.bashrc might set another PATH, and bash would write a history.
            shell = ("env", "HISTFILE=", r"PS1=\h:\W# ", "bash", "--norc", "-i")
            subprocess.run(slurm.login.inside(*shell), env=environment(**slurm.env, **names))
    except (pytest.skip.Exception, AssertionError) as error:  # of require(), Host, and the one above
        sys.exit(f"tests/cluster.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
