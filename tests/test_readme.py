"""The README's commands run, what they print has what matters, and its lessons hold."""

import difflib
import re
import shutil
import sys

import pytest
import torch
from cluster import SLURM_TOOLS, TOOLS, Slurm, require
from conftest import DDP, MANUAL, ROOT, SCRIPTS, Background, Ranks, in_dir, run, torchrun, weights, write_mnist
from test_checkpoint import spied

README = (ROOT / "README.md").read_text()


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.S | re.M)


BLOCKS = [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in fenced("bash")]
ENTER = "python3 -m venv .venv && . .venv/bin/activate && pip install -r "
TESTS = ENTER + "tests/requirements.txt && pytest tests"  # which is how these tests come to run
LADDER, PORT = (block for block in BLOCKS if "many_gpus" in block[-1] or "/tmp/" in block[-1])
SUBMISSIONS, LINKS = ([line for block in BLOCKS for line in block if word in line] for word in ("sbatch", "--link"))
ELSEWHERE = (TESTS, *LADDER[1:], *PORT, *SUBMISSIONS, *LINKS)
LESSONS = fenced("python")
(CURVE,) = [lesson for lesson in LESSONS if "matplotlib" in lesson]
(EXAMPLE,) = [lesson for lesson in LESSONS if "def load_data" in lesson]
QUOTED = [lesson for lesson in LESSONS if re.match(" +(for buffer|if rank == 0 and)", lesson)]
LESSON_FILES = ("one_gpu.py", "many_gpus.py", "own_loop.py")
ONE, MANY, OWN = ((ROOT / "tests" / "lesson" / name).read_text() for name in LESSON_FILES)
FORK = "fork" if sys.version_info >= (3, 11, 10) else "spawn"  # see the README's trouble with workers
SHORT = "--train-size 64 --batch-size 8"
WORDS = {  # what a command begins with: flags that make it short, and what it prints
    "diff ": ("", "< from torch.nn.parallel import DistributedDataParallel\n"),
    "python tests/benchmark.py": (f"--processes 2 --rounds 1 --steps 1 {SHORT}", "--sync flat"),
    "python tests/overlap.py": (f"{SHORT} --accum-steps 2", "bucket 3 (8 MiB)"),
    "python tests/soak.py": ("--kills 1 --train-size 320 --batch-size 16 --epochs 1 --data-dir DATA", "\n1 kills: "),
    "./launch_multinode_ddp.sh --nnodes": ("", "torchrun --nnodes=2 --node-rank=1 --master-addr=node0 "),
    "./launch_multinode_ddp.sh --hosts": ("", "--node-rank=1"),  # as a dry run, there are no such hosts
}
TRAINING = "--train-size 512 --batch-size 32 --epochs 1 --data-dir DATA", "weights_sha256 "


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository, where commands may leave their files."""
    files = shutil.ignore_patterns(".*", "data", "__pycache__")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "ddp", ignore=files)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_commands(block, subtests, small_mnist, copy):
    assert BLOCKS[0][0].startswith(ENTER + "requirements.txt && CUDA_") and BLOCKS[1] == [TESTS]
    for command in BLOCKS[block]:
        if command in ELSEWHERE or ("=gpu" in command and not torch.cuda.is_available()):
            continue
        command = command.rpartition(" && ")[2].replace(" --nproc-per-node 8 --interface", " --dry-run --interface")
        flags, words = next((value for start, value in WORDS.items() if command.startswith(start)), TRAINING)
        with subtests.test(command):
            command = f"{command} {flags.replace('DATA', str(small_mnist))}"
            result = run(["bash", "-c", command], cwd=copy, gpu="=gpu" in command, OMP_NUM_THREADS=1, PYTHONPATH="")
            assert words in result.stdout, result.stdout + result.stderr
            assert result.returncode == command.startswith("diff ")


def test_links(copy):
    require(*TOOLS, "tc")
    tbf = "unshare --net tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 200ms"
    if run(["bash", "-c", tbf]).returncode:
        pytest.skip("needs a kernel with tbf")
    for command in [command for command in LINKS if torch.cuda.is_available() or "4096" not in command]:
        flags, words = next(value for start, value in WORDS.items() if command.startswith(start))
        result = run(["bash", "-c", f"{command} {flags}"], cwd=copy, gpu="4096" in command)
        assert words in result.stdout and result.returncode == 0, result.stderr
        assert ("```mermaid" in result.stdout) == ("overlap" in command)


def test_submissions(copy, tmp_path):
    """Slurm takes them; the one for a larger cluster, with the numbers of this one."""
    require(*SLURM_TOOLS)
    assert len(SUBMISSIONS) == 3
    with Slurm.up(tmp_path) as slurm:
        for command in SUBMISSIONS:
            command = command.replace("--nodes=4 --gpus-per-node=8 --cpus-per-task=64", "--nodes=1 --gpus-per-node=1")
            command = slurm.login.inside("bash", "-c", command.replace("sbatch ", "sbatch --test-only "), cwd=copy)
            assert " to start at " in run(command, **slurm.env).stderr


def test_the_first_diff_and_its_check(copy, tmp_path):
    """Both sides learn, and the new one does in one process what it does in two."""
    write_mnist(tmp_path / "data", train_size=2048)
    shutil.copytree(copy / "tests" / "lesson", tmp_path / "tests" / "lesson")
    assert fenced("diff") == ["".join([*difflib.unified_diff(ONE.splitlines(True), MANY.splitlines(True), n=99)][3:])]
    for text in (MANY, OWN, README, *((ROOT / script).read_text() for script in SCRIPTS)):
        assert {*re.findall(r"(?:# |\*\*)([1-7])\. \w", text)} == {*"1234567"}
    accuracies = []
    for command in LADDER[1:] + PORT:
        result = run(["bash", "-c", command.replace("/tmp/", "")], cwd=tmp_path, OMP_NUM_THREADS=1)
        assert result.returncode == 0, result.stderr
        if not command.startswith("sed "):
            accuracies.append(re.findall(r"epoch \d: accuracy (\S+)%", result.stdout))
            assert float(accuracies[-1][2]) > 50
            assert torch.load(tmp_path / "model.pt").keys() == {"0.weight", "0.bias", "4.weight", "4.bias"}
            (tmp_path / "model.pt").unlink()
    assert len(accuracies) == 4 and accuracies[2][0] == accuracies[3][0]


def test_flags_that_are_named_exist():
    files = [*SCRIPTS, "tests/soak.py", "tests/benchmark.py", "launch_multinode_ddp.sh", "slurm_submit_ddp.sh"]
    named, ours = (
        {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)}
        for text in (README, "".join((ROOT / name).read_text() for name in files))
    )
    others = "--max-restarts --standalone --shutdown-timeout --check --pid --ipc --shm-size"  # of torchrun, ruff, ...
    assert named - ours <= {*others.split()}


def test_the_example_of_data_and_a_model_of_your_own(tmp_path):
    """Workers outlive torchrun's SIGTERM until their rank has saved, and the twin ends on the quiet run's weights."""
    for script in SCRIPTS:
        source = (ROOT / script).read_text()  # of two definitions, the later one counts
        source = source.replace("\nif __name__ ==", f"\n{EXAMPLE}\nif __name__ ==")
        call = re.search(r"(?m)^    # return DataLoader\(.*\n    # .*\n", source)[0]
        source = source.replace(call, call.replace("    # ", "    "))
        (tmp_path / script).write_text(source.replace('"fork"', f'"{FORK}"').replace("num_workers=4", "num_workers=1"))
    flags = ("--epochs", 1, "--batch-size", 16, "--log-interval", 1)
    quiet = run([*torchrun(2), tmp_path / DDP, *flags])
    assert "  test_samples 101\n" in quiet.stdout, quiet.stderr
    flags += ("--checkpoint", tmp_path / "ck.pt")
    with Background(*torchrun(2), tmp_path / DDP, *flags, log=tmp_path / "log") as job:
        job.wait_for("step 2 ")
        job.process.terminate()
        job.wait()
        assert "stopped by a signal" in job.output() and "step 20 " not in job.output()
    resumed = run([*torchrun(2), tmp_path / MANUAL, *flags])
    assert weights(resumed.stdout) == weights(quiet.stdout), resumed.stderr


def test_a_curve(tmp_path, monkeypatch):
    (tmp_path / "m.jsonl").write_text('{"world_size": 2}\n' + 2 * '{"epoch": 1, "step": 20, "loss": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    values = {}
    exec(CURVE, values)
    assert values["losses"] == {(1, 20): 0.5} and (tmp_path / "loss.png").exists()


def test_what_is_quoted_is_there():
    assert len(QUOTED) == 2 and all(quoted in (ROOT / DDP).read_text() for quoted in QUOTED)


DIFFERENT = "the ranks have ended on different weights: "
LEFT_OUT = [  # what is taken out of train_ddp.py, what takes its place, and what then happens
    ("dist.init_process_group(", "(lambda *_, **__: None)(", "ValueError: Default process group has not been init"),
    ("(train_set, world_size, rank,", "(train_set, 1, 0,", "the same images on both ranks"),
    ("ddp(images)", "ddp.module(images)", DIFFERENT),
    ("DistributedDataParallel(model, gradient_as_bucket_view=True)", "model", DIFFERENT),
    ("sampler.set_epoch(epoch)", "pass", "the same order in both epochs"),
    ("dist.broadcast(buffer, src=0)", "pass", DIFFERENT),
    ('sum_over_ranks_or_exit([loss, correct, count], device, "the test")', "loss.item(), 0, count", "were counted"),
    ("if rank == 0 and (save_now or stop):", "if save_now or stop:", "'ck.pt.tmp' -> 'ck.pt'"),
]


@pytest.mark.parametrize(("line", "instead", "symptom"), LEFT_OUT)
def test_what_happens_without_it(line, instead, symptom, small_mnist, tmp_path):
    source = (ROOT / DDP).read_text()
    assert source.count(line) == 1
    script = tmp_path / DDP
    script.write_text(source.replace(line, instead))
    flags = ("--data-dir", small_mnist, "--train-size", 320, "--batch-size", 80, "--epochs", 2)
    flags += ("--checkpoint", "ck.pt", "--epochs", 9) if "ck.pt" in symptom else ()  # in some save, both are at it
    with Ranks(in_dir, tmp_path, spied, tmp_path, script, *flags) as ranks:
        succeeded = ranks.wait() == [0, 0]
        output = ranks.output()
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1)) if succeeded else ("", "")
    output += "the same images on both ranks" * (first == second)
    output += "the same order in both epochs" * (first[: len(first) // 2] == first[len(first) // 2 :])
    assert symptom in output
    assert succeeded == symptom.startswith("the same")
    assert succeeded or symptom in README
