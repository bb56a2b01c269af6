"""What the README says of loops of your own: its code, its questions, and what happens without them."""

import contextlib
import functools
import math
import random
import re
import signal
import sys
import textwrap
import time
from datetime import timedelta
from itertools import islice
from unittest import mock

import doctor
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    in_dir,
    run,
    torchrun,
    weights,
    write_mnist,
)
from small_model import run_script, with_small_model
from test_checkpoint import killed_in_a_save
from test_readme import COMPARED, MANY, METRIC, ONE, OWN, README, lesson
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, get_worker_info
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

FORK = "fork" if sys.version_info >= (3, 11, 10) else "spawn"  # see "Is it a loader's worker?" in the README


def break_off(*target, nproc):
    """Run Ranks of which one must fail; return what they print."""
    with Ranks(*target, nproc=nproc) as ranks:
        assert any(ranks.wait())
        return ranks.output()


@pytest.fixture
def own_loop(tmp_path):
    """Return a function that makes a folder with own_loop.py, data, and no workers; it returns the command."""

    def own_loop(name, *changes):
        source, folder = OWN.replace("WORKERS = 32, 2", "WORKERS = 32, 0"), tmp_path / name
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        write_mnist(folder / "data", train_size=1100)  # an epoch has 17 batches, of which one is left over, and a bit
        (folder / "own.py").write_text(source)
        return in_dir, folder, run_script, folder / "own.py"

    return own_loop


def test_own_loop_with_workers(own_loop):
    """Where "fork" may hang, with "spawn", as the README says."""
    changes = ("WORKERS = 32, 0", "WORKERS = 32, 1"), ("SEED = 6, 2", "SEED = 1, 2"), ('"fork" if', f'"{FORK}" if')
    *command, script = own_loop("workers", *changes)
    script.write_text('if __name__ == "__main__":\n' + textwrap.indent(script.read_text(), "    "))
    assert "epoch 1: loss " in finish(*command, script, nproc=1)


def test_own_loop_is_killed_at_any_moment_and_ends_on_the_same_weights(own_loop, tmp_path):
    quiet, killed = (own_loop(name, ("SEED = 6, 2", "SEED = 6, 6")) for name in ("quiet", "killed"))
    lines = re.findall("epoch .*%", finish(*quiet))
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
    assert sorted({*re.findall("epoch .*%", output)}) == lines
    for name in ("best.pt", "last.pt"):
        ours, theirs = (torch.load(tmp_path / folder / name) for folder in ("killed", "quiet"))
        assert ours["progress"] == theirs["progress"]
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    assert theirs["optimizer"]["param_groups"][0]["lr"] < 5e-5  # the schedule, too, is at its end
    assert "epoch " not in finish(*killed)  # it has ended


def test_own_loop_stops_early_and_stays_so(own_loop, tmp_path):
    metric = ("hits.item() / len(val_set)", "hits.numpy().mean()")  # a number of NumPy
    early = own_loop("early", ("accuracy > best", "epoch in (0, 2)"), metric)
    assert re.findall(r"epoch (\d): ", finish(*early)) == [*"12345"]
    states = [torch.load(tmp_path / "early" / name, weights_only=False) for name in ("best.pt", "last.pt")]
    assert [state["progress"][0] for state in states] == [3, 5]
    assert "epoch " not in finish(*early)


def test_own_loop_refuses_other_settings_and_a_loss_that_is_not_finite(own_loop, tmp_path):
    one_epoch = ("EPOCHS, PATIENCE, SEED = 6", "EPOCHS, PATIENCE, SEED = 1")
    finish(*own_loop("own", one_epoch))
    longer, diverged = own_loop("longer"), own_loop("diverged", ("0.01, 1.0", "1e30, 1.0"))
    (tmp_path / "longer" / "last.pt").symlink_to(tmp_path / "own" / "last.pt")
    assert "last.pt is of a run with [1, 0, 32, 2, 0.01, 2, 1100], not [6, 0, 32, " in fail(*longer, nproc=2)
    after = own_loop("after", ("model.eval()\n", "model.eval()\n    model[1].running_mean.fill_(math.nan)\n"))
    for name, loop in {"diverged": diverged, "after": after}.items():
        assert "epoch 1: the weights are not finite, and not saved" in fail(*loop, nproc=2) and not [
            *tmp_path.glob(f"{name}/*.pt")
        ]


def model_of_own_loop():
    values = {"nn": nn, "device": "cpu"}
    exec(re.search(r"(?s)\nlayers = .*?\.to\(device\)\n", OWN)[0], values)
    return values["model"]


def test_own_loop_clips_before_each_step_and_averages_the_losses_of_all(own_loop, tmp_path):
    """If gradients are clipped to nothing, weights stay, and the loss is that of a model that knows nothing."""
    changes = (("SEED = 6, 2, 0", "SEED = 1, 2, 5"), ("0.01, 1.0", "0.01, 0.0"), ("optim.AdamW", "optim.SGD"))
    told = ("        if complete:\n", "        print(f'batch {loss.item()}\\n', end='')\n        if complete:\n")
    output = finish(*own_loop("clipped", *changes, told))
    losses = [float(loss) for loss in re.findall("batch (.*)", output)]
    assert len(losses) == 2 * 17 and sum(losses) / 34 == pytest.approx(2.3, abs=1)
    assert float(re.search(": loss (.*?),", output)[1]) == pytest.approx(sum(losses) / 34, abs=1e-4)
    torch.manual_seed(5)
    weights = torch.load(tmp_path / "clipped" / "last.pt")["model"]
    assert all(torch.equal(p, weights[name]) for name, p in model_of_own_loop().named_parameters())


def test_own_loop_tests_together_and_does_not_train_on_what_is_left_over(own_loop, tmp_path):
    """One process has the accuracy of two, whose statistics differ much; what is left over moves no weight."""
    changes = ("SEED = 6, 2, 0", "SEED = 2, 2, 3"), ("ddp(images)", "ddp(images * (1 + 99 * rank))")
    lines = "f'seed {torch.initial_seed()}\\norder {[*sampler][:9]}\\n'"  # in one write, or those of ranks mix
    told = ("    bar = ", f"    print({lines}, end='')\n    bar = ")
    begins = "        assert complete or all(p.grad is None for p in model.parameters())\n"  # each step, anew
    begins = ("        with contextlib", f"{begins}        with contextlib")
    output = finish(*own_loop("whole", *changes, told, begins))
    for word in ("seed", "order"):
        assert len({*re.findall(f"{word} .*", output)}) == 4  # of two ranks, in two epochs
    order = [*DistributedSampler(range(1100), 2, 0, seed=3, drop_last=True)][:9]
    assert f"order {order}\n" in output
    finish(*own_loop("cut", *changes, ("enumerate(bar, start=1)", "zip(range(1, 17), bar)")))
    whole, cut = (torch.load(tmp_path / name / "last.pt")["model"] for name in ("whole", "cut"))
    model = model_of_own_loop().eval()
    for name, _ in model.named_parameters():
        torch.testing.assert_close(whole[name], cut[name], rtol=0, atol=0)
    model.load_state_dict(whole)
    images, labels = zip(*MNIST(tmp_path / "whole" / "data", train=False, transform=ToTensor()), strict=True)
    hits = (model(torch.stack(images)).argmax(dim=1) == torch.tensor(labels)).sum().item()
    assert re.search(rf"(?m)^epoch 2: .* accuracy {hits / 101:.2%}, 2 ranks on", output)


def test_own_loop_stops_on_one_rank_alone(own_loop):
    """In the last two epochs, rank 1 waits for rank 0, which has left the loop, until that ends."""
    here = own_loop("here", ("if patience == 0:", "if rank == 0 and epoch == 1:"))
    assert re.search("Connection (closed|reset) by peer", break_off(*here, nproc=2))


def test_nobody_reads_before_rank_0_has_written(train_many):
    source = MANY.replace("    torch.save(", "    os.system('sleep 1')\n    torch.save(")
    source = source.replace("dist.destroy", "dist.barrier()\ntorch.load('model.pt')\ndist.destroy")
    output, _ = train_many(source.replace("dist.barrier()\n", ""), run=break_off)  # there is no file yet
    assert "No such file or directory: 'model.pt'" in output
    train_many(source)


def test_a_collective_inside_an_if_meets_another(train_many):
    """The loss of rank 0 is added to what rank 1 sends next, its hits. (Sooner or later, sizes do not match.)"""
    inside = "    loss = loss.detach()\n    rank or print('loss', dist.all_reduce(loss), loss.item())\n"
    source = MANY.replace("    dist.all_reduce(correct)", f"{inside}    dist.all_reduce(correct)")
    output, _ = train_many(source, run=break_off)
    assert float(re.findall(r"loss None (\S+)", output)[0]) > 9  # that of a model that knows nothing is 2.3


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
    late, early = re.search(r"terminate called.*? `(.+?)` before .* `(.+?)` before", README).groups()
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


def test_the_example_of_data_and_a_model_of_your_own(tmp_path):
    """The launcher starts it. Workers outlive its SIGTERM until their rank has saved, but not a rank that fails."""
    for script in SCRIPTS:
        source = (ROOT / script).read_text()  # of two definitions, the later one counts
        source = source.replace("\nif __name__ ==", f"\n{lesson('def load_data')}\nif __name__ ==")
        call = re.search(r"(?m)^    # return DataLoader\(.*\n    # .*\n", source)[0]
        workers = call.replace("    # ", "    ").replace("num_workers=4", "num_workers=1").replace("fork", FORK)
        (tmp_path / f"workers_{script}").write_text(source.replace(call, workers))
        alone = "    return DataLoader(dataset, args.batch_size, sampler=indices)\n"
        (tmp_path / script).write_text(source.replace(call, alone))
    flags = ("--epochs", 1, "--batch-size", 16, "--log-interval", 1)
    quiet = finish(tmp_path / DDP, *flags)
    assert "  test_samples 101\n" in quiet
    flags += ("--checkpoint", tmp_path / "ck.pt")
    launcher = (ROOT / "launch_multinode_ddp.sh", "--nproc-per-node=2", "--script", SMALL_MODEL, "--")
    command = (*launcher, tmp_path / f"workers_{DDP}", *flags)
    with Background(*command, log=tmp_path / "log", PAUSE=0.5, OMP_NUM_THREADS=1) as job:
        job.wait_for("step 2 ")
        job.process.terminate()
        assert job.wait() == 1 and not job.pids()
        assert job.output().count("stopped by a signal") == 1 and "step 20 " not in job.output()
    assert weights(finish(tmp_path / MANUAL, *flags)) == weights(quiet)
    source = (tmp_path / f"workers_{DDP}").read_text().replace("losses.append(loss)", "raise OSError(step)")
    (tmp_path / "fails.py").write_text(source)
    failed = run([sys.executable, SMALL_MODEL, tmp_path / "fails.py", *flags, "--epochs", 2])  # a fork ends otherwise
    assert failed.stderr.endswith("OSError: 1\n"), failed.stderr


def compared(source, nproc, folder):
    """Return losses and norms of the first steps, as the doctor prints them."""
    write_mnist(folder / "data", train_size=1024)
    (folder / "loop.py").write_text(re.sub(r"(WORKERS = \d+), 2", r"\1, 0", source))
    output = finish(in_dir, folder, doctor.main, ["--losses", "8", "loop.py"], nproc=nproc)
    assert "epoch 1" not in output  # it has been stopped
    return steps_in(output)


def steps_in(output):
    return [tuple(map(float, step)) for step in re.findall(r"step \d+: loss (.*), norm of the gradient (.*)", output)]


def test_the_commands_that_compare_losses(tmp_path):
    write_mnist(tmp_path / "data", train_size=4096)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    result = run(["bash", "-c", "\n".join(COMPARED).replace("/tmp/", "")], cwd=tmp_path, OMP_NUM_THREADS=1)
    steps = steps_in(result.stdout)
    assert len(steps) == 40 and sum(steps[:20], ()) == pytest.approx(sum(steps[20:], ()), rel=1e-4), result.stderr


def test_the_loop_for_one_gpu_has_the_same_losses(tmp_path):
    (sampler,) = re.findall(r"`(sampler=DistributedSampler\(.*?\))`", README)
    source = ONE.replace("import DataLoader", "import DataLoader, DistributedSampler").replace("shuffle=True", sampler)
    one, two = compared(source.replace("64, s", "128, s"), 1, tmp_path / "one"), compared(MANY, 2, tmp_path / "two")
    assert len(one) == 8 and sum(one, ()) == pytest.approx(sum(two, ()), rel=1e-4)


# All kinds of noise, and a loss that is computed within the step.
NOISY = """
import random, numpy, torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Noisy(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, i):
        return torch.arange(32.0).view(4, 8) / (i + 1) + torch.rand(1) + random.random() + float(numpy.random.rand())

class DropPath(nn.Module):
    def forward(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1, 1), 0.5)) if self.training else x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(4), DropPath()

    def forward(self, x):
        x = self.attention(self.recurrent(x)[0])
        x = checkpoint(torch.tanh, x, use_reentrant=True)  # calls backward() for a part of the graph
        x = nn.functional.batch_norm(x, running_mean=None, running_var=None, training=True)
        x = nn.functional.scaled_dot_product_attention(x, x, x, None, 0.5)
        x = nn.functional.alpha_dropout(nn.functional.dropout(x), training=True)
        return nn.functional.dropout1d(self.drop(self.norm(x)))

def closure():
    loss = synced(ddp(inputs / size)).pow(4).mean()  # that of squares would be 1
    loss.backward()
    nn.utils.clip_grad_norm_(model.norm.parameters(), 1e-6)  # a part, and the whole by value
    nn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=1e-6)
    return loss

dist.init_process_group("gloo")
for seed in (torch.manual_seed, random.seed, numpy.random.seed):
    seed(dist.get_rank())
loader = DataLoader(Noisy(), 16, sampler=DistributedSampler(Noisy()), num_workers=1, multiprocessing_context="spawn")
[*loader]  # what the data set draws changes nothing that is drawn later
size = torch.tensor(1 + random.random() + numpy.random.rand())
model, synced = Model(), nn.SyncBatchNorm(4, affine=False)  # which is no part of it, as DDP refuses it on CPUs
ddp = nn.parallel.DistributedDataParallel(model)
dist.broadcast(size, src=0)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
for inputs in loader:
    optimizer.zero_grad()
    optimizer.step(closure)
"""
OWN_CLIPPED = OWN.replace("0.01, 1.0", "0.01, 0.1")
BATCHES = [(OWN_CLIPPED, "WORKERS = 32", "WORKERS = 64"), (NOISY, "16, sampler", "32, sampler")]


@pytest.mark.parametrize(("source", "batch", "double"), BATCHES, ids=["own_loop", "noisy"])
def test_the_same_losses(source, batch, double, tmp_path):
    two, one = compared(source, 2, tmp_path / "two"), compared(source.replace(batch, double), 1, tmp_path / "one")
    assert len(two) == 8 and sum(two, ()) == pytest.approx(sum(one, ()), rel=1e-4)
    assert all(norm > 0.1 for _, norm in one)  # before clipping
    if source == OWN_CLIPPED:  # the norms are those before clipping; a step adds up its own passes, and no others
        assert all(2 < loss < 3 and 2 < norm < 7 for loss, norm in one)
        whole = source.replace(batch, "WORKERS = 128").replace("STEPS, LR, CLIP_NORM = 2", "STEPS, LR, CLIP_NORM = 1")
        assert sum(compared(whole, 1, tmp_path / "whole"), ()) == pytest.approx(sum(one, ()), rel=1e-4)
        clip = "nn.utils.clip_grad_norm_("
        twice = (clip, f"[p.grad.mul_(2) for p in model.parameters()], {clip}")
        for line, instead in (("ddp(images", "model(images"), twice):
            (loss, norm), *_ = compared(source.replace(line, instead), 2, tmp_path / line)
            assert loss == pytest.approx(one[0][0], rel=1e-4) and norm != pytest.approx(one[0][1], rel=1e-2)


TURNS = """
import torch
models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
for step in (1, 2, 3, 4):
    for model in models:
        loss = (100 * step * model(torch.ones(1, 1))).sum()
        if step < 3:
            model.zero_grad()
            loss.backward()
        else:
            (model.weight.grad,) = torch.autograd.grad(loss, model.weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for optimizer in optimizers:
        optimizer.step()
models[0].zero_grad()
for factor in (100, 100, float("inf"), 50, 20, float("inf"), 7):
    if factor not in (100, 20):  # the passes before are of one step
        models[0].zero_grad(set_to_none=factor == 7)
    (factor * models[0](torch.ones(1, 1))).sum().backward()
    if factor not in (20, 7):
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1e6)
    if factor != float("inf"):  # as a GradScaler skips a step
        optimizers[0].step()
"""


def test_norms_before_clipping(tmp_path):
    """Of two models that take turns; without backward(); where gradients add up; after a skipped step; not clipped."""
    (tmp_path / "turns.py").write_text(TURNS)
    output = finish(doctor.main, ["--losses", "13", str(tmp_path / "turns.py")], nproc=1)
    assert [norm for _, norm in steps_in(output)] == [100, 100, 200, 200, 300, 300, 400, 400, 100, 200, 50, 70, 7]


def test_a_count_over_all_ranks(train_many):
    """With SGD, as Adam hides a wrong factor, and with labels ignored so that the ranks have very different counts."""
    many = MANY.replace("Adam(", "SGD(").replace("0.003", "0.1")
    ignoring = "IGNORE = -100\nlabels[labels > 1] = IGNORE\n" + lesson("avoids 0 / 0").replace("inputs", "images")
    source = re.sub(r" {8}loss = .*\n", textwrap.indent(ignoring, 8 * " "), many)
    _, two = train_many(source)
    _, one = train_many(source.replace("=64, sampler=s", "=128, sampler=s"), nproc=1)
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)
    _, wrong = train_many(source.replace("dist.all_reduce(count)", "").replace(" * world_size", ""))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, one, rtol=1e-3, atol=1e-3)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, samples):
        return self.encoder(samples), self.temperature * 1


def gather_with_gradient():
    """Also for what is used after the gather, such as a temperature, and for two forward passes."""
    samples, model = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), Pairs()
    ddp = DistributedDataParallel(model)

    def all_pairs(first, second, temperature):
        return F.cross_entropy(first @ second.T * temperature, torch.arange(len(first)))

    (first, temperature), (second, _) = model(samples), model(samples.square())
    all_pairs(first, second, temperature).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    right = lesson("dist.all_gather(")
    wrong = right.replace("world_size * (z -", "(z -")  # for all but the temperature, which is the first
    pairs = right.replace("gather(first), gather(second)", "*gather(z).chunk(2)")
    for source, equal in {right: [True] * 3, wrong: [True, False, False], pairs: [False] * 3}.items():
        model.zero_grad()
        mine = samples[dist.get_rank() * 4 :][:4]
        (first, temperature), (second, _) = ddp(mine), ddp(mine.square())
        values = {"torch": torch, "dist": dist, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        values |= {"z": torch.cat([first, second]), "first": first, "second": second}
        values["all_pairs"] = functools.partial(all_pairs, temperature=temperature)
        exec(source, values)
        values["loss"].backward()
        found = zip(model.parameters(), expected, strict=True)
        assert [torch.allclose(p.grad, gradient, rtol=1e-4) for p, gradient in found] == equal
    with torch.no_grad():  # as in an evaluation
        exec(right, values)
    for labels in (torch.tensor([dist.get_rank()] * 2), torch.tensor([dist.get_rank() == 1] * 2)):
        assert values["gather"](labels).tolist() == [0, 0, 1, 1]
    for shape in (), (3,):
        overlap, area = (torch.full(shape, x, requires_grad=True) for x in (1.0 + dist.get_rank(), 4.0))
        values |= {"overlap": overlap, "area": area}
        exec(lesson("gather(dice)"), values)
        values["dice_loss"].backward()
        assert values["dice_loss"] == 1 - 2 * (1 + 2) / (4 + 4)
        assert overlap.grad.sum().isclose(torch.tensor(2 * -2 / (4 + 4)))  # which DDP divides by world_size
    losses = (torch.arange(4.0) + 2 * dist.get_rank()).requires_grad_()
    values["gather"](losses).topk(2).values.mean().backward()  # the hardest, which are both of rank 1
    assert losses.grad.tolist() == ([0, 0, 1, 1] if dist.get_rank() else [0] * 4)


def accumulated():
    """A mean over tokens in one pass, by a mask, and in three; a log as own_loop.py has it, of three as a sum."""
    draw = torch.Generator().manual_seed(0)
    samples, labels = torch.randn(24, 4, generator=draw), torch.randint(3, (24,), generator=draw)
    model, ddp, _ = make(nn.Linear(4, 3))
    expected = F.cross_entropy(model(samples), labels, reduction="none")[labels != 0].mean()
    (gradient,) = torch.autograd.grad(expected, model[0].weight)
    mine = slice(dist.get_rank(), None, 2)
    values = {"dist": dist, "nn": nn, "ddp": ddp, "world_size": 2}
    values |= {"IGNORE": 0, "contextlib": contextlib, "ACCUM_STEPS": 3, "device": "cpu", "optimizer": mock.Mock()}
    values["train_loader"] = [*zip(samples[mine].split(4), labels[mine].split(4), strict=True)]
    log = re.search(r"loss_sum \+= .*", OWN)[0]
    values |= {"inputs": samples[mine], "labels": labels[mine], "loss_sum": torch.zeros(())}
    exec(f"{lesson('avoids 0 / 0')}{log}", values)
    values |= {"losses": F.cross_entropy(ddp(samples[mine]), labels[mine], reduction="none"), "w": labels[mine] != 0}
    of_a_mask = re.search(r"`(total = \(losses.*?)` and `(count = w\..*?)`", README).groups()
    exec("\n".join([*of_a_mask, *lesson("avoids 0 / 0").splitlines()[-2:]]), values)
    values["loss"].backward()
    torch.testing.assert_close(model[0].weight.grad, gradient)
    model.zero_grad()
    accumulate = lesson("ACCUM_STEPS):").replace("loss.backward()", f"loss.backward()\n            {log} * ACCUM_STEPS")
    exec(accumulate, values)
    torch.testing.assert_close(model[0].weight.grad, gradient)
    dist.all_reduce(values["loss_sum"])
    torch.testing.assert_close(values["loss_sum"] / len(samples), 2 * expected.detach())


def mean_iou():
    """With pixels to ignore, and with a class that neither occurs nor is predicted."""
    draw, rank = torch.Generator().manual_seed(0), dist.get_rank()
    images, labels = torch.randn(5, 4, 8, 8, generator=draw), torch.randint(3, (5, 8, 8), generator=draw)
    images[:, 3], labels[:, :2] = -99, 255
    labels = labels.byte()  # as masks in files are
    values = {"torch": torch, "dist": dist, "device": "cpu", "model": nn.Identity(), "C": 200, "IGNORE": 255}
    values["val_loader"] = DataLoader(TensorDataset(images, labels), 2, sampler=range(rank, 5, 2))
    exec(lesson("bincount("), values)
    guessed, true = (x[labels != 255] for x in (images.argmax(dim=1), labels))
    both = [((guessed == c) & (true == c)).sum() / ((guessed == c) | (true == c)).sum() for c in range(3)]
    torch.testing.assert_close(values["mean_iou"], sum(both) / 3)


def class_weights():
    """Also with smoothed labels, of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    samples, labels = torch.randn(24, 4, generator=draw), torch.randint(3, (24,), generator=draw)
    labels[3:8] = -100
    model, ddp, _ = make(nn.Linear(4, 3))
    weighted = functools.partial(F.cross_entropy, weight=torch.tensor([0.1, 0.2, 0.4]), label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(weighted(model(samples), labels), model[0].weight)
    mine = slice(dist.get_rank(), None, 2)
    values = {"dist": dist, "nn": nn, "ddp": ddp, "world_size": 2, "inputs": samples[mine], "labels": labels[mine]}
    values |= {"IGNORE": -100, "class_weights": weighted.keywords["weight"]}
    (passed,), (count,) = (re.findall(f"`({what})`", README) for what in ("weight=class_weights", "count = class_w.*?"))
    source = lesson("avoids 0 / 0").replace("labels, ", f"labels, label_smoothing=0.1, {passed}, ")
    exec(source.replace("count = (labels != IGNORE).sum()", count), values)
    values["loss"].backward()
    torch.testing.assert_close(model[0].weight.grad, gradient)


def rank_0_is_busy(words):
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    group = eval(re.search(r"`group = (dist.new_group\(.*?\))`", README)[1]) if words == "dist.barrier(group)" else None
    if dist.get_rank() == 0:
        time.sleep(4)
    dist.barrier(group)


def test_a_rank_that_needs_an_hour():
    finish(rank_0_is_busy, "dist.barrier(group)")
    assert "Timed out waiting" in break_off(rank_0_is_busy, "dist.barrier()", nproc=2)


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


def test_the_same_metric(train_many, tmp_path):
    trained, _ = train_many(MANY)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    result = run(["bash", "-c", *METRIC], cwd=tmp_path)
    assert re.findall(r"accuracy (\S+%)", result.stdout) == re.findall(r"accuracy (\S+%)", trained)[-1:]


class Noise(Dataset):
    def __init__(self):
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([torch.rand(1).item(), random.random(), np.random.rand(), self.own.random()])


def seed_own(worker):
    info = get_worker_info()
    info.dataset.own = np.random.default_rng(info.seed)


def shared():
    torch.manual_seed(hash((5, 0, dist.get_rank())))
    (draw,) = re.findall(r"`(torch\.Generator\(\)\.manual_seed\(.*)`", README)
    draw = eval(draw, {"torch": torch, "SEED": 5, "epoch": 0})
    for generator, alike in ((draw, True), (None, False)):
        first, second = gather(torch.randint(10**9, (8,), generator=generator))
        assert torch.equal(first, second) == alike


def noise():
    same = torch.Generator().manual_seed(0)
    for workers, generator, seed, alike, drawn in (
        (2, None, seed_own, [False, False, False, False], 16),
        (2, None, None, [False, False, False, True], 14),  # and its two workers draw the same
        (2, same, seed_own, [True, True, True, True], 16),
        (0, None, None, [False, True, True, True], 16),
    ):
        random.seed(0)
        np.random.seed(0)
        options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        loader = DataLoader(Noise(), generator=generator, worker_init_fn=seed, **options)
        first, second = gather(torch.cat([*loader]))
        assert (first == second).all(dim=0).tolist() == alike and len({*first.flatten().tolist()}) == drawn


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


def two_losses():
    for when in ("after each", "once after the last", "twice after the last"):
        model, ddp, optimizer = make()
        losses = (ddp(torch.randn(8, 4)).square().mean() for _ in range(2))
        losses = losses if when == "after each" else [*losses]
        for loss in [sum(losses)] if "once" in when else losses:
            loss.backward()
        optimizer.step()
        assert equal(model.parameters()) == ("twice" not in when)


class Numbers(IterableDataset):
    exec(textwrap.dedent(lesson("def __iter__")), {"islice": islice, "get_worker_info": get_worker_info}, locals())

    def __init__(self):
        self.rank, self.world_size, self.samples = dist.get_rank(), dist.get_world_size(), range(10)


def iterable():
    loader = DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    first, second = gather([*loader])
    assert sorted(first + second) == [*range(8)] and len(first) == len(second)
    counts = re.findall(r"`(num_workers \* .*?)`", README)
    n, num_workers, workers, batch_size = 10, 2, 4, 3
    for drop_last, count in zip((False, True), counts, strict=True):
        loader = DataLoader(Numbers(), batch_size, num_workers=2, multiprocessing_context="fork", drop_last=drop_last)
        assert len([*loader]) == eval(count, {"math": math, **locals()})


def averaged():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    before, ddp = AveragedModel(model), DistributedDataParallel(model)
    ema = AveragedModel(model, use_buffers=True)
    assert equal(ema.parameters()) and not equal(before.parameters())
    for _ in train(ddp, torch.optim.SGD(model.parameters(), 0.1)):
        ema.update_parameters(model)
    assert equal(ema.parameters()) and not equal(ema.buffers())
    for buffer in ema.buffers():
        dist.broadcast(buffer, src=0)
    assert equal(ema.buffers())


def not_finite():
    loss, most = (torch.tensor(float("nan") if dist.get_rank() else 1.0) for _ in range(2))
    dist.all_reduce(loss)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert loss.isnan() and most == 1


QUESTIONS = {  # what the page says, and what shows that it is so
    "Let all ranks draw the same ones": shared,
    "they are seeded from the generator instead: seed it by rank": noise,
    "Give an `IterableDataset` no sampler": iterable,
    "count over all ACCUM_STEPS batches": accumulated,
    "With class weights, also pass": class_weights,
    "the mean IoU of a segmentation": mean_iou,
    "So the gradient of z is multiplied": gather_with_gradient,
    "a lower rate (`ReduceLROnPlateau`)": plateau,
    "test the sum of the losses of all ranks": not_finite,
    "before, the weights may differ by rank. Update the copy on each rank, after `opti": averaged,
    "both models of a GAN": two_models,
    "call `backward()` after each, or once after the last": two_losses,
    "wrap it again after unfreezing them": frozen_and_unfrozen,
}


def check(row):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    row()
    dist.barrier()  # rank 0 has the store of addresses, so it must not end before rank 1 has joined
    dist.destroy_process_group()


@pytest.mark.parametrize("words", QUESTIONS)
def test_question(words):
    assert words in README
    finish(check, QUESTIONS[words])
