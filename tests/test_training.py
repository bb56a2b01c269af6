"""Whole runs: both scripts learn, end on the same bits, and say so in the same words."""

import gzip
import json
import math
import os
import re
import shlex
import shutil
import subprocess

import conftest
import pytest
from conftest import ROOT, SCRIPTS, environment, launch, outcome, start, train

DDP, MANUAL = SCRIPTS
EPOCH_KEYS = {
    *("epoch", "step", "lr", "train_loss", "test_loss", "test_accuracy", "test_samples", "samples_per_second"),
}
END_KEYS = {
    *("weights_sha256", "world_size", "global_batch_size", "seconds", "samples_per_second", "peak_memory_bytes"),
}


@pytest.fixture
def run(small_mnist, tmp_path):
    """Train on the small MNIST: run(script, nproc, *flags)."""

    def run(script, nproc, *flags, **env):
        flags = ("--data-dir", small_mnist, "--batch-size", 32, "--epochs", 2, *flags)
        return train(script, *flags, nproc=nproc, metrics=tmp_path / "metrics.jsonl", **env)

    return run


def words(result):
    """Return what a run prints, without times and memory."""
    return [re.sub(r"[\d.,]+ (s\b|samples/s|MiB)", r"# \1", line) for line in conftest.own_lines(result)]


def test_twins_end_on_the_same_bits_at_two_processes(run):
    ddp = run(DDP, 2)
    for sync in ("bucketed", "flat", "per-parameter"):
        manual = run(MANUAL, 2, "--sync", sync)
        assert outcome(manual.metrics) == outcome(ddp.metrics), sync
        assert words(manual) == words(ddp), sync

    first, second, end = ddp.metrics
    assert set(first) == set(second) == EPOCH_KEYS and set(end) == END_KEYS
    assert (first["epoch"], first["step"], second["epoch"], second["step"]) == (1, 9, 2, 18)  # 600 // 64 steps
    assert first["test_samples"] == 101
    assert (end["world_size"], end["global_batch_size"]) == (2, 64)
    assert second["lr"] == pytest.approx(3e-3 * (1 + math.cos(math.pi * (17.5 / 18 - 0.3) / 0.7)) / 2)
    assert second["test_accuracy"] > 0.3  # ten classes
    assert end["weights_sha256"] in ddp.stdout
    assert f"CPU threads: {max(1, len(os.sched_getaffinity(0)) // 2)}" in ddp.stderr


def test_twins_agree_with_accumulation_clipping_bf16_and_small_buckets(run):
    flags = ("--accum-steps", 2, "--clip-grad-norm", 0.5, "--precision", "bf16", "--bucket-cap-mb", 5)
    flags += ("--scale-lr", "sqrt", "--train-size", 500, "--deterministic")
    ddp, manual = run(DDP, 2, *flags), run(MANUAL, 2, *flags)
    assert outcome(manual.metrics) == outcome(ddp.metrics)
    assert ddp.metrics[-1]["global_batch_size"] == 128
    assert ddp.metrics[0]["step"] == 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_reruns_repeat_themselves_at_three_processes(run, script):
    once, again, other = (run(script, 3, "--epochs", 1, "--seed", seed) for seed in (0, 0, 1))
    assert outcome(once.metrics) == outcome(again.metrics)
    assert once.metrics[-1]["weights_sha256"] != other.metrics[-1]["weights_sha256"]
    assert once.metrics[0]["test_samples"] == 101  # 3 does not divide it


def test_plain_python_alone_in_an_empty_folder_twice_at_once(small_mnist, tmp_path):
    runs = []
    for script in SCRIPTS:
        folder = tmp_path / script
        folder.mkdir()
        shutil.copy(ROOT / script, folder)
        command = [*start(), script, "--data-dir", small_mnist, "--epochs", "1", "--batch-size", "50"]
        env = environment() | {"PYTHONPATH": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen(command, cwd=folder, env=env, **pipes))
    outputs = [process.communicate(timeout=180) for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    hashes = [re.search("weights sha256 [0-9a-f]{64}", stdout).group() for stdout, _ in outputs]
    assert hashes[0] == hashes[1]
    assert "CPU threads: 1" in outputs[0][1]
    assert sorted(path.name for path in tmp_path.glob("*/*") if path.suffix != ".py") == []


def test_no_epochs_evaluates_and_exits(run):
    result = run(MANUAL, 2, "--epochs", 0, OMP_NUM_THREADS=2)
    assert "accuracy" in result.stdout and "weights sha256" in result.stdout
    assert [set(entry) for entry in result.metrics] == [END_KEYS]
    assert "CPU threads: 2" in result.stderr  # asked for, so not shared out


def test_a_log_file_gets_lines_and_a_terminal_gets_a_bar(small_mnist):
    flags = ("--data-dir", small_mnist, "--epochs", 1, "--batch-size", 50, "--log-interval", 5)
    log = launch(ROOT / DDP, *flags).stderr
    assert re.findall(r"step (\d+)/12", log) == ["5", "10", "12"]
    assert "\r" not in log
    command = f"stty rows 24 cols 80; {shlex.join(map(str, (*start(), ROOT / DDP, *flags)))}"
    terminal = conftest.run(["script", "--quiet", "--return", "--command", command, "/dev/null"])
    assert terminal.returncode == 0, terminal.stdout
    assert re.search(r"\repoch 1/1:.* 12/12 ", terminal.stdout), terminal.stdout
    assert "step 5/12" not in terminal.stdout


def test_learns_synthetic_images(tmp_path):
    flags = ("--dataset", "synthetic", "--train-size", 4096, "--batch-size", 32, "--epochs", 1)
    result = train(MANUAL, *flags, nproc=2, metrics=tmp_path / "m")
    assert result.metrics[0]["test_accuracy"] > 0.8
    assert result.metrics[0]["test_samples"] == 10_000


def test_learns_real_mnist_on_the_same_bits(real_mnist, tmp_path):
    flags = ("--data-dir", real_mnist, "--train-size", 4096, "--batch-size", 32, "--epochs", 1)
    ddp, manual = (train(script, *flags, nproc=2, metrics=tmp_path / "m") for script in SCRIPTS)
    assert outcome(ddp.metrics) == outcome(manual.metrics)
    assert ddp.metrics[0]["test_accuracy"] > 0.85
    assert ddp.metrics[0]["test_samples"] == 10_000


def read_trace(path):
    """Return the ranges of a trace, from its first to its last microsecond, by name."""
    found = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event.get("cat") in ("user_annotation", "cpu_op"):
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


@pytest.mark.parametrize(("script", "flags"), [(DDP, ()), (MANUAL, ()), (MANUAL, ("--sync", "flat"))])
def test_profile(script, flags, run, tmp_path):
    """Three buckets are sent during backward(); with `flat`, one buffer after it."""
    result = run(script, 2, *flags, "--epochs", 1, "--profile", tmp_path / "new" / "traces")
    assert f"each rank's trace is in {tmp_path}/new/traces: open one in" in result.stderr
    assert "ERROR" not in result.stderr
    for rank in range(2):
        trace = read_trace(tmp_path / "new" / "traces" / f"rank{rank}.json.gz")
        names = {"forward", "backward", "step"} | ({"synchronize"} if script == MANUAL else set())
        assert all(len(trace[name]) == 3 for name in names)
        assert "synchronize" in names or "synchronize" not in trace
        during = [
            sum(start < at < end for at, _ in trace["c10d::allreduce_"])
            for start, end in trace["backward" if not flags else "synchronize"]
        ]
        assert during == ([1] * 3 if flags else [3] * 3)


@pytest.mark.parametrize("steps", [2, 6])
def test_profile_of_too_few_steps(steps, run, tmp_path):
    """It takes 8, the last 3 of them for the trace."""
    result = run(DDP, None, "--train-size", 32 * steps, "--epochs", 1, "--profile", tmp_path)
    assert f"--profile: no trace, that takes an epoch of 8 steps, and this had {steps}\n" in result.stderr
    assert not list(tmp_path.glob("rank*"))
