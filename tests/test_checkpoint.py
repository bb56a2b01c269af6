"""Nothing is lost: whatever ends a run, and however often, it ends on the bits of the run that nobody disturbed."""

import contextlib
import errno
import fcntl
import functools
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

import conftest
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
    """Two epochs, of 10 steps each at two processes."""
    return ("--data-dir", small_mnist, "--train-size", 320, "--batch-size", 16, "--epochs", 2, "--log-interval", 1)


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    """Return the outcome of a whole run: undisturbed(script, nproc), where the twins end alike but at three."""

    @functools.cache
    def undisturbed(script, nproc, *others):
        metrics = tmp_path_factory.mktemp("undisturbed") / "m"
        return outcome(train(script, *flags, *others, nproc=nproc, metrics=metrics).metrics)

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


def test_kills_at_any_moment(undisturbed, flags, tmp_path, free_port):
    """The README's soak test does the same to train_ddp.py."""
    kills, nproc, longer = 3, 3, ("--train-size", 600)
    command = start(nproc, "--nnodes=1", f"--master-port={free_port}", f"--max-restarts={kills}")  # one for each
    with Background(*command, ROOT / MANUAL, *flags, *longer, *saving(tmp_path), log=tmp_path / "log") as job:
        disturb(job, nproc, kills, 2.5, random.Random(37))  # with these numbers, rank 0 and another one die
        assert job.wait() == 0, job.output()
        output = job.output()
    assert "going on from" in output
    assert outcome(read_metrics(tmp_path / "m.jsonl")) == undisturbed(MANUAL, nproc, *longer)
    steps = [12 * int(epoch) + int(step) for epoch, step in re.findall(r"epoch (\d)/2  step (\d+)/", output)]
    back = [before - after + 1 for before, after in itertools.pairwise(steps) if after <= before]
    assert max(back, default=0) <= 5, steps  # --save-every; none is lost if the kill comes right after a save


def test_a_kill_while_rank_0_writes(undisturbed, flags, tmp_path):
    whole, half = tmp_path / "ck.pt", tmp_path / "ck.pt.tmp"
    for _ in range(20):
        with Background(
            *start(2), ROOT / DDP, *flags, *saving(tmp_path), "--save-every", 1, log=tmp_path / "log"
        ) as job:
            job.wait_for(whole.exists)
            job.wait_for(half.exists)
            job.kill(0)
            job.wait()
        if half.exists():  # else it was renamed in that moment
            break
    assert half.exists()
    assert finish(MANUAL, 2, flags, tmp_path) == undisturbed(DDP, 2)


def test_a_killed_torchrun_leaves_no_orphans_and_a_second_start_goes_on(undisturbed, flags, tmp_path):
    with Background(*start(2), ROOT / MANUAL, *flags, *saving(tmp_path), log=tmp_path / "log") as job:
        job.wait_for("epoch 1/2  step 6/")
        job.process.kill()
        assert finish(MANUAL, 2, flags, tmp_path) == undisturbed(DDP, 2)
        assert not job.pids()
        assert "epoch 2/2  step 10/" not in job.output()  # they did not end by having finished


def everyone(job, number):
    """Send a signal as scancel does, to all and several times; but not to torchrun, which should ignore SIGUSR1."""
    for _ in range(3):
        for rank in reversed(range(2)):
            with contextlib.suppress(KeyError, ProcessLookupError):
                job.kill(rank, number)
            time.sleep(0.1)


STOPS = {  # what is sent, and torchrun's exit code
    "SIGTERM to torchrun": (lambda job: job.process.terminate(), 1),
    "Ctrl-C": (lambda job: job.process.send_signal(signal.SIGINT), 1),
    "SIGTERM to one rank": (lambda job: job.kill(1, signal.SIGTERM), 0),
    "SIGUSR1 and SIGTERM to all": (lambda job: [everyone(job, signal.SIGUSR1), everyone(job, signal.SIGTERM)], 0),
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
    state = torch.load(tmp_path / "ck.pt")
    assert f"after {state['progress']['samples']} samples of it" in job.output()
    assert finish(second, 2, flags, tmp_path) == undisturbed(DDP, 2)


def test_a_signal_during_the_start_and_during_an_evaluation(flags, tmp_path):
    command = (*start(2), ROOT / DDP, *flags, *saving(tmp_path))
    with Background(*command, log=tmp_path / "log") as job:
        for rank in (1, 0):  # before torch is imported
            job.wait_for(lambda: rank in job.pids() and catches(job.pids()[rank], signal.SIGUSR1))  # noqa: B023
            job.kill(rank, signal.SIGUSR1)
        assert job.wait() == 0, job.output()
        assert f"{STOPPED} 1, after 32 samples" in job.output()
    # So many test images take seconds. Then, the epoch is complete: the stop comes after a step of the next one.
    data = conftest.write_mnist(tmp_path / "data", train=128, test=2500)
    flags = ("--data-dir", data, "--batch-size", 32, "--epochs", 2, "--log-interval", 1)
    command = (*start(2), ROOT / DDP, *flags, "--checkpoint", tmp_path / "evaluation.pt")
    for epoch in (1, 2):
        with Background(*command, log=tmp_path / "log") as job:
            job.wait_for(f"epoch {epoch}/2  step 2/2")
            job.kill(1, signal.SIGTERM)
            assert job.wait() == 0, job.output()
            assert f"epoch {epoch}  train loss" in job.output()
            assert (f"{STOPPED} 2, after 64 samples" if epoch == 1 else "weights sha256") in job.output()


def test_a_second_signal_after_ctrl_c(flags, tmp_path):
    command = (*start(), ROOT / DDP, *flags, "--epochs", 1000, "--batch-size", 300, *saving(tmp_path))
    with Background(*command, log=tmp_path / "log") as job:
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


@pytest.mark.parametrize(("script", "before", "after"), [(MANUAL, 2, 1), (DDP, 1, 2), (DDP, 2, 3)])
def test_another_world_size_uses_each_sample_once(script, before, after, flags, tmp_path):
    command = (SPY, ROOT / script, *flags, "--epochs", 1, *saving(tmp_path))
    images = 320
    spy = {"SPY": tmp_path, "TRAIN_IMAGES": images}
    with Background(*start(before), *command, log=tmp_path / "log", **spy) as job:
        job.wait_for(lambda: 0 in job.pids() and catches(job.pids()[0], signal.SIGUSR1))
        job.kill(0, signal.SIGUSR1)
        assert job.wait() == 0, job.output()
    result = launch(*command, nproc=after, **spy)
    left = (images // after * after - 16 * before) // (16 * after)  # steps
    used = 16 * before + left * 16 * after
    assert (
        f"{16 * before} samples are used: {left} steps to go, {images - used} samples will be left out" in result.stderr
    )
    assert f"processes {before} -> {after}" in result.stderr
    read = [int(line) for path in tmp_path.glob("rank*") for line in path.read_text().split()]
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0)).tolist()  # torch's, of epoch 0
    assert sorted(read) == sorted(order[:used])


def test_what_is_random_goes_on_as_well(flags, tmp_path):
    command = (SPY, ROOT / DDP, *flags, "--epochs", 1)
    whole, without = launch(*command, DROPOUT=1), launch(*command)
    command += ("--checkpoint", tmp_path / "ck.pt")
    with Background(*start(), *command, log=tmp_path / "log", DROPOUT=1) as job:
        job.wait_for("step 7/")
        job.process.terminate()
        assert job.wait() == 0, job.output()
    both = launch(*command, DROPOUT=1)
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
    "--train-size 300": (None, "--train-size 320 -> 300"),
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
            assert words in line and "--checkpoint" in line
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
    train_ddp.Checkpoint(tmp_path / "ck.pt", {})._lock()
    assert "ck.pt is not locked" in capsys.readouterr().err


def test_two_runs_of_one_file(flags, tmp_path):
    command = (ROOT / DDP, *flags, "--epochs", 1000, *saving(tmp_path))
    with Background(*start(), *command, log=tmp_path / "log") as job:
        job.wait_for("step 1/")
        job.process.send_signal(signal.SIGSTOP)  # it keeps its lock, and leaves the CPU to other tests
        (line,) = errors(launch(*command))
        assert f"another run is using {tmp_path}/ck.pt" in line
        assert job.process.poll() is None


def test_a_start_waits_for_the_lock_of_a_run_that_is_ending(flags, tmp_path):
    with (tmp_path / "ck.pt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = (*start(), ROOT / MANUAL, *flags, "--epochs", 1, "--train-size", 64, *saving(tmp_path))
        with Background(*command, log=tmp_path / "log") as job:
            job.wait_for("steps per epoch")
            time.sleep(2)
            assert "  loss " not in job.output()
            lock.close()
            assert job.wait() == 0, job.output()


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
    assert lines[2]["step"] == 320 // 16 + 320 // 20
    assert link.is_symlink()


def test_threads_are_told(saved, flags, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    state = torch.load(tmp_path / "ck.pt")
    state["setting"] |= {"CPU threads": 99, "torch": "1.0"}
    torch.save(state, tmp_path / "ck.pt")
    result = launch(ROOT / DDP, *flags, "--epochs", 1, "--checkpoint", tmp_path / "ck.pt")
    assert re.search(r"going on from .*; CPU threads 99 -> \d+; torch 1.0 -> ", result.stderr), result.stderr


def test_a_larger_world_at_the_end_of_an_epoch(flags, tmp_path):
    command = (ROOT / MANUAL, *flags, "--train-size", 33, "--checkpoint", tmp_path / "ck.pt")
    with Background(*start(), *command, "--epochs", 1, "--batch-size", 33, log=tmp_path / "log") as job:
        job.wait_for(lambda: catches(job.process.pid, signal.SIGUSR1))
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait() == 0, job.output()
    result = train(*command, nproc=2, metrics=tmp_path / "m")  # 33 samples are one too many for two
    assert "33 samples are used: 0 steps to go, 0 samples will be left out" in result.stderr
    assert [entry.get("step") for entry in result.metrics] == [1, 2, None]


@pytest.fixture
def on_two_nodes(tmp_path):
    """Start two torchruns, which stand for two nodes, in the folders a and b."""
    with contextlib.ExitStack() as stack:

        def on_two_nodes(*command, how, **env):
            jobs = []
            for node, name in enumerate("ab"):
                (tmp_path / name).mkdir(exist_ok=True)
                torchrun = start(1, "--nnodes=2", *(flag.format(node=node, head=not node) for flag in how))
                env |= {"cwd": tmp_path / name, "log": tmp_path / name / "log", "OMP_NUM_THREADS": 1}
                job = Background(*torchrun, *command, **env)
                jobs.append(stack.enter_context(job))
            return jobs

        yield on_two_nodes


def static(port):
    return ("--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")


@pytest.mark.parametrize("first", [None, "damaged", "older"])
def test_nodes_that_share_no_disk(first, saved, flags, tmp_path, free_port, on_two_nodes):
    """Rank 1's node has a file; that of rank 0 has none, or one that is not to be used."""
    for node in "ab":
        (tmp_path / node).mkdir()
    shutil.copy(saved / "ck.pt", tmp_path / "b")
    if first == "older":
        launch(ROOT / DDP, *flags, "--epochs", 0, "--checkpoint", tmp_path / "a" / "ck.pt")
    elif first == "damaged":
        (tmp_path / "a" / "ck.pt").write_text(first)
    jobs = on_two_nodes(ROOT / DDP, *flags, "--epochs", 1, "--checkpoint", "ck.pt", how=static(free_port))
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].output()
    assert "nothing to train: 1 of 1 epochs are done" in jobs[0].output()
    if first == "damaged":
        assert "not a checkpoint, or a damaged one" in jobs[0].output()
        assert (tmp_path / "a" / "ck.pt.damaged").read_text() == first


def test_a_damaged_file_on_one_node_only(flags, tmp_path, free_port, on_two_nodes):
    for node in "ab":
        (tmp_path / node).mkdir()
    (tmp_path / "b" / "ck.pt").write_text("damaged")
    jobs = on_two_nodes(ROOT / DDP, *flags, "--checkpoint", "ck.pt", how=static(free_port))
    assert [job.wait() for job in jobs] == [1, 1]
    assert "error: --checkpoint" in jobs[0].output() and "  loss " not in jobs[0].output()
    assert (tmp_path / "b" / "ck.pt").read_text() == "damaged"


def test_a_kill_on_one_of_two_nodes(undisturbed, flags, tmp_path, free_port, on_two_nodes):
    how = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-conf=is_host={head}")
    how += ("--local-addr=127.0.0.1", "--max-restarts=1")
    command = (ROOT / DDP, *flags, *saving(tmp_path))
    jobs = on_two_nodes(*command, how=how, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    first, second = jobs
    first.wait_for(lambda: "epoch 1/2  step 7/" in first.output() + second.output())
    job, rank = next((job, rank) for job in jobs for rank in job.pids() if rank == 1)
    job.kill(rank)
    assert [job.wait() for job in jobs] == [0, 0], first.output() + second.output()
    assert "going on from" in first.output() + second.output()
    assert outcome(read_metrics(tmp_path / "m.jsonl")) == undisturbed(DDP, 2)
