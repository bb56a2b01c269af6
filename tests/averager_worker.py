"""Run by torchrun from test_averager.py: what GradientAverager promises, checked on every rank."""

import contextlib
import copy
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train_ddp
import train_manual_ddp
from train_manual_ddp import GradientAverager

SYNCS = ("per-parameter", "flat", "bucketed")
STEPS = 2


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
        if tokens[0, 0] == 0:
            x = x + self.branch(x)
        return self.head(x).flatten(0, 1)


def build(name):
    torch.manual_seed(0)
    return {"resnet": train_ddp.build_model, "transformer": TinyTransformer}[name]().to(dtype())


def dtype():
    """A sum of two has one order, so float32 is compared bit by bit; from three on, float64 leaves no doubt."""
    return torch.float32 if dist.get_world_size() == 2 else torch.float64


def make_batches(name, rank, step, accum):
    """Return `accum` batches. The transformer's branch is used by one rank, in one of its batches only."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for i in range(accum):
        if name == "resnet":
            yield (
                torch.randn(4, 1, 28, 28, generator=generator).to(dtype()),
                torch.randint(10, (4,), generator=generator),
            )
        else:
            tokens = torch.randint(1, 31, (4, 8), generator=generator)
            if rank == step % dist.get_world_size() and i == 0:
                tokens[0, 0] = 0
            yield tokens, tokens.roll(-1, dims=1).flatten()


def finish(model, optimizer, clip):
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def run(name, accum, clip, wrap):
    """Train for a few steps; `wrap(model)` returns what to call, its no_sync and what to do after backward()."""
    model = build(name)
    forward, no_sync, average = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for i, (x, y) in enumerate(make_batches(name, dist.get_rank(), step, accum), 1):
            with contextlib.nullcontext() if i == accum else no_sync():
                (F.cross_entropy(forward(x), y) / accum).backward()
        average()
        finish(model, optimizer, clip)
    return model


def wrap_ddp(model):
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False
    return ddp, ddp.no_sync, lambda: None


def wrap_manual(sync, cap):
    def wrap(model):
        averager = GradientAverager(model, sync, cap)
        return model, averager.no_sync, averager.average

    return wrap


def run_alone(name, accum, clip):
    """The oracle: one process runs the ranks' batches in turn, each rank with BatchNorm statistics of its own."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world_size = dist.get_world_size()
    statistics = [copy.deepcopy(dict(model.named_buffers())) for _ in range(world_size)]
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(world_size):
            model.load_state_dict(statistics[rank], strict=False)
            for x, y in make_batches(name, rank, step, accum):
                (F.cross_entropy(model(x), y) / accum).backward()
            statistics[rank] = copy.deepcopy(dict(model.named_buffers()))
            for mean, p in zip(total, model.parameters(), strict=True):
                if p.grad is not None:
                    mean += p.grad / world_size
            optimizer.zero_grad()
        for mean, p in zip(total, model.parameters(), strict=True):
            p.grad = mean if p.requires_grad else None
        finish(model, optimizer, clip)
    model.load_state_dict(statistics[dist.get_rank()], strict=False)
    return model


def assert_same(a, b, what):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        same = torch.equal(x, y) if dtype() == torch.float32 else torch.allclose(x, y, rtol=1e-8, atol=1e-9)
        assert same, f"{what}: {name} is off by up to {(x.double() - y.double()).abs().max():.1e}"


def check_against_ddp_and_oracle():
    for name, (accum, clip) in itertools.product(("resnet", "transformer"), ((1, 0), (2, 0.5))):
        alone, ddp = run_alone(name, accum, clip), run(name, accum, clip, wrap_ddp)
        for sync in SYNCS:
            manual = run(name, accum, clip, wrap_manual(sync, 1 if accum == 2 else None))
            what = f"{name}, {sync}, accumulation {accum}, clipping {clip}"
            assert_same(manual, alone, f"{what}, against one process")
            assert_same(manual, ddp, f"{what}, against DDP")
            if name == "transformer":
                hashes = train_ddp.gather(train_ddp.weights_sha256(manual))
                assert len(set(hashes)) == 1, f"{what}: the ranks differ"


def check_different_starts():
    """Ranks that begin with other weights and buffers end with the same."""
    for sync in SYNCS:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
        model[1].running_mean.normal_()
        model = model.to(memory_format=torch.channels_last)
        averager = GradientAverager(model, sync)
        assert len(set(train_ddp.gather(train_ddp.weights_sha256(model)))) == 1, f"{sync}: different at the start"
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(STEPS):
            model(torch.randn(4, 1, 28, 28)).square().mean().backward()
            averager.average()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        params = [p.detach() for p in model.parameters()]
        assert len(set(train_ddp.gather(str([p.double().sum().item() for p in params])))) == 1, (
            f"{sync}: different ends"
        )


class Odd(nn.Module):
    """Three dtypes, a strided parameter, a scalar, one that nobody uses, and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.fp32 = nn.Parameter(torch.ones(3))
        self.bf16 = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.fp64 = nn.Parameter(torch.ones(2, 3, dtype=torch.float64).t())
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("flags", torch.tensor([True, False]) ^ (dist.get_rank() > 0))
        self.register_buffer("count", torch.tensor(dist.get_rank()))

    def forward(self, x):
        return sum((p * x).double().sum() for p in (self.fp32, self.bf16, self.fp64, self.scalar))


def check_any_module():
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for sync in SYNCS:
        model = Odd()
        averager = GradientAverager(model, sync)
        assert model.flags.tolist() == [True, False] and model.count == 0, "buffers are not rank 0's"
        for _ in range(2):
            model(rank + 1.0).backward()
            averager.average()
            mean = (world_size + 1) / 2
            for name, p in model.named_parameters():
                want = 0.0 if name == "unused" else mean
                assert torch.allclose(p.grad.double(), torch.full_like(p, want).double(), rtol=1e-2), (
                    sync,
                    name,
                    p.grad,
                )
                assert p.grad.dtype == p.dtype and p.grad.shape == p.shape
            model.zero_grad()
        for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
            GradientAverager(module, sync).average()

    model = nn.Linear(2, 2)
    averager = GradientAverager(model)
    model(torch.ones(2)).sum().backward()
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2)).sum().backward()
        raise AssertionError("a second backward() went unnoticed")


def check_overlap_and_silence():
    """Buckets leave during backward(), in order; under no_sync nothing leaves; both ways of zeroing do."""
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    averager = GradientAverager(model, "bucketed", 1)
    assert len(averager.buckets) == 4
    assert next(iter(averager.buckets[0].views)) is model[3].bias, "the last layer is not first"
    grads = []
    for set_to_none in (True, False):
        x = torch.full((2, 600), dist.get_rank() + 1.0)
        with averager.no_sync():
            model(x).sum().backward()
        assert averager.launched == 0, "sent under no_sync"
        model(x).sum().backward()
        assert averager.launched == 4, "not sent during backward"
        averager.average()
        grads.append([p.grad.clone() for p in model.parameters()])
        for bucket in averager.buckets:
            for p in bucket.views:
                assert p.grad.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr(), "no view"
        model.zero_grad(set_to_none=set_to_none)
    assert all(map(torch.equal, *grads))


def check_branches():
    """Ranks whose buckets fill in different orders still reduce the same ones together."""
    skipped, results = 1 + dist.get_rank() % 2, []
    for sync in SYNCS:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(600, 600, dtype=torch.float64) for _ in range(4))
        averager = GradientAverager(layers, sync, 1)
        for _ in range(2):
            x = torch.full((2, 600), dist.get_rank() + 1.0, dtype=torch.float64)
            for i, layer in enumerate(layers):
                x = x if i == skipped else layer(x)
            x.sum().backward()
            averager.average()
            results.append([p.grad.clone() for p in layers.parameters()])
            layers.zero_grad()
    for result in results[1:]:
        assert all(map(torch.allclose, result, results[0])), "the ways to average differ"


class Scripted(nn.Module):
    """Right exactly for the images whose first pixel is bright; the label is in the second."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor(dist.get_rank()))

    def forward(self, images):
        bright, label = ((images * train_ddp.PIXEL_STD + train_ddp.PIXEL_MEAN) * 255).round().long()[:, 0, 0, :2].T
        return 50.0 * F.one_hot((label + (bright == 0) + self.shift) % 10, 10)


def check_evaluation():
    """Every image counts once at any world size, and all ranks judge with rank 0's buffers."""
    size, rank, world_size = 101, dist.get_rank(), dist.get_world_size()
    images = torch.zeros(size, 28, 28, dtype=torch.uint8)
    labels = torch.arange(size) % 10
    images[:37, 0, 0], images[:, 0, 1] = 255, labels
    for module in (train_ddp, train_manual_ddp):
        data = module.DeviceImages(images, labels, "cpu")
        share = range(rank, size, world_size)
        loader = torch.utils.data.DataLoader(data, 8, sampler=share, collate_fn=lambda batch: batch)
        args = module.parse_args()
        result = module.evaluate(Scripted(), loader, torch.device("cpu"), args)
        assert result["test_samples"] == size
        assert result["test_accuracy"] == 37 / size
        assert abs(result["test_loss"] - 50 * 64 / size) < 1e-6, result


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_any_module()
    check_overlap_and_silence()
    check_branches()
    check_different_starts()
    check_evaluation()
    check_against_ddp_and_oracle()
    if dist.get_rank() == 0:
        print("all checks passed")
    dist.destroy_process_group()
