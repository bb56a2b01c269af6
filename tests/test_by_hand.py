"""What is written by hand: the sampler against torch's; the averager, and the README's lines, against DDP."""

import argparse
import contextlib
import functools
import re
import sys
import textwrap

import benchmark
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import MANUAL, ROOT, Ranks, finish, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import spied
from test_readme import LESSONS, MANY, README
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import train_ddp
import train_manual_ddp
from train_manual_ddp import GradientAverager, ManualDistributedSampler

SYNCS = ("per-parameter", "flat", "bucketed")


class TinyTransformer(nn.Module):
    """A language model with tied weights, frozen positions, and a branch that not every batch uses."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(31, 16)
        self.positions = nn.Parameter(torch.randn(8, 16), requires_grad=False)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.branch = nn.Linear(16, 16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.block(self.tokens(tokens) + self.positions)
        return self.head(x + self.branch(x) if tokens[0, 0] == 0 else x).flatten(0, 1)


def make_batch(model, step, i):
    """Return the i-th batch of a step. The transformer's branch is used by one rank, in one of its batches only."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + i)
    if not isinstance(model, TinyTransformer):
        return torch.randn(4, 1, 28, 28, generator=generator), torch.randint(10, (4,), generator=generator)
    tokens = torch.randint(1, 31, (4, 8), generator=generator)
    tokens[0, 0] *= dist.get_rank() != step % dist.get_world_size() or i > 0
    return tokens, tokens.roll(-1, dims=1).flatten()


def main_with_a_spy(*flags):
    averager = train_manual_ddp.GradientAverager
    train_manual_ddp.GradientAverager = lambda model, way: print(f"averages {way}") or averager(model, way)
    sys.argv = [MANUAL, *map(str, flags)]
    train_manual_ddp.main(train_manual_ddp.parse_args())


def test_main_averages_as_sync_says(small_mnist):
    for sync in SYNCS:
        flags = ("--data-dir", small_mnist, "--epochs", 0, "--sync", sync)
        assert f"averages {sync}\n" in finish(main_with_a_spy, *flags, nproc=1)


def gather_and_average(model):
    """The oracle: every rank gets the gradients of all, without an all-reduce, and takes their mean."""
    for p in model.parameters():
        if p.requires_grad:
            gradients = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(gradients, torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = sum(gradients) / len(gradients)


def train(build, accum, way):
    """Take two steps. `way` is how to average: "DDP", by hand as in --sync, or "gather", the oracle."""
    torch.manual_seed(0)
    model = wrapped = build()
    no_sync, average = contextlib.nullcontext, lambda: None
    if way == "DDP":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        wrapped.broadcast_buffers, no_sync = False, wrapped.no_sync
    elif way == "gather":
        average = functools.partial(gather_and_average, model)
    else:
        averager = GradientAverager(model, way)
        no_sync, average = averager.no_sync, averager.average
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        for i in range(accum):
            x, y = make_batch(model, step, i)
            with no_sync() if i < accum - 1 else contextlib.nullcontext():
                (F.cross_entropy(wrapped(x), y) / accum).backward()
        average()
        # Not clipped without accumulation, as clipping hides a wrong factor.
        nn.utils.clip_grad_norm_(model.parameters(), 0.5 if accum > 1 else torch.inf)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def same_training(*models):
    """A sum of two has one order, so float32 is compared bit by bit; from three on, float64 leaves no doubt."""
    dist.init_process_group("gloo")
    two = dist.get_world_size() == 2
    torch.set_default_dtype(torch.float32 if two else torch.float64)
    for build, accum in models:
        oracle, *others = (train(build, accum, way) for way in ("gather", "DDP", *SYNCS))
        for other in others:
            torch.testing.assert_close(other, oracle, rtol=0 if two else 1e-8, atol=0 if two else 1e-9)


def compare_steps(precision, clip):
    """Compare two steps of each script, of two batches on each of two ranks, with two steps over all their samples."""
    dist.init_process_group("gloo")
    args = argparse.Namespace(accum_steps=2, clip_grad_norm=clip, precision=precision)
    torch.manual_seed(0)
    images, labels, start = torch.randn(2, 2, 3, 8), torch.randint(5, (2, 2, 3)), torch.randn(5, 8)
    weight, losses = start.clone().requires_grad_(), []
    for lr in (0.5, 0.25):
        losses.append(F.cross_entropy(images.flatten(0, 2) @ weight.T, labels.flatten()))
        (gradient,) = torch.autograd.grad(losses[-1], weight)
        weight.data -= lr * gradient * (min(1, clip / gradient.norm()) if clip else 1)
    for script in (train_ddp, train_manual_ddp):
        model, dtypes = nn.Linear(8, 5, bias=False), set()
        model.weight.data.copy_(start)
        model.register_forward_hook(lambda _, __, logits, dtypes=dtypes: dtypes.add(logits.dtype))
        wrapped = [DistributedDataParallel(model)] if script is train_ddp else [model, GradientAverager(model)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e9)  # a rate that must not count
        for lr, expected in zip((0.5, 0.25), losses, strict=True):
            batches = zip(images[dist.get_rank()], labels[dist.get_rank()], strict=True)
            loss = script.train_step(*wrapped, optimizer, lr, batches, torch.device("cpu"), args)
            assert loss.dtype == torch.float32  # of bf16 logits, too
            dist.all_reduce(loss)
            tolerance = {"rtol": 0, "atol": 1e-6 if precision == "fp32" else 0.01}
            torch.testing.assert_close(loss / 2, expected.detach(), **tolerance)
        torch.testing.assert_close(model.weight, weight, **tolerance)
        assert dtypes == {torch.float32 if precision == "fp32" else torch.bfloat16}


@pytest.mark.parametrize(("precision", "clip"), [("fp32", 0), ("fp32", 0.1), ("bf16", 0)])
def test_a_step_is_that_of_the_global_batch(precision, clip):
    finish(compare_steps, precision, clip)


class Odd(nn.Module):
    """Three dtypes, parameters of odd layout, one that nobody uses, and buffers; all differ by rank."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.strided = nn.Parameter(torch.randn(2, 3, dtype=torch.float64).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.sliced = nn.Parameter(torch.randn(4, 6)[:, :2])
        self.unused = nn.Parameter(torch.randn(4))
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("flags", torch.tensor([True, False]) ^ (rank > 0))
        self.register_buffer("count", torch.tensor(rank), persistent=False)  # so not in the state_dict

    def forward(self, rank):
        """Use not all: the gradient of what is used is rank + 1."""
        return sum((p * (rank + 1)).double().sum() for name, p in self.named_parameters() if self.uses(name, rank))

    def uses(self, name, rank):
        """Each rank leaves out one parameter of another bucket, so that the buckets fill in different orders."""
        return name not in ("unused", ("scalar", "strided", "bf16")[rank % 3])


def any_module():
    """The ranks take what rank 0 has, and each parameter gets the mean of the gradients, in its own layout."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for sync in SYNCS:
        model = Odd(rank)
        averager = GradientAverager(model, sync)
        ours, expected = ([*module.parameters(), *module.buffers()] for module in (model, Odd(0)))
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        for set_to_none in (True, False):
            model(rank).backward()
            averager.average()
            for name, p in model.named_parameters():
                mean = sum(r + 1 for r in range(world_size) if model.uses(name, r)) / world_size
                torch.testing.assert_close(p.grad, torch.full_like(p, mean), check_stride=True)
            model.zero_grad(set_to_none)
        GradientAverager(nn.Linear(2, 2).requires_grad_(False), sync).average()
    with averager.no_sync():
        with averager.no_sync():
            pass
        model(rank).backward()  # is still not sent
    model(rank).backward()
    with pytest.raises(RuntimeError, match="no_sync"), averager.no_sync():  # of the last one, "bucketed": too late
        model(rank).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        model(rank).backward()


RESNET, TRANSFORMERS = (train_ddp.build_model, 2), ((TinyTransformer, 1), (TinyTransformer, 2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_averager(world_size):
    finish(any_module, nproc=world_size)
    finish(same_training, *TRANSFORMERS, nproc=world_size)


def test_averager_with_three_buckets():
    finish(same_training, RESNET)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 200), st.integers(1, 12), st.integers(0, 2**31 - 1), st.integers(0, 99))
def test_indices_are_torchs(size, world_size, seed, epoch):
    for rank in range(world_size):
        ours = ManualDistributedSampler(range(size), world_size, rank, seed)
        torchs = DistributedSampler(range(size), world_size, rank, seed=seed, drop_last=True)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs) and len(ours) == len(torchs)


BROKEN = [  # a line, and the README's in its place
    ("manual_seed(self.seed + self.epoch)", "manual_seed(self.seed + self.epoch + self.rank)"),
    ("torch.div(p.grad, dist.get_world_size(), out=view)", "view.copy_(p.grad)"),
]


@pytest.mark.parametrize(("line", "instead"), BROKEN)
def test_break_it(line, instead, small_mnist, tmp_path):
    """No message; the same images on both ranks, or, by Adam, almost the same losses."""
    flags, losses, hashes = ("--data-dir", small_mnist, "--train-size", 320, "--batch-size", 16, "--epochs", 1), [], []
    source = (ROOT / MANUAL).read_text()
    assert line in source and instead in README
    for name, text in (("whole", source), ("broken", source.replace(line, instead))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / MANUAL).write_text(text)
        output = finish(spied, folder, folder / MANUAL, *flags)
        losses.append(float(re.search(r"step 10 .* loss (\S+)", output)[1]))
        hashes.append(weights(output))
        first, second = ({*(folder / f"rank{rank}").read_text().split()} for rank in (0, 1))
        twice = len(first & second)  # of 320
        assert twice == 0 if line == BROKEN[1][0] or name == "whole" else 60 < twice < 100
    assert hashes[0] != hashes[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def send_in_any_order(self, bucket, p):
    if self.accumulating:
        return
    bucket.collect(p)
    if not bucket.pending:
        bucket.send()


def with_any_order(function, *arguments):
    GradientAverager._on_gradient = send_in_any_order
    function(*arguments)


def test_break_the_order_of_buckets():
    """With ResNet18, whose buckets fill in one order, nothing changes; where ranks use other parameters, they fail."""
    assert "if not bucket.pending: bucket.send()" in README
    finish(with_any_order, same_training, (train_ddp.build_model, 1))
    with Ranks(with_any_order, any_module) as ranks:
        assert any(ranks.wait())


def test_the_readmes_three_lines_and_its_hooks_end_on_the_bits_of_ddp(train_many):
    three, hooks, waits = (lesson for lesson in LESSONS if "p.grad" in lesson or "work.wait()" in lesson)
    by_hand = MANY.replace("DistributedDataParallel(model)", "model")
    hooked = by_hand.replace("optimizer =", f"{hooks}optimizer =")
    backward, (_, expected) = "        loss.backward()\n", train_many(MANY)
    for source, lines in ((by_hand, three), (hooked, waits)):
        _, state = train_many(source.replace(backward, backward + textwrap.indent(lines, 8 * " ")))
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    _, state = train_many(by_hand)  # with no averaging at all
    assert not torch.equal(state["0.weight"], expected["0.weight"])


def test_the_tables_of_the_benchmark(monkeypatch, capsys):
    ways = (benchmark.LIMIT, benchmark.SCRIPT, *benchmark.SYNCS, benchmark.DEFAULTS)
    ms = {way: [10.0 * i] * 3 for i, way in enumerate(ways, start=1)}
    monkeypatch.setattr(benchmark, "on_two_hosts", lambda *_: {"inf": ms, "1000": ms})
    monkeypatch.setattr(benchmark, "torchrun", lambda *_: {"inf": ms})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for flags in ([], ["--link", "none", "1gbit"]):
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "--batch-size", "10", *flags])
        benchmark.main()
    printed = re.sub(r" \([^)]* to [^)]*\)", "", capsys.readouterr().out)
    assert "| train_ddp.py | 20 | 3.00 |" in printed  # of 20 and 60 ms
    assert printed.count("processes: ") == 2  # one and two, as four would be too many
    assert "| 1 | 500 |\n| 2 | 1,000 |\n" in printed  # processes, samples/s: once and twice 10 in 20 ms
    assert "| flat / bucketed | 1.33 | 1.33 |" in printed  # 40 and 30 ms
    assert "| flat, on paper: C + t |  | 368 |" in printed  # 10 ms, and 44.7 MB at 1 Gbit/s
