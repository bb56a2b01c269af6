"""The scripts differ only where DDP is; they learn, end on the same bits, and say so in the same words."""

import argparse
import contextlib
import difflib
import itertools
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    DDP,
    MANUAL,
    ROOT,
    SCRIPTS,
    Ranks,
    finish,
    in_dir,
    outcome,
    run,
    wait_until,
    weights,
    write_mnist,
)
from small_model import run_script, with_small_model

import train_ddp


def shared_part(script):
    """Return the lines of a script without its docstring and its classes, which are those written by hand."""
    source = (ROOT / script).read_text()
    return re.sub(r'(?ms)\A""".*?"""|^class .*?(?=^@record|^def )', "", source).splitlines()


def test_the_scripts_differ_only_where_ddp_is():
    changes = [line for line in difflib.ndiff(*map(shared_part, SCRIPTS)) if line[0] in "+-"]
    assert len(changes) <= 24, "\n".join(changes)
    of_ddp = r"DistributedData|Sampler|TensorDataset|[aA]verager|ddp|model\(images\)|parameters|--sync|functools"
    assert all(re.search(of_ddp, line) for line in changes), changes


RESNET18, SMALL_ONE = (run_script,), ()  # what precedes the script: of itself, `finish` takes the small model
SHORT = ("--train-size", 32, "--batch-size", 4, "--epochs", 1, "--accum-steps", 2, "--clip-grad-norm", 0.5)
BF16 = (*SHORT, "--precision", "bf16")  # for which older CPUs need a minute with ResNet18


@pytest.mark.parametrize(("model", "flags"), [(RESNET18, ()), (RESNET18, SHORT), (SMALL_ONE, BF16)])
def test_twins_and_reruns_end_on_the_same_bits_at_two_processes(model, flags, tmp_path):
    """With ResNet18, whose gradients fill three buckets, where it does not take minutes."""
    data = write_mnist(tmp_path / "data", test_size=11)
    flags = ("--data-dir", data, "--train-size", 64, "--batch-size", 16, "--epochs", 2, *flags)
    results = []
    for way in ((DDP,), (DDP,), (MANUAL,), (MANUAL, "--sync", "flat"), (MANUAL, "--sync", "per-parameter")):
        metrics = tmp_path / str(len(results))
        words = re.sub(r"samples_per_second \S+", "", finish(*model, *way, *flags, "--metrics", metrics))
        lines = re.findall(r"(?m)^(?:world_size|epoch|weights_sha256) .*", words)  # older Gloos print, too
        assert lines[0].startswith("world_size ") and lines[-1].startswith("weights_sha256 ")
        results.append((outcome(metrics), lines))
        assert results[-1] == results[0]


def test_evaluation_is_exact_at_any_number_of_processes(small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--checkpoint", tmp_path / "ck.pt")
    (result,) = re.findall("test_loss .* test_samples 101\n", finish(DDP, *flags, "--epochs", 1))
    assert result in finish(MANUAL, *flags, "--epochs", 0, nproc=3)


def test_metrics(small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 16, "--epochs", 2, "--log-interval", 5)
    flags += ("--accum-steps", 2, "--scale-lr", "--deterministic", "--metrics", tmp_path / "m")
    output = finish(DDP, *flags)
    entries = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    report, test = "epoch step lr loss samples_per_second", "epoch test_loss test_accuracy test_samples"
    epoch = [report, report, test]
    names = ["world_size global_batch steps_per_epoch", *epoch, *epoch, "weights_sha256"]
    assert [" ".join(entry) for entry in entries] == names
    assert [*entries[0].values()] == [2, 64, 9]  # 600 // 64 steps
    assert [entry["step"] for entry in entries if "step" in entry] == [5, 9, 5, 9]
    # Linear scaling, with the warm-up and the cosine, each at mid-step.
    assert entries[1]["lr"] == pytest.approx(64 / 256 * 3e-3 * 4.5 / 18 / 0.3)
    assert entries[5]["lr"] == pytest.approx(64 / 256 * 3e-3 * (1 + math.cos(math.pi * (17.5 / 18 - 0.3) / 0.7)) / 2)
    assert entries[6]["test_samples"] == 101 and isinstance(entries[6]["test_samples"], int)
    lines = re.findall(r"(?m)^(?:world_size|epoch|weights_sha256) .*", output)  # the ranks and older Gloos print, too
    assert [re.sub(r"(\w+) \S+", r"\1", line).replace("  ", " ") for line in lines] == names
    assert weights(lines[-1]) == entries[-1]["weights_sha256"]
    assert len(re.findall(r"rank [01] of 2 on \S+, cpu, 1 CPU threads, gloo", output)) == 2


def with_a_clock(*command):
    """Run a script for which a second passes whenever it looks, and when it evaluates."""
    seconds, evaluate = itertools.count(1), torch.nn.Module.eval
    time.perf_counter = seconds.__next__
    torch.nn.Module.eval = lambda model: next(seconds) and evaluate(model)
    with_small_model(run_script, *command)


def test_a_report_is_of_all_ranks_and_steps_since_the_last_one(small_mnist):
    def reports(interval):
        flags = ("--data-dir", small_mnist, "--batch-size", 16, "--epochs", 2, "--log-interval", interval)
        flags += ("--accum-steps", 2)
        found = re.findall(r"  loss (\S+)  samples_per_second (\S+)", finish(with_a_clock, DDP, *flags))
        return [[*map(float, values)] for values in zip(*found, strict=True)]

    losses, speeds = reports(1)
    assert losses[0] == pytest.approx(math.log(10), abs=1) and speeds == 18 * [64]  # nothing is learnt yet
    means = [sum(part) / len(part) for part in (losses[:5], losses[5:9], losses[9:14], losses[14:])]
    assert reports(5) == [pytest.approx(means, rel=1e-3), 2 * [5 * 64, 4 * 64]]


def test_images_are_scaled_and_normalized_and_those_for_testing_are_others_and_all(monkeypatch):
    monkeypatch.setattr(train_ddp, "TRAIN_IMAGES", 20)
    monkeypatch.setattr(train_ddp, "TEST_IMAGES", 20)
    sets = train_ddp.load_data(argparse.Namespace(dataset="synthetic", seed=3, train_size=5), 0, 0, "cpu")
    for split, size in ((0, 5), (1, 20)):
        images, labels = map(torch.as_tensor, train_ddp.synthesize(3, split, 20))
        expected = ((images[:size, None] / 255 - 0.1307) / 0.3081, labels[:size])
        torch.testing.assert_close(sets[split].tensors, expected)
    assert not torch.equal(sets[0].tensors[1], sets[1].tensors[1][:5])


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_epochs_threads_that_are_the_users_choice_and_a_rank_without_a_test_image(script, tmp_path):
    flags = ("--data-dir", write_mnist(tmp_path, test_size=1), "--epochs", 0)
    output = finish(script, *flags, OMP_NUM_THREADS=3)
    assert output.count(", cpu, 3 CPU threads, gloo") == 2
    assert re.search(r"(?m)^test_loss \S+  test_accuracy \S+  test_samples 1\nweights_sha256 \w+$", output)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_seed_makes_the_weights(script, small_mnist):
    flags = (script, "--data-dir", small_mnist, "--epochs", 0, "--seed")
    first, again, other = (weights(finish(*flags, seed, nproc=1)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("script", SCRIPTS)
def test_plain_python_alone_in_an_empty_folder_learns(script, tmp_path, tmp_path_factory):
    shutil.copy(ROOT / script, tmp_path)
    data = write_mnist(tmp_path_factory.mktemp("mnist"), train_size=1024)
    flags = ("--data-dir", data, "--batch-size", 16, "--epochs", 1)
    # More threads would wait for each other by spinning, for minutes where another test has their core.
    with socket.socket() as other:  # another run, on torch's own port
        with contextlib.suppress(OSError):  # if there is such a run
            other.bind(("", 29500))
            other.listen()
        result = run([sys.executable, script, *flags], cwd=tmp_path, PYTHONPATH="", OMP_NUM_THREADS=1)
    assert float(re.search(r"test_accuracy (\S+)  test_samples 101\n", result.stdout)[1]) > 0.8, result.stderr
    assert "rank 0 of 1 on " in result.stderr and "rank 0 of 1 on " not in result.stdout
    assert os.listdir(tmp_path) == [script]


def shown(text):
    """Return the rows of a terminal after `text`: a carriage return goes back to the beginning of a row."""
    rows = []
    for line in text.replace("\x1b[A", "").split("\n"):
        row = ""
        for part in line.split("\r"):
            row = part + row[len(part) :]
        rows.append(row.rstrip())
    return rows


def on_a_terminal(*command, stop_at=None):
    """Run a script on a terminal; send it a Ctrl-C when `stop_at` is there. Return all that it wrote."""
    ours, theirs = os.openpty()
    subprocess.run(["stty", "rows", "24", "columns", "120"], stdin=theirs, check=True)
    text = ""
    with Ranks(*command, nproc=1, log=Path(os.ttyname(theirs))) as ranks:
        while ranks.pids() or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 10_000).decode()
            if stop_at and stop_at in text:
                ranks.kill(0, signal.SIGINT)
                stop_at = None
    return text


def test_a_log_file_gets_lines_and_a_terminal_a_bar_below_them(small_mnist):
    flags = ("--data-dir", small_mnist, "--epochs", 1, "--batch-size", 50, "--log-interval", 5)
    log = finish(DDP, *flags, nproc=1)
    assert re.findall(r"step (\d+) ", log) == ["5", "10", "12"] and "\r" not in log
    terminal = on_a_terminal(DDP, *flags)
    assert re.search(r"\r.* \d+/12 \[", terminal), terminal
    words = re.compile(r"samples_per_second \S+")
    assert [words.sub("", row) for row in shown(terminal)] == [words.sub("", row) for row in log.split("\n")]


def test_rank_0_alone_draws_a_bar(monkeypatch):
    with open(os.openpty()[1], "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        for rank, hidden in enumerate((False, True, True)):
            monkeypatch.setattr(train_ddp.dist, "get_rank", lambda rank=rank: rank)
            assert bool(train_ddp.progress_bar(0, 9).disable) is hidden


@pytest.mark.parametrize(
    ("flags", "stop_at", "line"),
    [
        ("--log-interval 1 --checkpoint ck.pt", "step 2 ", "stopped by a signal, saved to ck.pt"),
        ("--lr 1e38", None, "step 12: the loss is not finite: try a lower --lr, or --clip-grad-norm 1"),
    ],
)
def test_what_ends_a_run_on_a_terminal_has_a_row_of_its_own(flags, stop_at, line, small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--epochs", 999, "--batch-size", 50, *flags.split())
    terminal = on_a_terminal(in_dir, tmp_path, with_small_model, run_script, DDP, *flags, stop_at=stop_at)
    assert any(re.fullmatch(line, row) for row in shown(terminal)), terminal


def test_ctrl_c_without_a_checkpoint_says_nothing_in_the_row_of_the_bar(small_mnist):
    flags = ("--data-dir", small_mnist, "--epochs", 999, "--batch-size", 50, "--log-interval", 1)
    *reports, bar = shown(on_a_terminal(DDP, *flags, stop_at="step 2 "))
    assert all(re.match(r"rank 0|world_size|epoch|\[Gloo\]", row) for row in reports)
    assert re.fullmatch(r".* \d+/12 \[.*]|", bar)


def test_ctrl_c_that_ends_tee_first_loses_nothing(small_mnist, tmp_path):
    """As in `torchrun ... | tee log`: what reads the output is gone before rank 0 reports and saves."""
    flags = ("--data-dir", small_mnist, "--epochs", 999, "--log-interval", 1, "--checkpoint", tmp_path / "ck.pt")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with Ranks(DDP, *flags, "--batch-size", 50, nproc=1, log=tmp_path / "pipe") as ranks:
        wait_until(lambda: select.select([reader], [], [], 0)[0] and b"step 2 " in os.read(reader, 10_000))
        os.close(reader)
        ranks.kill(0, signal.SIGINT)
        ranks.processes[0].join(60)
        assert (tmp_path / "ck.pt").exists()


VALUES = {"lr": 3.6866e-06, "speed": 12036.4, "count": 60_000, "words": "a b"}


def log_some_values():
    dist.init_process_group("gloo")
    train_ddp.log(argparse.Namespace(metrics=Path("m")), **VALUES)
    dist.barrier()  # rank 0 has the store of addresses, so it must not end before rank 1 has joined


def test_a_line_of_the_log_is_for_people_and_has_all_digits_for_programs(tmp_path):
    output = finish(in_dir, tmp_path, log_some_values)
    assert re.findall("(?m)^lr .*", output) == ["lr 3.687e-06  speed 12036  count 60000  words a b"]
    assert json.loads((tmp_path / "m").read_text()) == VALUES


def test_buckets_are_sent_during_backward(small_mnist):
    """With accumulation: it is the last backward() of the step."""
    flags = ("--data-dir", small_mnist, "--train-size", 64, "--batch-size", 8, "--accum-steps", 2)
    (steps,) = re.findall(r"(?m)^\{.*", finish(run_script, ROOT / "tests" / "overlap.py", *flags))
    steps = json.loads(steps)
    overlaps = {way: [start < end for start, _ in sent] for way, ((_, end), sent, _) in steps.items()}
    assert overlaps == {"flat": [False], "bucketed": [True] * 3}
    assert [round(size / 2**20) for size in steps["bucketed"][2]] == [9, 25, 8]  # MiB; the last layers are the first


def test_ranks_leave_no_file_and_no_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    finish(print, "the first start also starts the server that forks", nproc=1)
    before = os.listdir("/proc/self/fd")
    assert finish(print, "hello", nproc=1) == "hello\n"
    assert (os.listdir("/proc/self/fd"), os.listdir(tmp_path)) == (before, [])
