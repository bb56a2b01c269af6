"""Nothing is lost: whatever ends a run, and however often, it ends on the bits of the run that nobody disturbed."""

import contextlib
import errno
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, Background, environment, errors, launch, outcome, read_metrics, run, start, train
from soak import disturb

import train_ddp

DDP, MANUAL = SCRIPTS
SPY = ROOT / "tests" / "spy.py"
STOPPED = "stopped by a signal in epoch"


@pytest.fixture(scope="module")
def flags(small_mnist):
    """Two epochs, of 18 steps each at two processes."""
    return ("--data-dir", small_mnist, "--batch-size", 16, "--epochs", 2, "--log-interval", 1)


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    """Return the outcome of a whole run: undisturbed(script, nproc), where the twins end alike but at three."""
    known = {}

    def undisturbed(script, nproc):
        if (script, nproc) not in known:
            metrics = tmp_path_factory.mktemp("undisturbed") / "m"
            known[script, nproc] = outcome(train(script, *flags, nproc=nproc, metrics=metrics).metrics)
        return known[script, nproc]

    return undisturbed


def saving(folder):
    """Return the flags that keep a run in a folder."""
    return ("--checkpoint", folder / "ck.pt", "--save-every", 5, "--metrics", folder / "m.jsonl")


def finish(script, nproc, flags, folder):
    """Run to the end from where a run in the folder was interrupted. Return the outcome of both together."""
    result = train(script, *flags, *saving(folder)[:-2], nproc=nproc, metrics=folder / "m.jsonl")
    assert sorted(path.name for path in folder.glob("ck.pt*")) == ["ck.pt", "ck.pt.lock"]
    return outcome(result.metrics)


def catches(pid, number):
    """Say whether a process has a handler for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text()).group(1)
    return int(caught, 16) >> (number - 1) & 1


KILLED = [(DDP, 2, "--standalone"), (MANUAL, 2, "--nnodes=1"), (MANUAL, 3, "--standalone")]


@pytest.mark.parametrize(("script", "nproc", "how"), KILLED)
def test_kills_at_any_moment(script, nproc, how, undisturbed, flags, tmp_path):
    kills = 3
    command = start(nproc, how, f"--max-restarts={kills}")  # so that each may cost one restart
    with Background(*command, ROOT / script, *flags, *saving(tmp_path), log=tmp_path / "log") as job:
        disturb(job, nproc, kills, 7, random.Random(f"{script} {nproc}"))
        assert job.wait() == 0, job.output()
        output = job.output()
    assert outcome(read_metrics(tmp_path / "m.jsonl")) == undisturbed(script, nproc)
    steps = [18 * int(epoch) + int(step) for epoch, step in re.findall(r"epoch (\d)/2  step (\d+)/", output)]
    for before, after in itertools.pairwise(steps):
        assert after > before - 5, steps  # --save-every


def test_a_kill_while_rank_0_writes(undisturbed, flags, tmp_path):
    whole, half = tmp_path / "ck.pt", tmp_path / "ck.pt.tmp"
    for _ in range(20):
        with Background(
            *start(), ROOT / DDP, *flags, *saving(tmp_path), "--save-every", 1, log=tmp_path / "log"
        ) as job:
            job.wait_for(whole.exists)
            job.wait_for(lambda: half.exists() and half.stat().st_size)
            job.kill(None)
            job.wait()
        if half.exists():  # else it was renamed in that moment
            break
    assert half.exists()
    assert finish(MANUAL, None, flags, tmp_path) == undisturbed(DDP, None)


def test_a_killed_torchrun_leaves_no_orphans_and_a_second_start_goes_on(undisturbed, flags, tmp_path):
    with Background(*start(2), ROOT / MANUAL, *flags, *saving(tmp_path), log=tmp_path / "log") as job:
        job.wait_for("epoch 1/2  step 8/")
        job.process.kill()
        assert finish(MANUAL, 2, flags, tmp_path) == undisturbed(DDP, 2)
        assert not job.pids()


def everyone(job, number):
    """Send a signal as scancel does: to torchrun, which ignores it here, and to all ranks, several times."""
    for _ in range(3):
        for rank in reversed(range(2)):
            with contextlib.suppress(KeyError, ProcessLookupError):
                job.kill(rank, number)
            time.sleep(0.1)


STOPS = {  # what is sent, and torchrun's exit code
    "SIGTERM to torchrun": (lambda job: job.process.terminate(), 1),
    "Ctrl-C": (lambda job: job.process.send_signal(signal.SIGINT), 1),
    "SIGTERM to one rank": (lambda job: job.kill(1, signal.SIGTERM), 0),
    "SIGUSR1 to all": (lambda job: everyone(job, signal.SIGUSR1), 0),
    "SIGTERM and SIGUSR1": (lambda job: [everyone(job, signal.SIGTERM), everyone(job, signal.SIGUSR1)], 0),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_polite_stop(how, undisturbed, flags, tmp_path):
    stop, code = STOPS[how]
    first, second = random.Random(how).sample(SCRIPTS, 2)  # the twins read each other's checkpoints
    with Background(*start(2), ROOT / first, *flags, *saving(tmp_path), log=tmp_path / "log") as job:
        job.wait_for("epoch 1/2  step 7/")
        stop(job)
        assert job.wait() == code, job.output()
        assert job.output().count(STOPPED) == 1, job.output()
        assert "error: " not in job.output()
        assert finish(second, 2, flags, tmp_path) == undisturbed(DDP, 2)


def test_a_signal_during_the_start_and_during_an_evaluation(undisturbed, flags, tmp_path):
    command = (*start(2), ROOT / DDP, *flags, *saving(tmp_path))
    with Background(*command, log=tmp_path / "log") as job:
        for rank in (1, 0):  # before torch is imported
            job.wait_for(lambda: rank in job.pids() and catches(job.pids()[rank], signal.SIGUSR1))  # noqa: B023
            job.kill(rank, signal.SIGUSR1)
        assert job.wait() == 0, job.output()
        assert f"{STOPPED} 1, after 32 samples" in job.output()
    # 10,000 test images take seconds. Then, the epoch is complete: the stop comes after a step of the next one.
    flags = ("--dataset", "synthetic", "--train-size", 128, "--batch-size", 32, "--epochs", 2, "--log-interval", 1)
    command = (*start(2), ROOT / DDP, *flags, "--checkpoint", tmp_path / "evaluation.pt")
    for epoch in (1, 2):
        with Background(*command, log=tmp_path / "log") as job:
            job.wait_for(f"epoch {epoch}/2  step 2/2")
            job.process.terminate()
            job.wait()
            assert f"epoch {epoch}  train loss" in job.output()
            assert (f"{STOPPED} 2, after 64 samples" if epoch == 1 else "weights sha256") in job.output()


def test_a_second_signal_after_ctrl_c(flags, tmp_path):
    with Background(*start(), ROOT / DDP, *flags, "--epochs", 1000, *saving(tmp_path), log=tmp_path / "log") as job:
        job.wait_for("step 1/")
        job.process.send_signal(signal.SIGINT)
        job.wait_for(lambda: not catches(job.process.pid, signal.SIGTERM))
        job.process.terminate()
        assert job.wait() == -signal.SIGTERM
        assert STOPPED not in job.output()


def test_a_stop_whose_words_nobody_reads(flags, tmp_path):
    command = [*map(str, (*start(), ROOT / DDP, *flags, *saving(tmp_path)))]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        while "step 1/" not in process.stderr.readline():
            pass
        process.stderr.close()  # like `2>&1 | tee log`, which the same Ctrl-C ends
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert (tmp_path / "ck.pt").exists()


def test_a_stop_without_a_checkpoint(flags, tmp_path):
    with Background(*start(), ROOT / MANUAL, *flags, log=tmp_path / "log") as job:
        job.wait_for("step 1/")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 1
        assert re.search(f"error: {STOPPED} 1.*without --checkpoint", job.output().splitlines()[-1])


@pytest.mark.parametrize(("script", "before", "after"), [(DDP, 2, 1), (MANUAL, 1, 2), (DDP, 2, 3), (MANUAL, 2, 3)])
def test_another_world_size_uses_each_sample_once(script, before, after, flags, tmp_path):
    command = (SPY, ROOT / script, *flags, "--epochs", 1, *saving(tmp_path))
    spy = {"SPY": tmp_path, "TRAIN_IMAGES": 600}
    with Background(*start(before), *command, log=tmp_path / "log", **spy) as job:
        job.wait_for(lambda: 0 in job.pids() and catches(job.pids()[0], signal.SIGUSR1))
        job.kill(0, signal.SIGUSR1)
        assert job.wait() == 0, job.output()
    result = launch(*command, nproc=after, **spy)
    left = (600 // after * after - 16 * before) // (16 * after)  # steps
    used = 16 * before + left * 16 * after
    assert f"{16 * before} samples are used: {left} steps to go, {600 - used} samples will be left out" in result.stderr
    assert f"processes {before} -> {after}" in result.stderr
    read = [int(line) for path in tmp_path.glob("rank*") for line in path.read_text().split()]
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0)).tolist()  # torch's, of epoch 0
    assert sorted(read) == sorted(order[:used])


def test_what_is_random_goes_on_as_well(flags, tmp_path):
    command = (SPY, ROOT / DDP, *flags, "--epochs", 1)
    whole = launch(*command, nproc=2, DROPOUT=1)
    without = launch(*command[1:], nproc=2)
    command += ("--checkpoint", tmp_path / "ck.pt")
    with Background(*start(2), *command, log=tmp_path / "log", DROPOUT=1) as job:
        job.wait_for("step 7/")
        job.kill(0, signal.SIGTERM)
        assert job.wait() == 0, job.output()
    both = launch(*command, nproc=2, DROPOUT=1)
    hashes = [result.stdout.splitlines()[-1] for result in (whole, both, without)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.fixture(scope="module")
def saved(flags, tmp_path_factory):
    """A checkpoint after one whole epoch, with its metrics."""
    folder = tmp_path_factory.mktemp("saved")
    train(DDP, *flags, "--epochs", 1, "--checkpoint", folder / "ck.pt", metrics=folder / "m.jsonl")
    return folder


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def with_other_model(path):
    state = torch.load(path)
    state["model"]["conv1.weight"] = torch.zeros(64, 3, 7, 7)
    torch.save(state, path)


def with_flipped_bit(path):
    with path.open("r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)[0]
        file.seek(50_000_000)
        file.write(bytes([byte ^ 1]))


DAMAGES = {  # what was done to the file, or flags that do not fit it: what the line says
    "truncated": (lambda path: os.truncate(path, 5_000_000), "damaged"),
    "empty": (lambda path: os.truncate(path, 0), "damaged"),
    "random bytes": (lambda path: path.write_bytes(random.Random(0).randbytes(10_000)), "damaged"),
    "one bit": (with_flipped_bit, "wrong checksum of archive/data/"),
    "a pickle bomb": (lambda path: path.write_bytes(pickle.dumps(Bomb())), "damaged"),
    "a bomb in torch's format": (lambda path: torch.save(Bomb(), path), "weights_only"),
    "another program's": (lambda path: torch.save({"model": {}}, path), "another program's file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "another model": (with_other_model, "size mismatch for conv1.weight"),
    "--seed 1": (None, "--seed 0 -> 1"),
    "--train-size 500": (None, "--train-size 600 -> 500"),
    "--dataset synthetic": (None, "--dataset mnist -> synthetic"),
}


def test_unfit_files_are_refused_and_stay(subtests, saved, flags, tmp_path):
    def attempt(i, name):
        do, _ = DAMAGES[name]
        path = tmp_path / f"ck.{i}"
        shutil.copy(saved / "ck.pt", path)
        do and do(path)
        before = path.is_dir() or path.read_bytes()
        result = launch(
            ROOT / SCRIPTS[i % 2], *flags, *([] if do else name.split()), "--checkpoint", path, cwd=tmp_path
        )
        unchanged = (path.is_dir() or path.read_bytes()) == before
        return result, unchanged

    with ThreadPoolExecutor(2) as pool:
        attempts = list(pool.map(attempt, range(len(DAMAGES)), DAMAGES))
    for (name, (_, words)), (result, unchanged) in zip(DAMAGES.items(), attempts, strict=True):
        with subtests.test(msg=name):
            (line,) = errors(result)
            assert words in line and "give another name" in line
            assert unchanged
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_ends_the_run_and_leaves_the_old_file(saved, flags, tmp_path):
    path = Path(shutil.copy(saved / "ck.pt", tmp_path))
    before = path.read_bytes()
    command = (*start(2), ROOT / DDP, *flags, "--checkpoint", path)
    result = run(["bash", "-c", 'ulimit -f 100000 && exec "$@"', "-", *command])
    (line,) = errors(result)
    assert "not saved, the one before it is as it was" in line and "File too large" in line
    assert path.read_bytes() == before
    assert not (tmp_path / "ck.pt.tmp").exists()


def test_a_folder_that_cannot_be_written_to(flags, tmp_path):
    tmp_path.chmod(0o555)
    without_root = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    for folder, words in ((tmp_path, "Permission denied"), (tmp_path / "missing", "No such file or directory")):
        result = run([*without_root, *start(), ROOT / MANUAL, *flags, "--checkpoint", folder / "ck.pt"])
        (line,) = errors(result)
        assert "--checkpoint: [Errno" in line and words in line
        assert "step 1/" not in result.stderr


def test_a_file_system_without_locks(monkeypatch, capsys, tmp_path):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("train_ddp.fail_together", lambda problem: problem and pytest.fail(problem))
    train_ddp.Checkpoint(tmp_path / "ck.pt")
    assert "ck.pt is not locked" in capsys.readouterr().err


def test_two_runs_of_one_file(flags, tmp_path):
    command = (ROOT / DDP, *flags, "--epochs", 1000, *saving(tmp_path))
    with Background(*start(), *command, log=tmp_path / "log") as job:
        job.wait_for("step 1/")
        (line,) = errors(launch(*command))
        assert f"another run is using {tmp_path}/ck.pt" in line
        assert job.process.poll() is None


def test_finished_and_more_epochs(saved, flags, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    metrics, link, half = tmp_path / "m.jsonl", tmp_path / "link", tmp_path / "ck.pt.tmp"
    link.symlink_to("ck.pt")
    half.touch()  # by a process that was killed
    before, command = metrics.read_text(), ("--checkpoint", link, "--metrics", metrics)
    same = launch(ROOT / MANUAL, *flags, "--epochs", 1, *command)
    assert same.returncode == 0, same.stderr
    assert "nothing to train: 1 of 1 epochs are done" in same.stderr and "step 1/" not in same.stderr
    assert json.loads(before.splitlines()[-1])["weights_sha256"] in same.stdout
    assert metrics.read_text() == before
    assert not half.exists()

    # A kill between the checkpoint and the metrics, or in the middle of a line, costs no line.
    for damage in (before.splitlines(keepends=True)[0], before[:-10], before + '{"epoch": 2, "st'):
        metrics.write_text(damage)
        launch(ROOT / MANUAL, *flags, "--epochs", 1, *command)
        assert metrics.read_text() == before

    more = launch(ROOT / DDP, *flags, "--epochs", 2, "--lr", 0.001, "--batch-size", 20, *command)
    (line,) = (line for line in more.stderr.splitlines() if "going on from" in line)
    assert "; --epochs 1 -> 2; --batch-size 16 -> 20; --lr 0.003 -> 0.001" in line
    lines = read_metrics(metrics)
    assert [entry.get("epoch") for entry in lines] == [1, None, 2, None]
    assert lines[2]["step"] == 600 // 16 + 600 // 20
    assert link.is_symlink()


def test_threads_are_told(saved, flags, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    state = torch.load(tmp_path / "ck.pt")
    state["setting"] |= {"CPU threads": 99, "torch": "1.0"}
    torch.save(state, tmp_path / "ck.pt")
    result = launch(ROOT / DDP, *flags, "--epochs", 1, "--checkpoint", tmp_path / "ck.pt")
    assert re.search(r"going on from .*; CPU threads 99 -> \d+; torch 1.0 -> ", result.stderr), result.stderr


@pytest.mark.parametrize("damaged", [False, True])
def test_nodes_that_share_no_disk(damaged, saved, flags, tmp_path, free_port):
    for node in "ab":
        (tmp_path / node).mkdir()
    shutil.copy(saved / "ck.pt", tmp_path / "b")  # where rank 1 is; rank 0 may have none, or a damaged one
    if damaged:
        (tmp_path / "a" / "ck.pt").write_bytes(b"damaged")
    jobs = []
    with contextlib.ExitStack() as stack:
        for node, name in enumerate("ab"):
            rendezvous = ("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={free_port}")
            command = (*start(1, *rendezvous), ROOT / DDP, *flags, "--epochs", 1, "--checkpoint", "ck.pt")
            jobs.append(Background(*command, cwd=tmp_path / name, log=tmp_path / name / "log"))
            stack.enter_context(jobs[-1])
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].output()
    assert "nothing to train: 1 of 1 epochs are done" in jobs[0].output()
    assert ("damaged" in jobs[0].output()) == damaged
