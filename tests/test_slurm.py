"""slurm_submit_ddp.sh under a real Slurm, on nodes with addresses, names and processes of their own."""

import os
import re
import signal

import pytest
from cluster import SLURM_TOOLS, SMALL, WORKER, Slurm, require, wait_until
from conftest import ROOT, SCRIPTS, SMALL_MODEL, Background, finish, run, weights
from test_readme import README, SUBMISSIONS

pytestmark = pytest.mark.cluster
SUBMIT = ROOT / "slurm_submit_ddp.sh"
ONE_PROCESS = ("--gpus-per-node=0", "--nodes=1")
ENVIRONMENT = f"export PATH={os.environ['PATH']} GLOO_SOCKET_IFNAME=eth0"
# As in a shell of srun where CPUs and GPUs are bound. srun refuses these values.
IN_A_STEP = {"SLURM_CPU_BIND": "of its CPUs", "SLURM_GPU_BIND": "of its GPUs"}
# As in a shell of `salloc --gpus-per-task=1`, with memory per CPU where the job has it per node.
IN_AN_ALLOCATION = {"SLURM_GPUS": 1, "SLURM_GPUS_PER_TASK": 1, "SLURM_MEM_PER_CPU": 1, "SLURM_MEM_PER_NODE": 1}
NEAR_THE_LIMIT = ("scancel", "--signal=USR1", "--batch")  # does what Slurm does then


def edited(folder, old, new):
    """Write the file as a user has edited it; return its name."""
    (folder / "job.sh").write_text(SUBMIT.read_text().replace(old, new))
    return "job.sh"


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
    terminal = ("script", "--quiet", "--command", f"srun {train % '--pty'}", "/dev/null")
    shell = slurm.login.must(*terminal, **slurm.env)
    assert weights(shell) and "task 1: Exited with exit code 1" in shell
    nested = f"salloc --ntasks=2 srun --ntasks=1 --pty srun --overlap {train % ''}"
    terminal = ("script", "--quiet", "--command", nested, "/dev/null")
    nested = slurm.login.must(*terminal, **slurm.env)  # as a shell that salloc opens on a node
    assert nested.count("srun has started unconnected processes") == 2


def test_processes_and_their_variables(slurm, submit, tmp_path):
    (tmp_path / "worker.py.end").touch()
    jobs = {submit(OMP_NUM_THREADS=7, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=8, **IN_A_STEP): [(1, 7, 8)]}
    jobs[submit(flags=["--nodes=1"], **IN_AN_ALLOCATION)] = [(2, 8, 100)]
    jobs[submit(flags=("--gpus-per-node=0", "--gpus=3"))] = [(1, 16, 100), (2, 8, 100)]  # on two nodes
    (tmp_path / "my worker.py").write_text(WORKER)
    (tmp_path / "my worker.py.end").touch()
    jobs[submit(NPROC_PER_NODE=3, SCRIPT="my worker.py")] = [(3, 5, 100)]
    # A login does not set what the tests need. Two tasks have twice the CPUs.
    file = edited(tmp_path, "\n# module load", f"\n{ENVIRONMENT} SCRIPT={tmp_path}/worker.py\n#")
    jobs[submit(flags=("--export=NONE", "--ntasks-per-node=2"), file=file)] = 2 * [(2, 16, 100)]
    for job, nodes in jobs.items():
        log = slurm.finish(job)[2]
        said = [f"processes: {processes}, CPU threads per process: {threads}" for processes, threads, _ in nodes]
        assert sorted(re.findall(r"(?m)^node\d: (processes: .*)", log)) == said, log
        started = [f"started {' '.join(map(str, node))}" for node in nodes for _ in range(node[0])]
        assert sorted(re.findall("started .*", log)) == started, log


def test_what_torchrun_is_told(slurm, submit, tmp_path):
    """By each way to ask for GPUs and CPUs. It is a stub, which starts at once, and needs no GPU for "gpu"."""
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho $OMP_NUM_THREADS torchrun $*\n")
    (tmp_path / "torchrun").chmod(0o755)
    told = {}

    def ask(*flags, left_out="no line", processes, threads, **env):
        file = edited(tmp_path, f"\n#SBATCH --{left_out}", "\n#")
        env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        told[submit(flags=("--nodes=1", *flags), file=file, **env)] = processes, threads

    ask("--gres=gpu:1", processes=1, threads=16)
    ask("--gpus-per-node=1", processes=1, threads=16)
    ask("--gpus-per-node=0", processes=1, threads=16)
    ask("--gres=gpu:lab:1", left_out="gpus-per-node", processes=1, threads=16)
    by_task = ("--ntasks-per-node=2", "--cpus-per-task=8")
    ask("--gpus-per-task=1", *by_task, processes=2, threads=8)
    ask("--gpus-per-task=lab:1", *by_task, left_out="gpus-per-node", processes=2, threads=8)
    ask("--ntasks=2", "--cpus-per-task=8", left_out="ntasks-per-node", processes=2, threads=8)
    # The variable is one of a shell of srun.
    ask("--cpus-per-gpu=4", left_out="cpus-per-task", processes=2, threads=4, SLURM_CPUS_PER_TASK=2)
    # Slurm says how many GPUs there are, or nothing. There may be more processes than CPUs, too.
    ask("--gres=gpu:2", NPROC_PER_NODE="gpu", processes="gpu", threads=8)
    ask("--gpus-per-node=0", NPROC_PER_NODE="gpu", processes="gpu", threads=1)
    ask("--mem=0", NPROC_PER_NODE=17, processes=17, threads=1)
    for job, (processes, threads) in told.items():
        log = slurm.finish(job)[2]
        assert re.search(f"(?m)^{threads} torchrun .* --nproc-per-node={processes} ", log), log
        assert f": processes: {processes}, CPU threads per process: {threads}\n" in log


def test_the_short_job(slurm, submit, tmp_path):
    """On nodes with two GPUs, and with what `submit` has written in the place of many_gpus.py; where sites differ."""
    job = (ROOT / "tests" / "lesson" / "job.sh").read_text().replace("--gpus-per-node=4 ", "--gpus-per-node=2 ")
    job = job.replace("tests/lesson/many_gpus.py'", "worker.py $FAIL'").replace("\nMASTER", f"\n{ENVIRONMENT}\nMASTER")
    (tmp_path / "job.sh").write_text(job)
    # A rank fails, and those of the other node, which would go on for minutes, are ended.
    state, _, log = slurm.finish(submit(flags=(), file="job.sh", FAIL="fail1"))
    assert state == "FAILED" and "started 2 " in log, log
    (tmp_path / "worker.py.end").touch()
    (one_node,) = re.findall(r"\$ sbatch (.*?) tests/lesson/job.sh", README)
    for flags, ranks in ((("--export=NONE", "--ntasks-per-node=2"), 4), (one_node.split(), 2)):
        state, code, log = slurm.finish(submit(flags=flags, file="job.sh", **IN_A_STEP, **IN_AN_ALLOCATION))
        assert (state, code, log.count("started 2 ")) == ("COMPLETED", "0:0", ranks), log


def test_the_submissions_of_the_readme(slurm):
    """Slurm takes them; the one for a larger cluster, with the numbers of this one."""
    assert len(SUBMISSIONS) == 2
    for command in SUBMISSIONS:
        command = command.replace("--nodes=4 --gpus-per-node=8 --cpus-per-task=64", "--nodes=1 --gpus-per-node=1")
        command = slurm.login.inside("bash", "-c", command.replace("sbatch ", "sbatch --test-only "))
        assert " to start at " in run(command, **slurm.env).stderr


def test_an_interactive_allocation(slurm, submit, tmp_path):
    """As the README has it, where #SBATCH lines are comments; and with what belongs to each task."""
    (tmp_path / "worker.py.end").touch()
    (salloc,) = re.findall(r"`salloc (.*?) bash slurm_submit_ddp.sh`", README)
    by_task = "--nodes=1 --ntasks-per-node=2 --gpus-per-task=lab:1 --cpus-per-task=8"
    for flags, ranks in {salloc: 4, by_task: 2}.items():
        output = slurm.command("salloc", *flags.split(), "bash", SUBMIT, SCRIPT=tmp_path / "worker.py")
        assert output.count("started 2 8 100") == ranks


@pytest.mark.parametrize(("flag", "saves"), [("--checkpoint", 1), ("--metrics", 0)])
def test_ctrl_c_in_an_allocation(flag, saves, slurm, submit, tmp_path):
    """In a shell that lives on, where the step would, too."""
    # The controller hears that a step is over after srun has.
    over = "timeout 20 bash -c 'while squeue --noheader --steps | grep -q .; do sleep 0.5; done' && echo none left"
    shell = f"bash {SUBMIT} {flag}; {over}"
    command = slurm.login.inside("salloc", "--nodes=1", "bash", "-c", f": ; {shell}", cwd=tmp_path)
    with Background(*command, log=tmp_path / "log", **slurm.env, SCRIPT=tmp_path / "worker.py") as job:
        job.wait_for("started")
        slurm.login.signal(signal.SIGINT, f"bash {SUBMIT} {flag} ")
        job.wait()
        assert job.output().count("saving") == saves and "\nnone left\n" in job.output()
    alone = run(["bash", SUBMIT])
    assert alone.returncode and "submit this with sbatch" in alone.stderr


def test_time_limit(slurm, submit, small_mnist, tmp_path):
    """The twin on two nodes; an argument has spaces."""
    arguments = (SCRIPTS[1], *SMALL, small_mnist, "--batch-size", 100, "--epochs", 4)
    saved = ("--checkpoint=ck.pt", "--metrics", "a 'metrics' file*")
    job = submit(*arguments, *saved, flags=["--gpus-per-node=1", "--cpus-per-task=1"], SCRIPT=SMALL_MODEL, PAUSE=1)
    wait_until(lambda: "step 1 " in slurm.log(job))
    for node in slurm.nodes:  # as Slurm looks at limits every 30 s
        node.signal(signal.SIGSTOP, f"-u {SMALL_MODEL}")  # how torchrun calls it
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    undisturbed = finish(*arguments)
    wait_until(lambda: "time is nearly up" in slurm.log(job))
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    for node in slurm.nodes:
        node.signal(signal.SIGCONT)
    state, code, log = slurm.finish(job)
    assert (state, code, slurm.job(job, "Restarts")) == ("COMPLETED", "0:0", "1"), log
    assert "on node[0-1], meeting at node0:" in log and (tmp_path / "a 'metrics' file*").exists()
    # Each epoch has one step: none was trained twice, and some were left for after the requeue.
    assert log.count("step 1 ") == 4 and "step 1 " in log.partition("requeued")[2]
    assert weights(log) == weights(undisturbed)


def test_a_step_before_the_training_which_is_in_a_container(slurm, submit, tmp_path):
    """The user stages data, say, at the place for modules, so the training is not step 0. Slurm is busy once."""
    container = tmp_path / "container"  # which acts on USR1 again, as apptainer makes it
    container.write_text('#!/bin/sh\necho called with $1 $2 $3\nshift 2\nexec env --default-signal=USR1 "$@"\n')
    container.chmod(0o755)
    hooks = {"SRUN_ARGS": "--label --unbuffered", "TORCHRUN_PREFIX": f"{container} exec image.sif"}
    busy = 'scontrol() { [ "$1" != requeue ] || ! mkdir busy && command scontrol "$@"; }'
    file = edited(tmp_path, "\n# module load", f"\nsrun true; {busy}\n#")
    job = submit("--checkpoint", file=file, SLURM_RESTART_COUNT=9, **hooks)
    wait_until(lambda: "started" in slurm.log(job))
    assert "0: called with exec image.sif bash\n" in slurm.log(job)  # --label writes 0:
    slurm.command(*NEAR_THE_LIMIT, job)
    wait_until(lambda: "requeued\n" in slurm.log(job), timeout=60)
    (tmp_path / "worker.py.end").touch()
    assert slurm.finish(job)[0] == "COMPLETED" and "saving" in slurm.log(job) and (tmp_path / "busy").exists()


def test_a_notice_while_the_ranks_still_start(slurm, submit, tmp_path):
    """They ignore it; it comes again, after 60 s, or fewer here."""
    job = submit("--checkpoint", "late", file=edited(tmp_path, "timeout 60", "timeout 10"))
    wait_until(lambda: any(f"-u {tmp_path}/worker.py" in line for line in slurm.nodes[0].processes().values()))
    slurm.command(*NEAR_THE_LIMIT, job)
    wait_until(lambda: "time is nearly up" in slurm.log(job))
    (tmp_path / "worker.py.start").touch()
    wait_until(lambda: "requeued\n" in slurm.log(job), timeout=60)
    (tmp_path / "worker.py.end").touch()
    assert slurm.finish(job)[0] == "COMPLETED" and "saving" in slurm.log(job)


def test_an_array_requeues_the_one_job_that_asks_for_it(slurm, submit, tmp_path):
    """The last job of an array has the number of the whole array; one that a task submits has variables of the task."""
    array = submit("--checkpoint", flags=(*ONE_PROCESS, "--array=0-1"))
    jobs = [f"{array}_0", f"{array}_1", submit("--checkpoint", SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID=0)]
    wait_until(lambda: all("started" in slurm.log(job) for job in jobs))
    for job in jobs[1:]:
        slurm.command(*NEAR_THE_LIMIT, job)
        wait_until(lambda job=job: slurm.log(job).count("started") == 2)
        assert "requeued\n" in slurm.log(job)
    (tmp_path / "worker.py.end").touch()
    assert [(slurm.finish(job)[0], slurm.job(job, "Restarts")) for job in jobs] == [
        ("COMPLETED", "0"),
        ("COMPLETED", "1"),
        ("COMPLETED", "1"),
    ]


def test_preemption(slurm, submit, tmp_path):
    """Without a grace time, where ranks have seconds to save, here 6, and with one, in which the job ends by itself."""
    partitions = "debug", "graceful", "cancel_graceful", "cancel"  # the last alone is not requeued
    flags = ([*ONE_PROCESS, f"--partition={name}"] for name in partitions)
    jobs = [submit("--checkpoint", "slow", flags=partition) for partition in flags]
    wait_until(lambda: all("started" in slurm.log(job) for job in jobs))
    urgent = submit(flags=("--partition=urgent", "--exclusive", "--gpus-per-node=0"))
    wait_until(lambda: slurm.job(urgent) == "RUNNING")
    (tmp_path / "worker.py.end").touch()
    for job in (urgent, *jobs):
        assert slurm.finish(job)[0] == ("PREEMPTED" if job == jobs[-1] else "COMPLETED"), slurm.log(job)
        assert job == urgent or slurm.log(job).count("saving") >= 6
    assert [slurm.job(job, "Restarts") for job in jobs] == ["1", "1", "1", "0"]


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
