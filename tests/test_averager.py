"""GradientAverager on 2, 3 and 4 real processes: against DDP, and against one process."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import finish, in_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train_ddp
from train_manual_ddp import GradientAverager

SYNCS = ("per-parameter", "flat", "bucketed")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["same_training", "any_module", "overlap", "branches"])
def test(name, world_size):
    finish(in_group, globals()[name], nproc=world_size)


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


def dtype():
    """A sum of two has one order, so float32 is compared bit by bit; from three on, float64 leaves no doubt."""
    return torch.float32 if dist.get_world_size() == 2 else torch.float64


def make_batch(model, rank, step, i):
    """Return the i-th batch of a step. The transformer's branch is used by one rank, in one of its batches only."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + i)
    if not isinstance(model, TinyTransformer):
        images = torch.randn(4, 1, 28, 28, generator=generator)
        return images.to(dtype()), torch.randint(10, (4,), generator=generator)
    tokens = torch.randint(1, 31, (4, 8), generator=generator)
    tokens[0, 0] *= rank != step % dist.get_world_size() or i > 0
    return tokens, tokens.roll(-1, dims=1).flatten()


def train(build, accum, clip, way):
    """Take two steps. `way` is how to average: "DDP", by hand as in --sync, or "alone", in one process: the oracle."""
    torch.manual_seed(0)
    model = build().to(dtype())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    forward, no_sync, average = model, contextlib.nullcontext, lambda: None
    if way == "DDP":
        forward = DistributedDataParallel(model, find_unused_parameters=True)
        forward.broadcast_buffers, no_sync = False, forward.no_sync
    elif way != "alone":
        averager = GradientAverager(model, way)
        no_sync, average = averager.no_sync, averager.average
    # Alone, one process runs the batches of all ranks in turn, each with BatchNorm statistics of its own.
    statistics = [copy.deepcopy(dict(model.named_buffers())) for _ in range(world_size)]
    for step in range(2):
        means = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
        for r in range(world_size) if way == "alone" else [rank]:
            model.load_state_dict(statistics[r], strict=False)
            for i in range(accum):
                x, y = make_batch(model, r, step, i)
                with no_sync() if i < accum - 1 else contextlib.nullcontext():
                    (F.cross_entropy(forward(x), y) / accum).backward()
            statistics[r] = copy.deepcopy(dict(model.named_buffers()))
            for p in means if way == "alone" else ():
                means[p] += 0 if p.grad is None else p.grad / world_size
                p.grad = means[p].clone() if r == world_size - 1 else None
        average()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(statistics[rank], strict=False)
    return model.state_dict()


def same_training():
    bits = {"rtol": 0, "atol": 0} if dtype() == torch.float32 else {"rtol": 1e-8, "atol": 1e-9}
    for build, accum, clip in ((train_ddp.build_model, 2, 0.5), (TinyTransformer, 1, 0), (TinyTransformer, 2, 0.5)):
        alone, ddp = (train(build, accum, clip, way) for way in ("alone", "DDP"))
        for sync in SYNCS:
            ours = train(build, accum, clip, sync)
            torch.testing.assert_close(dict(ours), dict(alone), **bits)
            torch.testing.assert_close(dict(ours), dict(ddp), **bits)


class Odd(nn.Module):
    """Three dtypes, parameters of odd layout, one that nobody uses, and buffers; all begin differently on each rank."""

    def __init__(self):
        super().__init__()
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.strided = nn.Parameter(torch.randn(2, 3, dtype=torch.float64).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(4))
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("flags", torch.tensor([True, False]) ^ (dist.get_rank() > 0))
        self.register_buffer("count", torch.tensor(dist.get_rank()))

    def forward(self, x):
        used = [p for name, p in self.named_parameters() if name != "unused"]
        return sum((p * x).double().sum() for p in used)


def any_module():
    """The ranks take what rank 0 has, and each parameter gets the mean of the gradients, in its own layout."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for sync in SYNCS:
        torch.manual_seed(rank)
        model = Odd()
        averager = GradientAverager(model, sync)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        assert model.flags.tolist() == [True, False] and model.count == 0, "not rank 0's"
        for set_to_none in (True, False):
            model(rank + 1.0).backward()
            averager.average()
            for name, p in model.named_parameters():
                mean = 0.0 if name == "unused" else (world_size + 1) / 2
                torch.testing.assert_close(p.grad, torch.full_like(p, mean))
                assert p.grad.stride() == p.stride()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        hashes = [None] * world_size
        dist.all_gather_object(hashes, train_ddp.weights_sha256(model))
        assert len(set(hashes)) == 1, sync
        for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
            GradientAverager(module, sync).average()


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2600, 2600, dtype=dtype()) for _ in range(3)))  # each is as large as a bucket


def overlap():
    """Buckets leave during backward(), the last layer's first; under no_sync none does, and without it, they must."""
    sent, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda bucket, **options: (sent.append(bucket), all_reduce(bucket, **options))[1]
    model, x = make_layers(), torch.ones(2, 2600, dtype=dtype())
    averager = GradientAverager(model)
    with averager.no_sync():
        model(x).sum().backward()
    assert not sent, "sent under no_sync"
    model(x).sum().backward()
    assert [bucket.numel() for bucket in sent] == [2600 * 2601] * 3, "not sent during backward"
    averager.average()
    for layer, bucket in zip(reversed(model), sent, strict=True):
        assert layer.weight.grad.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr(), "no view"
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        model(x).sum().backward()
    averager.average()


def branches():
    """Ranks whose buckets fill in different orders still reduce the same ones together."""
    results = []
    for sync in SYNCS:
        layers, x = make_layers(), torch.full((2, 2600), dist.get_rank() + 1.0, dtype=dtype())
        averager = GradientAverager(layers, sync)
        del (used := list(layers))[1 + dist.get_rank() % 2]
        nn.Sequential(*used)(x).sum().backward()
        averager.average()
        results.append([p.grad for p in layers.parameters()])
    torch.testing.assert_close(results, [results[0]] * 3)
