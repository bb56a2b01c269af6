"""The README's commands run, what they print has what matters, and its lessons hold."""

import difflib
import re
import shutil

import pytest
import torch
from cluster import TOOLS, require
from conftest import DDP, ROOT, SCRIPTS, Ranks, in_dir, run, write_mnist
from test_checkpoint import spied

README = (ROOT / "README.md").read_text()


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.S | re.M)


def lesson(words):
    """Return the one Python snippet that has these words."""
    (found,) = (lesson for lesson in LESSONS if words in lesson)
    return found


BLOCKS = [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in fenced("bash")]
ENTER = "python3 -m venv .venv && . .venv/bin/activate && pip install -r "
TESTS = ENTER + "tests/requirements.txt && pytest tests"  # which is how these tests come to run
LADDER, WRONG, COMPARED, METRIC = (block for block in BLOCKS if re.search("many_gpus|/tmp/|metric", block[-1]))
WORDS = "sbatch", "--link", "--max-restarts"
SUBMISSIONS, LINKS, RESTARTS = ([line for block in BLOCKS for line in block if word in line] for word in WORDS)
ELSEWHERE = (TESTS, *LADDER[1:], *WRONG, *COMPARED, *METRIC, *SUBMISSIONS, *LINKS, *RESTARTS)
LESSONS = fenced("python")
LESSON_FILES = ("one_gpu.py", "many_gpus.py", "own_loop.py")
ONE, MANY, OWN = ((ROOT / "tests" / "lesson" / name).read_text() for name in LESSON_FILES)
PRINTS = {  # what a command begins with, and what it prints; all others train
    "python -c ": "",
    "diff ": "< from torch.nn.parallel import DistributedDataParallel\n",
    "python tests/benchmark.py": "| --sync flat |",
    "python tests/overlap.py": "```mermaid\ngantt\n",
    "./launch_multinode_ddp.sh --nnodes": "torchrun --nnodes=2 --node-rank=1 --master-addr=node0 ",
    "./launch_multinode_ddp.sh --hosts": "--node-rank=1",
}
# The only changes of commands: some would take minutes, and of one the hosts do not exist.
CHANGES = {"mark.py": "mark.py --rounds 1 --steps 1 --processes 2", "--hosts node0": "--dry-run --hosts node0"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository where commands take seconds: with the small model, few images, and data."""
    copy = tmp_path_factory.mktemp("copy") / "ddp"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "data", "__pycache__"))
    write_mnist(copy / "data")
    for script in SCRIPTS:
        source = (ROOT / script).read_text()
        for old, new in ((" = 60_000, 10_000, 10", " = 2048, 101, 10"), ("torchvision.models", "small_model")):
            assert old in source
            source = source.replace(old, new)
        (copy / script).write_text(source)
    return copy


def run_in(copy, command):
    """Run a command of the README, and compare what it prints."""
    words = next((words for start, words in PRINTS.items() if command.startswith(start)), "weights_sha256 ")
    for old, new in CHANGES.items():
        command = command.replace(old, new)
    result = run(["bash", "-c", command], cwd=copy, gpu="=gpu" in command, OMP_NUM_THREADS=1, PYTHONPATH=copy / "tests")
    assert words in result.stdout, result.stdout + result.stderr
    assert result.returncode == command.startswith("diff ")


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_commands(block, subtests, copy):
    assert BLOCKS[0][0].startswith(ENTER + "requirements.txt && CUDA_") and BLOCKS[-1] == [TESTS]
    for command in BLOCKS[block]:
        if command in ELSEWHERE or ("=gpu" in command and not torch.cuda.is_available()):
            continue
        with subtests.test(command):
            run_in(copy, command.rpartition(" && ")[2])  # the environment is there


@pytest.mark.cluster
def test_links(copy):
    require(*TOOLS, "tc")
    tbf = "unshare --net tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 200ms"
    if run(["bash", "-c", tbf]).returncode:
        pytest.skip("needs a kernel with tbf")
    for command in LINKS:
        if torch.cuda.is_available() or "4096" not in command:  # for a GPU
            run_in(copy, command)


def in_order(parts, whole):
    """Return whether the lines of `parts` are lines of `whole`, in the same order."""
    rest = iter(whole.splitlines())
    return all(line in rest for line in parts.splitlines())


def test_the_first_diff_and_the_seven_changes():
    diff, *changes = fenced("diff")
    assert diff == "".join([*difflib.unified_diff(ONE.splitlines(True), MANY.splitlines(True), n=99)][3:])
    assert len(changes) == 7 and all(in_order(change.replace("@@ at the end @@\n", ""), diff) for change in changes)
    assert all(f"# {number}. " in change for number, change in enumerate(changes, 1))
    for text in (MANY, OWN, README, *((ROOT / script).read_text() for script in SCRIPTS)):
        assert {*re.findall(r"(?:# |\*\*)([1-7])\. \w", text)} == {*"1234567"}


def test_both_sides_of_the_diff_learn_and_the_doctor_finds_a_mistake(copy, tmp_path):
    write_mnist(tmp_path / "data", train_size=2048)
    shutil.copytree(copy / "tests", tmp_path / "tests")
    for command in LADDER[1:]:
        result = run(["bash", "-c", command], cwd=tmp_path, OMP_NUM_THREADS=1)
        assert float(re.search(r"epoch 3: accuracy (\S+)%", result.stdout)[1]) > 50, result.stderr
        assert torch.load(tmp_path / "model.pt").keys() == {"0.weight", "0.bias", "4.weight", "4.bias"}
        (tmp_path / "model.pt").unlink()
    result = run(["bash", "-c", "\n".join(WRONG).replace("/tmp/", "")], cwd=tmp_path, OMP_NUM_THREADS=1)
    assert result.returncode == 1 and next(text for text in fenced("text") if "doctor" in text) in result.stderr


def test_flags_that_are_named_exist():
    tools = ("tests/benchmark.py", "tests/doctor.py")
    files = [*SCRIPTS, *tools, "launch_multinode_ddp.sh", "slurm_submit_ddp.sh"]
    named, ours = (
        {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)}
        for text in (README, "".join((ROOT / name).read_text() for name in files))
    )
    others = "--log-dir --tee --prefix --mem --array --jobid --overlap --ipc --shm-size"
    assert named - ours <= {*others.split()}


def test_the_lowest_versions_are_those_of_the_requirements():
    (lowest,) = re.findall("lowest versions, (.*?);", README)
    for name, version in re.findall("(torch|torchvision)>=(.*)", (ROOT / "requirements.txt").read_text()):
        assert f"{name} {version}." in lowest
    assert 'target-version = "py310"' in (ROOT / ".ruff.toml").read_text() and "Python 3.10" in lowest


def test_what_is_quoted_is_there():
    assert lesson("for buffer in") in (ROOT / DDP).read_text()
    assert in_order(lesson("\n...\n").replace("\n...", ""), OWN)
    (notice,) = re.findall(r"--signal=B:USR1@(\d+) ", (ROOT / "slurm_submit_ddp.sh").read_text())
    assert f"receives SIGUSR1 {notice} s before the time limit" in README
    of = dict(re.findall(r'"--(\S+)", .*default=(\d+)', (ROOT / DDP).read_text()))
    assert f"\nEvery {of['log-interval']} steps, the ranks" in README and f"`--timeout`, {of['timeout']} s," in README


DIFFERENT = "the ranks have ended on different weights: "
LEFT_OUT = [  # what is taken out of train_ddp.py, what takes its place, and what then happens
    ("dist.init_process_group(", "(lambda *_, **__: None)(", "ValueError: Default process group has not been init"),
    ("(train_set, seed=", "(train_set, 1, 0, seed=", "the same images on both ranks"),
    ("ddp(images)", "ddp.module(images)", DIFFERENT),
    ("DistributedDataParallel(model, gradient_as_bucket_view=True)", "model", DIFFERENT),
    ("sampler.set_epoch(epoch)", "pass", "the same order in both epochs"),
    ("dist.broadcast(buffer, src=0)", "pass", DIFFERENT),
    ('sum_over_ranks_or_exit([loss, correct, count], device, "the test")', "loss.item(), 0, count", "were counted"),
    ("if rank == 0 and (save_now or stop):", "if save_now or stop:", "/ck.pt.tmp' -> '/"),
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
    assert symptom in README or "Error" not in symptom  # the page quotes that of torch
