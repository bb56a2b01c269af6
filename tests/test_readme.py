"""The README's commands run, print what it shows, and its flags are the scripts'; its lessons hold."""

import ast
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import benchmark
import pytest
import torch
from cluster import HOSTS, SLURM, Network, Slurm, require, wait_until
from conftest import ROOT, SCRIPTS, TORCHRUN, launch, own_lines, run, weights

DDP = SCRIPTS[0]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
ENTER = "python3 -m venv .venv && . .venv/bin/activate && pip install -r "
FIRST, TESTS = COMMANDS[0], COMMANDS[1]
BENCHMARK = "python tests/benchmark.py"
DIFF = "diff train_ddp.py train_manual_ddp.py"
SOAK = "python tests/soak.py train_ddp.py --kills 20"
TRAININGS = [command for command in COMMANDS[2:] if re.search(r" train_\w*\.py", command)]
TRAININGS = [command for command in TRAININGS if re.match("python train|torchrun", command)]
LAUNCHES = [command for command in COMMANDS if command.startswith("./launch_multinode_ddp.sh")]
ONE_NODE, PLAN, NODE0, NODE1, SSH = LAUNCHES
SUBMISSIONS = [command for command in COMMANDS if "sbatch" in command]
*LESSONS, EXAMPLE = re.findall(r"```python\n(.*?)```", README, re.S)


def shell(command, *flags):
    """Return the call of a shell with a command of the README; `flags` come last."""
    return ["bash", "-c", f"{command} {shlex.join(map(str, flags))}"]


def run_as_it_stands(command, *flags, **options):
    """Run a command of the README in a shell that has entered the virtual environment; `flags` come last."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(shell(command, *flags), PATH=path, OMP_NUM_THREADS=1, **options)


def shape(text):
    """Return text with its numbers, host names and hashes made alike: these differ by machine."""
    text = re.sub(r"[0-9a-f]{64}", "HASH", text)
    text = re.sub(r" on \S+, ", " on HOST, ", text)
    text = re.sub(r"(?<!\S)/\S+", "PATH", text)
    text = re.sub(r"\S+:29500", "MASTER", text)
    return re.sub(r"\d[\d.,e+-]*\w*", "0", text)


# Lines that a run has or has not: of torch's sockets, of Slurm, and of torchruns that lose each other when all is done
# (pytorch#69520), with what torch adds to that.
BY_CHANCE = r"socket\.cpp|DUE TO JOB REQUEUE|^(node\d: )?\.*$"
BY_CHANCE += r"|elastic/agent/server/api\.py|TCPStore\.cpp|^(node\d: )?(frame #|Exception raised from recv|<omitting)"


def shapes(lines):
    """Return the shapes of lines of two nodes, which may come in any order, and more or fewer of each."""
    return {shape(line) for line in lines if not re.search(BY_CHANCE, line)}


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
    known = {FIRST, TESTS, *TRAININGS, *LAUNCHES, *SUBMISSIONS, SOAK, BENCHMARK, DIFF}
    assert set(COMMANDS) == known
    assert len(TRAININGS) >= 6 and len(SUBMISSIONS) == 4


def test_the_diff():
    result = run_as_it_stands(DIFF)
    assert result.returncode == 1
    assert "< from torch.nn.parallel import DistributedDataParallel\n" in result.stdout


def test_the_first_command_prints_what_is_shown():
    result = run_as_it_stands(FIRST.split(" && ")[-1])
    assert result.returncode == 0, result.stderr
    assert list(map(shape, own_lines(result))) == list(map(shape, shown_after(FIRST)))


@pytest.mark.parametrize("command", TRAININGS)
def test_training_command(command, small_mnist, copy):
    small = ("--batch-size", 32, "--train-size", 512) if "synthetic" in command else ("--data-dir", small_mnist)
    result = run_as_it_stands(command, *small, "--epochs", 1, cwd=copy)
    assert result.returncode == 0, result.stderr
    assert "the same on every rank" in result.stdout
    assert ("--profile" in command) == (copy / "traces" / "rank1.json.gz").exists()


def test_the_soak_command(small_mnist):
    result = run_as_it_stands(SOAK, "--data-dir", small_mnist, "--train-size", 320, "--batch-size", 16, "--kills", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(set(re.findall("weights sha256 [0-9a-f]{64}", result.stdout))) == 1
    assert result.stdout.count(" killed ") == 2


def test_the_benchmark(tmp_path):
    """With one short round of all but --compile, which takes a minute; its tables are those shown."""
    small = ("--only", "steps", "scripts", "--processes", 2, "--rounds", 1, "--steps", 1, "--batch-size", 16)
    result = run_as_it_stands(BENCHMARK, *small, "--json", tmp_path / "json", timeout=600)
    assert result.returncode == 0, result.stderr
    rows = [re.sub(r" \d.*", "", line) for line in result.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows if f"\n{row}" not in README] == []
    said = [line for line in result.stdout.splitlines() if line.startswith("not measured: ")]
    assert len(said) == (1 if torch.cuda.is_available() else 2), said
    measured = json.loads((tmp_path / "json").read_text())
    assert len(measured["2 processes, gloo"]) == len(benchmark.SYNCS | benchmark.WAYS)


def replaced(source, new):
    """Return a script with those of its functions replaced that `new` defines as well."""
    lines, names = source.splitlines(), [node.name for node in ast.parse(new).body if hasattr(node, "name")]
    for node in reversed(ast.parse(source).body):
        if getattr(node, "name", None) in names:
            del lines[node.lineno - 1 : node.end_lineno]
            last = node.lineno - 1
    return "\n".join([*lines[:last], new, *lines[last:]])


def test_the_example_of_a_model_of_your_own(tmp_path):
    """The twins agree on it, too."""
    hashes = []
    for script in SCRIPTS:
        source = re.sub("(?m)^TRAIN_IMAGES, .*", "", (ROOT / script).read_text())
        source = replaced(source, EXAMPLE)
        if "manual" in script:
            source = source.replace(" DistributedSampler(", " ManualDistributedSampler(")
        (tmp_path / script).write_text(source)
        result = launch(tmp_path / script, "--epochs", 1, "--train-size", 600, nproc=2)
        assert result.returncode == 0, result.stderr
        assert "of 500 test images" in result.stdout
        hashes.append(weights(result.stdout))
    assert hashes[0] == hashes[1]


def test_the_lines_of_the_six_things():
    source = (ROOT / DDP).read_text()
    assert len(LESSONS) == 7
    assert all(line in source for lesson in LESSONS for line in lesson.splitlines(keepends=True))


DIFFERENT = "error: the ranks have ended on different weights: "
LEFT_OUT = {  # what is taken out of train_ddp.py, what takes its place, and what then happens
    "init": (
        r"dist\.init_process_group\(",
        "(lambda *_, **__: None)(",
        "ValueError: Default process group has not been initialized",
    ),
    "sampler": (r"(?<= DistributedSampler\(train_set, )", "1, 0, ", "steps per epoch 4\n"),  # of 2
    "ddp": (r"DistributedDataParallel\(model, .*\)", "model", DIFFERENT),
    "broadcast": (r"dist\.broadcast\(buffer, src=0\)", "pass", DIFFERENT),
    "evaluation": (r"dist\.all_reduce\(totals\)", "pass", "of 51 test images\n"),
    "rank 0": (r"(?<=if not self\.path) or dist\.get_rank\(\) != 0(?=:\n +return\n)", "", "ck.pt.tmp' -> '"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_happens_without_it(name, small_mnist, tmp_path):
    lines, instead, symptom = LEFT_OUT[name]
    source, count = re.subn(lines, instead, (ROOT / DDP).read_text())
    assert count == 1
    (tmp_path / DDP).write_text(source)
    flags = ("--data-dir", small_mnist, "--train-size", 128, "--batch-size", 32, "--epochs", 1)
    flags += ("--checkpoint", "ck.pt", "--save-every", 1) if name == "rank 0" else ()
    result = launch(DDP, *flags, nproc=2, cwd=tmp_path)
    assert symptom in result.stdout + result.stderr


def test_what_happens_without_set_epoch(small_mnist, tmp_path):
    source, count = re.subn(r"self\.sampler\.set_epoch\(epoch\)", "pass", (ROOT / DDP).read_text())
    assert count == 1
    (tmp_path / DDP).write_text(source)
    command = (ROOT / "tests" / "spy.py", DDP, "--data-dir", small_mnist, "--batch-size", 100, "--epochs", 2)
    result = launch(*command, nproc=2, cwd=tmp_path, SPY=tmp_path, TRAIN_IMAGES=600)
    assert result.returncode == 0, result.stderr
    read = (tmp_path / "rank0").read_text().splitlines()
    assert len(read) == 600 and read[:300] == read[300:]


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
def test_the_table_of_flags_is_the_help(script):
    """In names, values and defaults."""
    text = re.sub(r"\s+", " ", launch(ROOT / script, "--help").stdout).partition(" -h, --help ")[2]
    helped = re.findall(r" (--[a-z-]+)( [A-Z]+| \{\S+\})? .*?\(default: (.*?)\)", text)
    table = re.findall(r"^\| `(--[a-z-]+)( .*?)?` \| (.*?) \|", README.partition("\n## Flags")[2], re.M)
    if "manual" not in script:
        table = [row for row in table if row[0] != "--sync"]
    assert len(table) > 20
    words = {"all": "none", "by device": "none", "None": "none", "off": "False"}
    rows, others = ([(*names, words.get(default, default)) for *names, default in part] for part in (table, helped))
    assert sorted(rows) == sorted(others)


def test_every_flag_that_is_named_exists(tmp_path):
    require("sbatch", root=False)
    (tmp_path / "slurm.conf").write_text("ClusterName=lab\nSlurmctldHost=localhost\n")  # sbatch --help wants one
    ours = [*SCRIPTS, "tests/soak.py", "tests/benchmark.py"]
    commands = [*([sys.executable, ROOT / name] for name in ours), [ROOT / "launch_multinode_ddp.sh"], [TORCHRUN]]
    helps = [run([*command, "--help"], SLURM_CONF=tmp_path / "slurm.conf") for command in [*commands, ["sbatch"]]]
    assert not any(result.returncode for result in helps)
    exist = set(re.findall(r"--[a-z-]+", "".join(result.stdout for result in helps).replace("_", "-")))
    named = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", README)}
    assert len(named) > 50
    assert named - exist == {"--check", "--pid"}  # of ruff and of py-spy
