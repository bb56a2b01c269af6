"""slurm_submit_ddp.sh under a real Slurm, on nodes with addresses, names and processes of their own."""

import os
import re
import signal

import pytest
from cluster import SLURM_TOOLS, SMALL, WORKER, Slurm, require, wait_until
from conftest import ROOT, SCRIPTS, run, torchrun, weights

SUBMIT = ROOT / "slurm_submit_ddp.sh"
ONE_PROCESS = ("--gpus-per-node=0", "--nodes=1")
NEAR_THE_LIMIT = ("scancel", "--signal=USR1", "--batch")  # does what Slurm does then


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    require(*SLURM_TOOLS)
    with Slurm.up(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def submit(slurm, tmp_path):
    """A function that submits a job, by default one that runs until there is the file `worker.py.end`."""
    (tmp_path / "worker.py").write_text(WORKER)

    def submit(*arguments, flags=ONE_PROCESS, file=SUBMIT, SCRIPT=tmp_path / "worker.py", **env):
        command = ("sbatch", "--parsable", *flags, file, *arguments)
        return slurm.command(*command, cwd=tmp_path, SCRIPT=SCRIPT, **env).strip()

    yield submit
    slurm.command("scancel", "--user=root")  # what a failed test has left
    slurm.wait_until_empty()


def test_srun_starts_several_worlds_of_one_but_its_shell_is_one(slurm, small_mnist):
    """In a shell of `srun --pty`, one process trains, though it has the variables of a step of two."""
    train = f"--nodes=1 --ntasks=2 %s python {ROOT / SCRIPTS[0]} --data-dir {small_mnist} --epochs 0"
    refused = run(slurm.login.inside("bash", "-c", f"srun {train % ''}"), **slurm.env)
    assert refused.stderr.count("srun has started several worlds of one") == 2 and refused.returncode == 1
    terminal = ("script", "--quiet", "--command", f"srun {train % '--pty'}", "/dev/null")
    shell = slurm.login.must(*terminal, **slurm.env)
    assert weights(shell) and "task 1: Exited with exit code 1" in shell


def test_processes_and_their_variables(slurm, submit, tmp_path):
    (tmp_path / "worker.py.end").touch()
    flags = {"--job-name=x": 2, "--gres=gpu:1": 1, "--gpus-per-node=1": 1, "--gpus-per-node=0": 1}
    jobs = {submit(flags=("--nodes=1", flag)): (processes, 16 // processes, 100) for flag, processes in flags.items()}
    jobs[submit(NPROC_PER_NODE=3)] = (3, 5, 100)
    jobs[submit(OMP_NUM_THREADS=7, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=8)] = (1, 7, 8)
    for job, (processes, threads, timeout) in jobs.items():
        line = f"started {processes} {threads} {timeout}"
        assert re.findall("started .*", slurm.finish(job)[2]) == processes * [line]


def test_one_process_per_gpu(slurm, submit, tmp_path):
    """torchrun is a stub, as there may be no GPU; Slurm says how many there are, or nothing."""
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho $OMP_NUM_THREADS torchrun $*\n")
    (tmp_path / "torchrun").chmod(0o755)
    for flag, threads in {"--gres=gpu:2": 8, "--gpus-per-node=0": 1}.items():
        env = {"NPROC_PER_NODE": "gpu", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        log = slurm.finish(submit(flags=("--nodes=1", flag), **env))[2]
        assert re.search(f"(?m)^{threads} torchrun .* --nproc-per-node=gpu ", log), log


def test_the_short_job_of_the_readme(slurm, submit, tmp_path):
    """On nodes with two GPUs, as there are here, and with what `submit` has written in the place of many_gpus.py."""
    (job,) = re.findall("^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    (tmp_path / "worker.py.end").touch()
    (tmp_path / "job.sh").write_text(job.replace("=4", "=2").replace("many_gpus.py", "worker.py"))
    state, code, log = slurm.finish(slurm.command("sbatch", "--parsable", "job.sh", cwd=tmp_path).strip())
    assert (state, code, log.count("started 2 ")) == ("COMPLETED", "0:0", 4), log


def test_time_limit(slurm, submit, small_mnist, tmp_path):
    """The twin, as the file asks for it, but for the CPUs; an argument has spaces."""
    arguments, SCRIPT = (*SMALL, small_mnist, "--epochs", 4), ROOT / SCRIPTS[1]
    saved = ("--checkpoint", "ck.pt", "--metrics", "a 'metrics' file*")
    job = submit(*arguments, *saved, flags=["--cpus-per-task=2"], SCRIPT=SCRIPT)
    wait_until(lambda: "step 1 " in slurm.log(job))
    for node in slurm.nodes:  # as Slurm looks at limits every 30 s
        node.signal(signal.SIGSTOP, f"-u {SCRIPT}")  # how torchrun calls it
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    undisturbed = run([*torchrun(4), SCRIPT, *arguments], OMP_NUM_THREADS=1)
    wait_until(lambda: "time is nearly up" in slurm.log(job))
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    for node in slurm.nodes:
        node.signal(signal.SIGCONT)
    state, code, log = slurm.finish(job)
    assert (state, code, slurm.job(job, "Restarts")) == ("COMPLETED", "0:0", "1"), log
    assert "on node[0-1], meeting at node0:" in log and (tmp_path / "a 'metrics' file*").exists()
    # Each epoch has one step: none was trained twice, and some were left for after the requeue.
    assert log.count("step 1 ") == 4 and "step 1 " in log.partition("requeued")[2]
    assert weights(log) == weights(undisturbed.stdout)


def test_a_step_before_the_training(slurm, submit, tmp_path):
    """The user stages data, say, at the place for modules, so the training is not step 0."""
    (tmp_path / "job.sh").write_text(SUBMIT.read_text().replace("\n# module load", "\nsrun true\n#"))
    job = submit("--checkpoint", file="job.sh")
    wait_until(lambda: "started" in slurm.log(job))
    slurm.command(*NEAR_THE_LIMIT, job)
    wait_until(lambda: "requeued\n" in slurm.log(job), timeout=60)
    (tmp_path / "worker.py.end").touch()
    assert slurm.finish(job)[0] == "COMPLETED" and "saving" in slurm.log(job)


def test_preemption(slurm, submit, tmp_path):
    """Without a grace time, and with one, in which the job ends by itself."""
    jobs = [submit("--checkpoint", flags=(*ONE_PROCESS, f"--partition={name}")) for name in ("debug", "graceful")]
    wait_until(lambda: all("started" in slurm.log(job) for job in jobs))
    urgent = submit(flags=("--partition=urgent", "--exclusive", "--gpus-per-node=0"))
    wait_until(lambda: slurm.job(urgent) == "RUNNING")
    (tmp_path / "worker.py.end").touch()
    for job in (urgent, *jobs):
        assert slurm.finish(job)[0] == "COMPLETED", slurm.log(job)
    assert [slurm.job(job, "Restarts") for job in jobs] == ["1", "1"]


@pytest.mark.parametrize(
    ("arguments", "restarts", "command", "end", "words"),
    [
        (["fail1"], 0, ["true"], "FAILED", "exitcode"),  # one of two nodes
        (["fail", "--checkpoint"], 0, NEAR_THE_LIMIT, "FAILED", "exitcode"),  # it could not save
        (["--checkpoint"], 10, NEAR_THE_LIMIT, "FAILED", "requeued ten times: submit it again to resume"),
        (["short"], 0, NEAR_THE_LIMIT, "COMPLETED", "started"),  # it uses its time
        (["--checkpoint"], 0, ["scancel"], "CANCELLED", "saving"),
    ],
)
def test_no_requeue(arguments, restarts, command, end, words, slurm, submit):
    flags = ("--gpus-per-node=0",) if "fail1" in arguments else ONE_PROCESS
    job = submit(*arguments, flags=flags, SLURM_RESTART_COUNT=restarts)
    wait_until(lambda: "started" in slurm.log(job))
    slurm.command(*command, job)
    state, code, log = slurm.finish(job)
    assert (state, slurm.job(job, "Restarts"), code == "0:0") == (end, "0", end == "COMPLETED") and words in log, log
