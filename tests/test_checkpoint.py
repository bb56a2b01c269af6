"""Nothing is lost: whatever ends a run, and however often, it ends on the bits of the run that nobody disturbed."""

import contextlib
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    DDP,
    MANUAL,
    ROOT,
    SCRIPTS,
    SMALL_MODEL,
    Background,
    Ranks,
    fail,
    finish,
    outcome,
    torchrun,
    weights,
)
from small_model import run_script, with_small_model
from torch.utils.data import TensorDataset

import train_ddp

STOPPED = "stopped by a signal, saved to "


@pytest.fixture(scope="module")
def flags(small_mnist):
    """Two epochs, of 10 steps each at two processes."""
    return ("--data-dir", small_mnist, "--train-size", 320, "--batch-size", 16, "--epochs", 2, "--log-interval", 1)


@pytest.fixture
def saving(flags, tmp_path):
    return (*flags, "--checkpoint", tmp_path / "ck.pt", "--save-every", 4, "--metrics", tmp_path / "m.jsonl")


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    """The folder with the files of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(DDP, *flags, "--checkpoint", folder / "ck.pt", "--metrics", folder / "m.jsonl")
    return folder


def new_ranks(job, old=()):
    """Return the pids of a Background job's two ranks, by rank, once torchrun has started both anew."""

    def find():
        pids = {rank: pid for rank, pid in job.pids().items() if rank is not None}
        return pids if len(pids) == 2 and not {*pids.values()} & {*old} else None

    return job.wait_for(find)


def test_kills_in_a_step_and_in_a_start_under_torchrun(saving, undisturbed, tmp_path):
    """By the command of the README: rank 0 after some steps, and then rank 1 as it starts anew."""
    (command,) = re.findall("(?m)^TORCH_.* torchrun .*", (ROOT / "README.md").read_text())
    flags = shlex.join(map(str, (*saving, "--save-every", 1)))
    command = f"{command.replace(DDP, f'{SMALL_MODEL} {MANUAL}')} {flags}"
    rng = random.Random(4)
    with Background("bash", "-c", command, log=tmp_path / "log", PAUSE=0.2) as job:
        first = new_ranks(job)
        job.wait_for("(?s)  loss .*  loss ")  # so the first step may be saved
        time.sleep(rng.uniform(0, 1.5))
        os.kill(first[0], signal.SIGKILL)
        second = new_ranks(job, first.values())
        time.sleep(rng.uniform(0, 1.5))
        os.kill(second[1], signal.SIGKILL)
        assert job.wait() == 0 and "resumed from" in job.output()
    assert outcome(tmp_path / "m.jsonl") == outcome(undisturbed / "m.jsonl")


def killed_in_a_save(call, function, *arguments):
    """Run a function whose rank 0 is killed in its n-th torch.save(), when half of the file is written."""
    save, calls = torch.save, itertools.count(1)

    def save_half(state, file):
        save(state, file)
        if next(calls) == call:
            path = getattr(file, "name", file)
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half
    function(*arguments)


def renaming_what_is_on_the_disk(function, *arguments):
    """Run a function that may not give a file its name before that; the power may fail after it."""
    fsync, replace, on_disk = os.fsync, os.replace, set()

    def rename(source, target):
        assert os.stat(source).st_ino in on_disk
        replace(source, target)

    os.fsync = lambda file: on_disk.add(os.fstat(file).st_ino) or fsync(file)
    os.replace = rename
    function(*arguments)


def test_a_kill_while_rank_0_writes(saving, undisturbed, tmp_path):
    """The checkpoint is a link to another disk, and stays one."""
    (tmp_path / "ck.pt").symlink_to("disk/ck.pt")
    command = (renaming_what_is_on_the_disk, with_small_model, run_script, DDP, *saving)
    with Ranks(killed_in_a_save, 2, *command) as ranks:
        assert 0 not in ranks.wait() and (tmp_path / "disk" / "ck.pt.tmp").exists()
    assert re.search("resumed from .*  epoch 1  step 4\n", finish(MANUAL, *saving))
    assert (tmp_path / "ck.pt").is_symlink()
    assert outcome(tmp_path / "m.jsonl") == outcome(undisturbed / "m.jsonl")


def signalled_in(owner, name, call, number, *command):
    """Run a script whose rank 1 gets a signal in the n-th `call` of a method."""
    method, calls = getattr(owner, name), itertools.count(1)

    def signalled(self, *args, **kwargs):
        if next(calls) == call and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        return method(self, *args, **kwargs)

    setattr(owner, name, signalled)
    with_small_model(run_script, *command)


AT_THE_END_OF_AN_EPOCH = (torch.optim.AdamW, "step", 10, "epoch 1  step 10 ", "  epoch 1  step 10\n")
WHILE_EVALUATING = (torch.nn.Module, "eval", 1, "epoch 2  step 1 ", "  epoch 2  step 1\n")


@pytest.mark.parametrize(("owner", "name", "call", "last", "after"), [AT_THE_END_OF_AN_EPOCH, WHILE_EVALUATING])
def test_a_stop_between_epochs(owner, name, call, last, after, saving, undisturbed, tmp_path):
    output = finish(signalled_in, owner, name, call, signal.SIGUSR1, DDP, *saving)
    assert re.search(rf"{last}.*\n{STOPPED}", output)
    fewer = finish(DDP, *saving, "--epochs", 1)  # than it has done, or as many
    assert after in fewer and "  loss " not in fewer
    assert ("epoch 1  test_loss " in fewer) == (call == 10)
    metrics = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert all(entry.get("samples_per_second", 1) > 0 for entry in metrics)
    assert sum("loss" in entry for entry in metrics) == (10 if call == 10 else 11)
    assert weights(finish(DDP, *saving)) == outcome(undisturbed / "m.jsonl")[-1]["weights_sha256"]


def test_a_run_that_was_killed_in_its_last_test_or_has_ended_only_tests(saving, undisturbed):
    with Ranks(signalled_in, torch.nn.Module, "eval", 2, signal.SIGKILL, DDP, *saving) as ranks:
        assert ranks.wait() == [1, -signal.SIGKILL] and "epoch 2  step 10 " in ranks.output()
    test, sha256 = outcome(undisturbed / "m.jsonl")[-2:]
    for nproc in (2, 1, 3):  # of which the first one ends
        again = finish(MANUAL, *saving, nproc=nproc)
        assert f"epoch 2  test_loss {float(test['test_loss']):.4g}  " in again and "  loss " not in again
        assert weights(again) == sha256["weights_sha256"]


def test_an_ended_run_does_not_train_on_what_its_last_step_had_left_out(flags, tmp_path):
    flags = (*flags, "--train-size", 340, "--epochs", 1, "--checkpoint", tmp_path / "ck.pt")  # 320 are used by two
    ended, again = finish(DDP, *flags), finish(DDP, *flags, nproc=1)
    assert "steps_per_epoch 21\n" in again and "  epoch 1  step 21\n" in again and "  loss " not in again
    assert weights(again) == weights(ended)
    tested = finish(where_nobody_can_write, DDP, *flags, "--epochs", 0)
    assert weights(tested) == weights(ended) and "\ntest_loss " in tested


def where_nobody_can_write(*command):
    tempfile.TemporaryFile = None
    with_small_model(run_script, *command)


def as_a_worker():
    train_ddp.ignore_signals(0)
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)} == {signal.SIG_IGN}


def test_workers_ignore_what_tells_their_rank_to_save():
    finish(as_a_worker, nproc=1)


@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_that_are_not_finite_are_not_saved_after_a_step_nor_at_a_stop(script, flags, tmp_path):
    flags = (*flags, "--lr", 1e39, "--checkpoint", tmp_path / "ck.pt")
    stopped = (signalled_in, torch.optim.AdamW, "step", 1, signal.SIGUSR1, script, *flags)
    for command in ((script, *flags, "--save-every", 1), stopped):
        with Ranks(*command) as ranks:
            assert ranks.wait()[0] == 1
            assert "the weights are not finite, and were not saved: try a lower --lr" in ranks.output()
            assert STOPPED not in ranks.output() and not (tmp_path / "ck.pt").exists()


def test_a_single_weight_that_is_not_finite_is_not_saved(tmp_path):
    model = torch.nn.Linear(2, 1)
    model.weight.data[0, 1] = math.nan
    with pytest.raises(SystemExit, match="not finite"):
        train_ddp.save_checkpoint(SimpleNamespace(checkpoint=tmp_path / "ck.pt"), model, None, 0, 0)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])  # and SIGTERM in test_your_loop.py
def test_torchrun_is_ended_and_a_second_start_goes_on(how, saving, undisturbed, tmp_path):
    with Background(*torchrun(2), SMALL_MODEL, DDP, *saving, log=tmp_path / "log", PAUSE=0.2) as job:
        job.wait_for("epoch 1  step 7 ")
        if how == signal.SIGINT:  # to all, as `pkill` sends it: from torchrun, each rank gets it once more
            for pid in job.pids().values():
                os.kill(pid, how)
        else:
            job.process.send_signal(how)
        # 1 though all workers, to which it passes the signal on, return 0.
        assert job.wait() == (-9 if how == signal.SIGKILL else 1)
        finish(MANUAL, *saving)
        assert not job.pids()
        assert job.output().count(STOPPED) == (how != signal.SIGKILL)
        assert "epoch 2  step 10 " not in job.output()  # they did not end by having finished
    assert outcome(tmp_path / "m.jsonl") == outcome(undisturbed / "m.jsonl")


def test_a_signal_that_comes_until_a_process_has_ended(saving, tmp_path):
    """Of a fork, the end would be another one."""
    with Background(sys.executable, SMALL_MODEL, DDP, *saving, log=tmp_path / "log", PAUSE=0.2) as job:
        job.wait_for("epoch 1  step 7 ")
        while job.process.poll() is None:
            job.process.send_signal(signal.SIGUSR1)
        assert job.wait() == 0 and job.output().count(STOPPED) == 1


def test_ctrl_c_twice_and_signals_without_a_checkpoint(flags, saving):
    for number, others in ((signal.SIGINT, saving), (signal.SIGINT, flags), (signal.SIGUSR1, flags)):
        with Ranks(DDP, *others, "--epochs", 1000, "--batch-size", 300, nproc=1) as ranks:
            ranks.wait_for("step 1 ")
            with contextlib.suppress(ProcessLookupError, KeyError):  # until it has ended
                while True:
                    ranks.kill(0, number)
            assert ranks.wait() != [0] and STOPPED not in ranks.output()


def test_ctrl_c_after_another_signal_lets_it_save(saving):
    with Ranks(DDP, *saving, nproc=1, PAUSE=1) as ranks:
        ranks.wait_for("step 1 ")
        ranks.kill(0, signal.SIGTERM)
        time.sleep(0.1)  # of those that come at once, Python handles the one with the lower number first
        ranks.kill(0, signal.SIGINT)
        assert ranks.wait() == [0] and STOPPED in ranks.output()


def spied(folder, *command):
    """Run a script; note the indices of the images that this rank trains on, and its seeds."""
    getitem = TensorDataset.__getitem__

    def noted(self, indices):
        if len(self) == 320:
            rank = os.environ["RANK"]
            with (folder / f"rank{rank}").open("a") as file, (folder / f"seeds{rank}").open("a") as seeds:
                file.writelines(f"{index}\n" for index in indices)
                seeds.write(f"{torch.initial_seed()}\n")
        return getitem(self, indices)

    TensorDataset.__getitem__ = noted
    with_small_model(run_script, *command)


def test_each_rank_and_epoch_has_a_seed_of_its_own_in_every_run(flags, tmp_path):
    seeds = []
    for run, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(run)
        folder.mkdir()
        finish(spied, folder, DDP, *flags, "--seed", seed)
        seeds.append({(path.name, seed) for path in folder.glob("seeds*") for seed in path.read_text().split()})
    assert seeds[0] == seeds[1] and len(seeds[0]) == len({seed for _, seed in seeds[0]}) == 4
    assert not seeds[0] & seeds[2]


@pytest.mark.parametrize(
    ("number", "scripts", "after"),
    [(signal.SIGUSR1, SCRIPTS, 1), (signal.SIGTERM, SCRIPTS[::-1], 3), (signal.SIGUSR1, SCRIPTS[::-1], 2)],
)
def test_a_signal_to_one_rank_stops_both_and_the_twin_goes_on(number, scripts, after, flags, tmp_path):
    """Another number of processes uses no sample twice. The same one ends on the same weights."""
    flags = (*flags, "--seed", 5, "--epochs", 1, "--accum-steps", 2, "--batch-size")
    before, twin = ((spied, tmp_path, script, *flags) for script in scripts)
    path = tmp_path / "new" / "folder" / "ck.pt"  # which it makes
    with Ranks(*before, 8, "--checkpoint", path, PAUSE=0.05) as ranks:
        ranks.wait_for("step 2 ")
        ranks.kill(1, number)
        assert ranks.wait() == [0, 0]
        assert ranks.output().count(STOPPED) == 1
    used = torch.load(path)["position"][1]
    size = 16 if after == 2 else 20  # so that a number of saved steps is in other cases none of the twin's steps
    batch, steps = size * after, 320 // (size * after)
    done = -(-used // batch)
    assert done < steps, "not saved where it stopped"
    output = finish(*twin, size // 2, "--checkpoint", path, nproc=after)
    assert f" steps_per_epoch {steps}\n" in output and f"  epoch 1  step {done}\n" in output
    read = [int(line) for path in tmp_path.glob("rank*") for line in path.read_text().split()]
    order = torch.randperm(320, generator=torch.Generator().manual_seed(5)).tolist()  # torch's, of epoch 0
    assert sorted(read) == sorted(order[:used] + order[done * batch : steps * batch])
    seeds = {str(torch.Generator().manual_seed(hash((5, 0, step, 0))).initial_seed()) for step in (0, done)}
    assert {*(tmp_path / "seeds0").read_text().split()} == seeds  # what is resumed draws other numbers
    assert after != 2 or weights(output) == weights(finish(*twin, 8))


@pytest.mark.parametrize(
    ("size", "other", "line"),
    [
        (20_000, (), "ck.pt cannot be read: move it, or use another name"),
        (0, (), "ck.pt cannot be read: move it, or use another name"),
        ([1], (), "ck.pt cannot be read: move it, or use another name"),
        ({}, (), "ck.pt is of a run with None, not --dataset mnist"),
        (None, ("--seed", 1), "ck.pt is of a run with --dataset mnist --train-size 320 --seed 0, not --dataset mnist"),
        (None, ("--dataset", "synthetic"), "--seed 0, not --dataset synthetic --train-size 320 --seed 0: use another"),
    ],
)
def test_unfit_files_are_refused_and_stay(size, other, line, undisturbed, flags, tmp_path):
    path = tmp_path / "ck.pt"
    if isinstance(size, (list, dict)):
        torch.save(size, path)
    else:
        path.write_bytes((undisturbed / "ck.pt").read_bytes()[:size])
    content = path.read_bytes()
    assert line in fail(MANUAL, *flags, *other, "--checkpoint", path)
    assert path.read_bytes() == content


def test_another_format_is_refused(undisturbed, flags, tmp_path):
    state = torch.load(undisturbed / "ck.pt")
    torch.save({"model": state["model"], "optimizer": state["optimizer"], "place": (1, 0, 0.0)}, tmp_path / "ck.pt")
    assert "ck.pt is of a run with None, not --dataset mnist" in fail(DDP, *flags, "--checkpoint", tmp_path / "ck.pt")


def test_a_full_disk_ends_the_run_and_leaves_the_old_file_which_goes_on(undisturbed, flags, tmp_path):
    path = shutil.copy(undisturbed / "ck.pt", tmp_path)
    flags = (*flags, "--checkpoint", path)
    with Ranks(DDP, *flags, "--epochs", 3, "--save-every", 1) as ranks:
        resource.prlimit(ranks.pids()[0], resource.RLIMIT_FSIZE, (20_000, 20_000))  # in bytes
        assert 0 not in ranks.wait() and "File too large" in ranks.output()
    again = finish(MANUAL, *flags, nproc=1)
    assert "  epoch 2  step 20\nepoch 2  test_loss " in again and "  loss " not in again
    more = finish(DDP, *flags, "--epochs", 3, "--lr", 0.001, "--batch-size", 40, nproc=1)
    assert "steps_per_epoch 8\n" in more and "epoch 3  step 8 " in more and "epoch 2  step 8  lr " not in more
