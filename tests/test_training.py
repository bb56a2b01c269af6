"""The scripts differ only where DDP is; they learn, end on the same bits, and say so in the same words."""

import difflib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DDP, MANUAL, ROOT, SCRIPTS, Ranks, finish, outcome, run, start
from overlap import read_step


def shared_part(script):
    """Return the lines of a script without its docstring and its classes, which are those written by hand."""
    source = (ROOT / script).read_text()
    return re.sub(r'(?ms)\A""".*?"""|^class .*?(?=^def )', "", source).splitlines()


def test_the_scripts_differ_only_where_ddp_is():
    changes = [line for line in difflib.ndiff(*map(shared_part, SCRIPTS)) if line[0] in "+-"]
    assert len(changes) <= 16, "\n".join(changes)
    of_ddp = r"DistributedDataParallel|Sampler|[aA]verager|ddp|train_step|--sync|no_sync\(\)"
    assert all(re.search(of_ddp, line) for line in changes), changes


@pytest.fixture
def train(small_mnist, tmp_path):
    """Train on the small MNIST: train(script, *flags) returns what must repeat of --metrics, and what is printed."""

    def train(script, *flags, nproc=2):
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        small = ("--data-dir", small_mnist, "--train-size", 256, "--batch-size", 16, "--epochs", 2)
        output = finish(script, *small, "--metrics", metrics, *flags, nproc=nproc)
        words = re.sub(r"[\d.,]+ samples/s", "", output)
        return outcome(metrics), re.findall(r"(?m)^(?:global|epoch|weights) .*", words)  # older Gloos print, too

    return train


@pytest.mark.parametrize("flags", [(), ("--accum-steps", 2, "--clip-grad-norm", 0.5, "--precision", "bf16")])
def test_twins_and_reruns_end_on_the_same_bits_at_two_processes(train, flags):
    whole = train(DDP, *flags)
    for script, *sync in ((DDP,), (MANUAL,), (MANUAL, "--sync", "flat"), (MANUAL, "--sync", "per-parameter")):
        assert train(script, *sync, *flags) == whole


def test_evaluation_is_exact_at_any_number_of_processes(tmp_path):
    flags = ("--dataset", "synthetic", "--train-size", 2048, "--batch-size", 32, "--checkpoint", tmp_path / "ck.pt")
    (result,) = re.findall("test loss.* of 10,000 test images", finish(DDP, *flags, "--epochs", 1))
    assert result in finish(MANUAL, *flags, "--epochs", 0, nproc=3)


def test_torchrun_and_metrics(small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--epochs", 2, "--scale-lr", "--deterministic")
    result = run([*start(2), ROOT / DDP, *flags, "--metrics", tmp_path / "m"])
    assert result.returncode == 0, result.stderr
    *epochs, end = map(json.loads, (tmp_path / "m").read_text().splitlines())
    names = "epoch step lr train_loss samples_per_second test_loss test_accuracy test_samples"
    assert [" ".join(epoch) for epoch in epochs] == [names] * 2
    assert " ".join(end) == "weights_sha256 world_size global_batch_size seconds samples_per_second"
    assert [epoch["step"] for epoch in epochs] == [9, 18]  # 600 // 64 steps each
    assert (epochs[1]["test_samples"], end["world_size"], end["global_batch_size"]) == (101, 2, 64)
    # Linear scaling, and the cosine at mid-step.
    assert epochs[1]["lr"] == pytest.approx(64 / 256 * 3e-3 * (1 + math.cos(math.pi * (17.5 / 18 - 0.3) / 0.7)) / 2)
    lines = re.findall(r"(?m)^(?:rank|global|epoch|weights) .*?(?=  |$)", result.stdout)  # older Gloos print, too
    assert lines == ["epoch 1", "epoch 2", f"weights sha256 {end['weights_sha256']}, the same on every rank"]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # a share of the cores, where torchrun sets one
    assert len(re.findall(rf"rank [01] of 2 on \S+, cpu, {threads} CPU threads, gloo", result.stderr)) == 2


def test_no_epochs_and_threads_that_are_the_users_choice(small_mnist):
    for env, threads in (({"OMP_NUM_THREADS": 3}, 3), ({"SLURM_JOB_ID": 1}, 1)):
        output = finish(MANUAL, "--data-dir", small_mnist, "--epochs", 0, **env)
        assert output.count(f", cpu, {threads} CPU threads, gloo") == 2
        assert re.search(r"(?m)^test loss \S+  accuracy \S+% of 101 test images\nweights sha256 \w+, ", output)


@pytest.mark.parametrize("script", SCRIPTS)
def test_plain_python_alone_in_an_empty_folder_learns_synthetic_images(script, tmp_path):
    shutil.copy(ROOT / script, tmp_path)
    flags = ("--dataset", "synthetic", "--train-size", 2048, "--batch-size", 32, "--epochs", 1)
    # More threads would wait for each other by spinning, for minutes where another test has their core.
    result = run([sys.executable, script, *flags], cwd=tmp_path, PYTHONPATH="", OMP_NUM_THREADS=1)
    assert float(re.search(r"accuracy (\S+)% of 10,000 test images", result.stdout)[1]) > 80, result.stderr
    assert os.listdir(tmp_path) == [script]


def test_a_log_file_gets_lines_and_a_terminal_gets_a_bar(small_mnist):
    flags = ("--data-dir", small_mnist, "--epochs", 1, "--batch-size", 50, "--log-interval", 5)
    log = finish(DDP, *flags, nproc=1)
    assert re.findall(r"step (\d+)/12", log) == ["5", "10", "12"] and "\r" not in log
    ours, theirs = os.openpty()
    subprocess.run(["stty", "rows", "24", "columns", "120"], stdin=theirs, check=True)
    with Ranks(DDP, *flags, nproc=1, log=Path(os.ttyname(theirs))):
        terminal = ""
        while "sha256" not in terminal:
            terminal += os.read(ours, 10_000).decode()
    assert re.search(r"\r.* 12/12 .*loss [\d.]+  [\d,]+ samples/s", terminal), terminal
    assert "step 5/12" not in terminal


@pytest.mark.parametrize(("sync", "overlaps"), [("flat", [False]), ("bucketed", [True] * 3)])
def test_the_profile_shows_that_buckets_are_sent_during_backward(sync, overlaps, train, tmp_path):
    folder = tmp_path / "new" / "traces"
    train(MANUAL, "--sync", sync, "--epochs", 1, "--batch-size", 8, "--accum-steps", 2, "--profile", folder)
    assert sorted(path.name.partition(".")[0] for path in folder.iterdir()) == ["rank0", "rank1"]
    (_, end), all_reduces = read_step(folder)
    assert [start < end for start, _ in all_reduces] == overlaps
