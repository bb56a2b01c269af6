"""Real hosts and a real Slurm on this machine, which leave no trace outside their namespaces."""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from conftest import ROOT, Background, environment, run

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
HOSTS = ("unshare", "nsenter", "ip", "ssh", "ssh-keygen", "/usr/sbin/sshd")
SLURM = ("sbatch", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged")


def require(*programs, root=True):
    """Skip the test where hosts of our own cannot be made, or a program is not there."""
    if root and os.geteuid() != 0:
        pytest.skip("needs root, to make hosts")
    if absent := [program for program in programs if not (shutil.which(program) or Path(program).is_file())]:
        pytest.skip(f"needs {', '.join(absent)}")


def wait_until(look, timeout=180):
    """Return what `look` returns as soon as that is true."""
    deadline = time.monotonic() + timeout
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {look}"
        time.sleep(0.05)
    return found


class Host:
    """A network, a name, mounts and a process table of their own: all that is in them dies with their first process."""

    def __init__(self, name, hosts, folder):
        """Start `name`, one of `hosts`, which maps names to addresses. To itself it is 127.0.1.1, as on Debian."""
        self.name, self.address = name, hosts[name]
        others = "".join(f"{address} {other}\n" for other, address in hosts.items() if other != name)
        (folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        # The first process is bash, which reaps orphans, and ends when the tests do.
        setup = f"""
            hostname {name} && ip link set lo up && mount --bind {folder}/{name}.hosts /etc/hosts &&
            mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount --bind {folder}/ssh_config /etc/ssh/ssh_config &&
            echo ready && read -r
        """
        command = ["unshare", *NAMESPACES, "--mount-proc", "--fork", "--kill-child", "bash", "-c", setup]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n", f"{name} has not started"
        self.init = int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())
        self.started, self.servers = [self.process], set()

    def inside(self, *command, cwd=ROOT):
        """Return the command that runs `command` here, in the folder `cwd`."""
        enter = ["nsenter", f"--target={self.init}", *NAMESPACES]
        return [*enter, "bash", "-c", 'cd "$0" && exec "$@"', str(cwd), *map(str, command)]

    def run(self, *command, cwd=ROOT, **options):
        return run(self.inside(*command, cwd=cwd), **options)

    def must(self, *command, **options):
        """Run a command that must succeed; return its stdout."""
        result = self.run(*command, **options)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        return result.stdout

    def background(self, *command, log, cwd=ROOT, **env):
        return Background(*self.inside(*command, cwd=cwd), log=log, **env)

    def serve(self, *command, **env):
        """Start a server."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.started.append(subprocess.Popen(self.inside(*command), env=environment(**env), **pipes))

    def processes(self):
        """Return the command lines of the processes here that are not servers, by the ids they have outside."""
        found, namespace = {}, os.readlink(f"/proc/{self.init}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == namespace and int(folder.name) not in self.servers:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    # A zombie has none, and sshd waits for a lost connection longer than we do.
                    found |= {int(folder.name): line} if line and not line.startswith("sshd: ") else {}
        return found

    def kill(self, words, how=signal.SIGKILL):
        """Send a signal to the first process here whose command line has `words`."""
        os.kill(min(pid for pid, line in self.processes().items() if words in line), how)

    def power_off(self):
        self.process.kill()
        for process in self.started:
            process.wait()


class Network:
    """The hosts `login`, `node0`, `node1`, ...: each has an address, and any can ssh to any other. Use it in `with`."""

    def __init__(self, nodes, folder):
        self.folder, self.hosts = folder, []
        self.addresses = {"login": "10.213.0.1"} | {f"node{i}": f"10.213.0.{10 + i}" for i in range(nodes)}
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "known_hosts").write_text(f"* {(folder / 'host_key.pub').read_text()}")
        (folder / "ssh_config").write_text(f"IdentityFile {folder}/user_key\nUserKnownHostsFile {folder}/known_hosts\n")
        keys = f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
        (folder / "sshd_config").write_text(f"{keys}PidFile none\nStrictModes no\nSetEnv CUDA_VISIBLE_DEVICES=\n")

    def __enter__(self):
        try:
            self.login = self.start("login")
            self.nodes = [self.start(name) for name in self.addresses if name != "login"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for host in self.hosts:
            host.power_off()

    def start(self, name):
        """Start a host, connect it, and let others log in."""
        host = Host(name, self.addresses, self.folder)
        self.hosts.append(host)
        device = "bridge"
        if name == "login":
            host.must("ip", "link", "add", device, "type", "bridge")
        else:
            # In its network, but not among its processes: there, a host's id would mean another one.
            link = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host.init]
            run(["nsenter", f"--target={self.login.init}", "--net", *link])
            self.login.must("ip", "link", "set", name, "master", device, "up")
            device = "eth0"
        host.must("ip", "address", "add", f"{host.address}/24", "dev", device)
        host.must("ip", "link", "set", device, "up")
        host.serve("/usr/sbin/sshd", "-D", "-f", self.folder / "sshd_config")
        wait_until(lambda: ":22 " in host.must("ss", "--listening", "--tcp", "--numeric"))
        host.servers |= set(host.processes())
        return host

    def cable(self, host, state):
        """Plug a host's network cable in ("up"), or pull it ("down")."""
        self.login.must("ip", "link", "set", host.name, state)

    def wait_until_empty(self):
        """Wait until no process that a test has started is left on any host."""
        wait_until(lambda: not any(host.processes() for host in self.hosts))


class Slurm(Network):
    """A network with a Slurm: slurmctld on `login`; a slurmd on each node, with 4 CPUs and GPUs that are none."""

    # Intervals and time-outs are short, so that tests are.
    CONF = """
        ClusterName=lab
        SlurmctldHost=login({login})
        SlurmUser=root
        SlurmdUser=root
        AuthType=auth/munge
        AuthInfo=socket={folder}/munge/socket,cred_expire=5
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool/%n
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.%n.pid
        SlurmctldLogFile={folder}/slurmctld.log
        SlurmdLogFile={folder}/slurmd.%n.log
        JobCompType=jobcomp/none
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        MpiDefault=none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core
        GresTypes=gpu
        SlurmdParameters=config_overrides
        SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_min_interval=100000
        ReturnToService=2
        SlurmdTimeout=10
        PreemptType=preempt/partition_prio
        PreemptMode=REQUEUE
        NodeName=DEFAULT CPUs=4 RealMemory=4000 Gres=gpu:{gpus}
        PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
        PartitionName=debug Default=YES PriorityTier=10
        PartitionName=graceful PriorityTier=10 GraceTime=30
        PartitionName=urgent PriorityTier=100 PreemptMode=OFF
    """

    def __init__(self, nodes, folder, addresses=True, gpus=2):
        super().__init__(nodes, folder)
        self.env = {"SLURM_CONF": folder / "slurm.conf"}
        conf = textwrap.dedent(self.CONF).format(folder=folder, gpus=gpus, login=self.addresses["login"])
        for name, address in list(self.addresses.items())[1:]:
            conf += f"NodeName={name} NodeAddr={address if addresses else name}\n"
            (folder / "spool" / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(conf)
        for name in ("state", "munge", "gpu"):
            (folder / name).mkdir()
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o400)
        for gpu in range(gpus):  # Slurm wants devices: these are /dev/null
            os.mknod(folder / "gpu" / f"nvidia{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            f"NodeName=node[0-{nodes - 1}] Name=gpu File={folder}/gpu/nvidia[0-{gpus - 1}]\n"
        )

    def __enter__(self):
        super().__enter__()
        try:
            munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            files = (f"--{flag}={self.folder}/munge/{name}" for flag, name in munge.items())
            self.login.serve("/usr/sbin/munged", "--foreground", "--force", *files)
            wait_until((self.folder / "munge" / "socket").exists)
            self.login.serve("/usr/sbin/slurmctld", "-D", **self.env)
            for node in self.nodes:
                node.serve("/usr/sbin/slurmd", "-D", "-N", node.name, **self.env)
            wait_until(lambda: self.command("sinfo", "--noheader", "--format=%T").split() == ["idle"])
            for host in self.hosts:
                host.servers |= set(host.processes())
        except BaseException:
            self.__exit__()
            raise
        return self

    def command(self, *command, **options):
        """Run one of Slurm's commands on `login`; return its stdout."""
        return self.login.run(*command, **self.env, **options).stdout

    def submit(self, *arguments, cwd, **env):
        """Call sbatch in the folder `cwd`; return the job's id."""
        output = self.login.must("sbatch", "--parsable", *arguments, cwd=cwd, **self.env, **env)
        return output.strip()

    def job(self, job, field="JobState"):
        """Return one of the things that Slurm knows of a job."""
        pattern = rf"(?m)\b{field}=(.*?)( \w+=|$)"
        return wait_until(lambda: re.search(pattern, self.command("scontrol", "show", "job", job))).group(1)

    def finish(self, job):
        """Wait for a job's end, through requeues; return its state, its exit code as Slurm has it, and its log."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        try:
            wait_until(lambda: self.job(job) in ends)
        except AssertionError:
            raise AssertionError(f"job {job} is {self.job(job)}: {self.log(job)}")
        return self.job(job), self.job(job, "ExitCode"), self.log(job)

    def log(self, job):
        """Return what a job has printed so far."""
        log = Path(self.job(job, "StdOut"))
        return log.read_text() if log.exists() else ""
