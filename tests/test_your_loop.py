"""What the README says of loops of your own: its code, the rows of its table, and what happens without them."""

import random
import re
import signal
import sys
import textwrap
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import (
    MANUAL,
    ROOT,
    Background,
    Ranks,
    fail,
    finish,
    in_dir,
    run,
    run_script,
    torchrun,
    with_small_model,
    write_mnist,
)
from test_checkpoint import killed_in_a_save
from test_readme import LESSONS, MANY, OWN, README, lesson
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

RESUMING = re.sub(r"(?ms)^model = .*(?=^if rank == 0:)", lambda _: f"{lesson('checkpoint.pt')}\n", MANY)


def break_off(*target, nproc):
    """Run Ranks of which one must fail; return what they print."""
    with Ranks(*target, nproc=nproc) as ranks:
        assert any(ranks.wait())
        return ranks.output()


def test_what_most_loops_need_next(train_many, tmp_path):
    output, whole = train_many(RESUMING)
    assert float(re.findall(r"epoch 3: loss \S+, accuracy (\S+)%", output)[0]) > 50
    (tmp_path / "checkpoint.pt").unlink()
    train_many(RESUMING.replace("range(first_epoch, 3)", "range(first_epoch, 1)"))
    output, resumed = train_many(RESUMING)
    assert "epoch 1" not in output
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.fixture
def own_loop(tmp_path):
    """Return a function that makes a folder with own_loop.py, data, and no workers; it returns the command."""

    def own_loop(name, *changes):
        source, folder = OWN.replace("WORKERS = 32, 2", "WORKERS = 32, 0"), tmp_path / name
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        write_mnist(folder / "data", train_size=1024)
        (folder / "own.py").write_text(source)
        return in_dir, folder, run_script, folder / "own.py"

    return own_loop


def test_own_loop_is_killed_at_any_moment_and_ends_on_the_same_weights(own_loop, tmp_path):
    quiet, killed = (own_loop(name, ("SEED = 6, 2", "SEED = 6, 6")) for name in ("quiet", "killed"))
    lines = re.findall("epoch .*", finish(*quiet))
    assert [line[:9] for line in lines] == [f"epoch {epoch}: " for epoch in range(1, 7)]
    output = ""
    for call in (2, 4, 1, None):
        with Ranks(*((killed_in_a_save, call) if call else ()), *killed) as ranks:
            if call is None:
                ranks.wait_for("resumed from last.pt")  # so an epoch has begun, or will
                ranks.kill(1)
            assert 0 not in ranks.wait()
            output += ranks.output()
        last, best = tmp_path / "killed" / "last.pt", tmp_path / "killed" / "best.pt"
        assert not last.exists() or torch.load(last)["progress"][1] <= torch.load(best)["progress"][1]
    output += finish(*killed)
    assert sorted({*re.findall("epoch .*", output)}) == lines
    for name in ("best.pt", "last.pt"):
        ours, theirs = (torch.load(tmp_path / folder / name) for folder in ("killed", "quiet"))
        assert ours["progress"] == theirs["progress"]
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    assert "epoch " not in finish(*killed)  # it has ended


def test_own_loop_stops_early_and_stays_so(own_loop, tmp_path):
    early = own_loop("early", ("accuracy > best", "epoch < 2"))
    assert re.findall(r"epoch (\d): ", finish(*early)) == [*"1234"]
    assert [torch.load(tmp_path / "early" / name)["progress"][0] for name in ("best.pt", "last.pt")] == [2, 4]
    assert "epoch " not in finish(*early)


def test_own_loop_refuses_other_settings_and_a_loss_that_is_not_finite(own_loop, tmp_path):
    one_epoch = ("EPOCHS, PATIENCE, SEED = 6", "EPOCHS, PATIENCE, SEED = 1")
    finish(*own_loop("own", one_epoch))
    longer, diverged = own_loop("longer"), own_loop("diverged", ("0.01, 1.0", "1e30, 1.0"))
    (tmp_path / "longer" / "last.pt").symlink_to(tmp_path / "own" / "last.pt")
    assert "last.pt is of a run with [1, 0, 32, 2, 0.01, 2, 1024], not [6, 0, 32, " in fail(*longer, nproc=2)
    assert "epoch 1: the loss is not finite" in fail(*diverged, nproc=2) and not [*tmp_path.glob("diverged/*.pt")]


STOPS = MANY.replace("    if rank == 0:  # 7", f"{lesson('    if accuracy > best')}    if rank == 0:  # 7")


@pytest.mark.parametrize("source", [RESUMING, STOPS], ids=["resuming", "stopping"])
def test_stopping_early(source, train_many):
    """After the first epoch, as no accuracy is better than 2; and wrongly, on rank 0 alone."""
    source = source.replace("for epoch in", "best, patience = 2, 1\nfor epoch in").replace(
        "model.load_state_dict(torch", "#"
    )
    train_many(source)
    output, _ = train_many(source.replace("if patience <= 0:", "if rank == 0 >= patience:"), run=break_off)
    assert re.search("Timed out waiting|Connection (closed|reset) by peer", output)


def test_nobody_reads_before_rank_0_has_written(train_many):
    source = MANY.replace("    torch.save(", "    os.system('sleep 1')\n    torch.save(")
    reading = lesson("dist.barrier()\nmodel").replace("best.pt", "model.pt")
    source = source.replace("dist.destroy", f"{reading}dist.destroy")
    output, _ = train_many(source.replace("dist.barrier()\n", ""), run=break_off)  # there is no file yet
    assert "No such file or directory: 'model.pt'" in output
    train_many(source)


def test_a_collective_inside_an_if_meets_another(train_many):
    """The loss of rank 0 is added to what rank 1 sends next, its hits. (Sooner or later, sizes do not match.)"""
    inside = "    loss = loss.detach()\n    rank or print('loss', dist.all_reduce(loss), loss.item())\n"
    source = MANY.replace("    dist.all_reduce(correct)", f"{inside}    dist.all_reduce(correct)")
    output, _ = train_many(source, run=break_off)
    assert float(re.findall(r"loss None (\S+)", output)[0]) > 9  # that of a model that knows nothing is 2.3


@pytest.mark.parametrize("passes", ["ddp(", "model("])
def test_are_the_weights_equal(passes, train_many):
    source = MANY.replace("ddp(images", f"{passes}images").replace("dist.destroy", f"{lesson('theirs')}dist.destroy")
    if passes == "ddp(":
        train_many(source)
    else:
        assert "AssertionError: rank 1: 0.weight is not what rank 0 has" in train_many(source, run=break_off)[0]


def with_debug_level(level, *command):
    """Run a script as with TORCH_DISTRIBUTED_DEBUG, which torch has read already."""
    dist.set_debug_level(level)
    with_small_model(run_script, *command)


LEVELS = [(dist.DebugLevel.OFF, "Timed out waiting"), (dist.DebugLevel.DETAIL, "Detected mismatch between")]


@pytest.mark.parametrize(("level", "words"), LEVELS)
def test_a_collective_behind_an_if(level, words, small_mnist, tmp_path):
    source, line, script = (ROOT / MANUAL).read_text(), "        log(args, epoch=epoch + 1, **eval", tmp_path / MANUAL
    assert line in source
    script.write_text(source.replace(line, f"        if rank == 0: dist.all_reduce(torch.ones(1))\n{line}"))
    flags = ("--data-dir", small_mnist, "--batch-size", 150, "--epochs", 1, "--timeout", 5)
    assert words in break_off(with_debug_level, level, script, *flags, nproc=2) and words in README


def test_abort_shows_where_a_process_is(tmp_path):
    (tmp_path / "waits.py").write_text("import time\nprint('begun'), time.sleep(999)\n")
    with Background(*torchrun(2), tmp_path / "waits.py", log=tmp_path / "log", PYTHONFAULTHANDLER=1) as job:
        job.wait_for("(?s)begun.*begun")
        job.kill(1, signal.SIGABRT)
        job.wait()
        assert f'File "{tmp_path}/waits.py", line 2' in job.output() and "PYTHONFAULTHANDLER=1" in README


def test_gloo_ends_with_its_process_group(tmp_path):
    """Otherwise one of its threads may abort the interpreter, which ends before it."""
    early, late = re.search(r"terminate called.*\| `(.+?)` before .*, `(.+?)` before", README).groups()
    (tmp_path / "threads.py").write_text(f"""
import os, torch, torch.distributed as dist
{early}
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
{late}
dist.destroy_process_group()
print({{open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")}})
""")
    env = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    threads = run([sys.executable, tmp_path / "threads.py"], **env).stdout
    assert "python" in threads and "gloo" not in threads


@pytest.mark.parametrize(
    ("word", "instead"),
    [("mask", r" {8}loss = .*\n"), ("no_sync", r"(?s) {4}for images, labels in train_loader.*?zero_grad\(\)\n")],
)
def test_masks_and_accumulation_are_the_same_in_one_process(word, instead, train_many):
    (block,) = (textwrap.indent(lesson, (8 if word == "mask" else 0) * " ") for lesson in LESSONS if word in lesson)
    many = MANY.replace("Adam(", "SGD(").replace("0.003", "0.1")  # as Adam hides a wrong factor
    source = "import contextlib\n" + re.sub(instead, lambda _: block, many)
    _, two = train_many(source)
    _, one = train_many(source.replace("batch_size=64, sampler=sampler", "batch_size=128, sampler=sampler"), nproc=1)
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def make(*layers, lr=0.1):
    """Return a model, which differs by rank, its wrapper, which makes it equal, and its optimizer."""
    model = nn.Sequential(*(layers or (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))))
    return model, DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr)


def train(ddp, optimizer, steps=3):
    """Take steps with samples of this rank; yield its losses."""
    for _ in range(steps):
        loss = F.mse_loss(ddp(torch.randn(8, 4)), torch.randn(8, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def gather(thing):
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def equal(tensors):
    first, *others = gather([tensor.tolist() for tensor in tensors])
    return all(other == first for other in others)


def plateau():
    for reduce in (False, True):
        model, ddp, optimizer = make()
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for loss in train(ddp, optimizer, 9):
            if reduce:
                dist.all_reduce(loss)
            scheduler.step(loss.item())
        assert equal(model.parameters()) == reduce


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([torch.rand(1).item(), random.random(), np.random.rand()])


def noise():
    for workers, equal in ((2, [False, False, False]), (0, [False, True, True])):
        random.seed(0)
        np.random.seed(0)
        loader = DataLoader(Noise(), num_workers=workers, multiprocessing_context="fork" if workers else None)
        first, second = gather(torch.cat([*loader]))
        assert (first == second).all(dim=0).tolist() == equal and len({*first.flatten().tolist()}) == 12


def test_persistent_workers_are_seeded_once():
    for persistent in (True, False):
        loader = DataLoader(Noise(), num_workers=1, persistent_workers=persistent)
        epochs = []
        for _ in range(2):
            torch.manual_seed(0)
            epochs.append(torch.cat([*loader]))
        assert torch.equal(*epochs) != persistent


def frozen_and_unfrozen():
    for frozen in (True, False):
        for wrap_again in (True, False):
            model, ddp, optimizer = make()
            model[0].requires_grad_(not frozen)
            ddp = DistributedDataParallel(model)
            [*train(ddp, optimizer)]
            model[0].requires_grad_(frozen)
            ddp = DistributedDataParallel(model) if wrap_again else ddp
            if frozen or wrap_again:
                [*train(ddp, optimizer)]
                assert equal(model.parameters()) == wrap_again
            else:
                with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
                    [*train(ddp, optimizer)]


def two_models():
    """The generator of a GAN learns through its wrapper, or (wrongly) around it."""
    for through in (True, False):
        fake, fake_ddp, fake_optimizer = make(nn.Linear(4, 4))
        real, real_ddp, real_optimizer = make(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        for _ in range(3):
            for samples, sign in ((torch.randn(8, 4), 1), (fake(torch.randn(8, 4)).detach(), -1)):
                (sign * real_ddp(samples).tanh().mean()).backward()
            real_optimizer.step()
            real.requires_grad_(False)
            real((fake_ddp if through else fake)(torch.randn(8, 4))).mean().backward()
            fake_optimizer.step()
            real.requires_grad_(True)
            fake_optimizer.zero_grad()
            real_optimizer.zero_grad()
        assert equal(real.parameters()) and equal(fake.parameters()) == through


class Numbers(IterableDataset):
    exec(textwrap.dedent(lesson("def __iter__")), {"islice": islice, "get_worker_info": get_worker_info}, locals())

    def __init__(self):
        self.rank, self.world_size, self.samples = dist.get_rank(), dist.get_world_size(), range(10)


def iterable():
    loader = DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    first, second = gather([*loader])
    assert sorted(first + second) == [*range(8)] and len(first) == len(second)


def averaged():
    model = nn.Linear(4, 1)
    before, _ = AveragedModel(model), DistributedDataParallel(model)
    after = AveragedModel(model)
    assert equal(after.parameters()) and not equal(before.parameters())


ROWS = {
    "`ReduceLROnPlateau`": plateau,
    "augmentation, noise, dropout": noise,
    "layers that are frozen or unfrozen": frozen_and_unfrozen,
    "two models, such as a GAN": two_models,
    "an `IterableDataset`": iterable,
    "an average of the weights (EMA)": averaged,
}


def check(row):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    row()
    dist.barrier()  # rank 0 has the store of addresses, so it must not end before rank 1 has joined
    dist.destroy_process_group()


@pytest.mark.parametrize("row", ROWS)
def test_row(row):
    assert f"\n| {row} | " in README
    finish(check, ROWS[row])
