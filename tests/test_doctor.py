"""The doctor: what it finds in scripts that are wrong, what it does not say of those that are right."""

import collections
import contextlib
import functools
import io
import math
import os
import pathlib
import random
import re
import runpy
import signal
import sysconfig
import textwrap
import time
import traceback
import types

import doctor
import numpy
import pytest
import torch
from conftest import ROOT, SCRIPTS, Ranks, finish, in_dir, run, torchrun, weights, write_mnist
from small_model import with_small_model
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

DOCTOR = ROOT / "tests" / "doctor.py"

LOOP = """
from itertools import chain, count, islice
from queue import SimpleQueue
import collections, contextlib, copy, datetime, gc, numpy, os, pathlib, random, signal, sys, threading, time, types
import weakref
import torch, torch.distributed as dist, torch.distributed.nn
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, random_split
from torch.utils.data import BatchSampler, RandomSampler, Sampler, Subset, SubsetRandomSampler, TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.count = torch.zeros(1)
        self.observer = torch.ao.quantization.MinMaxObserver() if kind == "observer" else nn.Identity()

    def forward(self, inputs, look=None, ddp=None, real=None):  # names that the doctor has, too
        inputs = self.observer(getattr(inputs, "opaque", inputs))
        if kind in ("codebook", "its own buffers"):
            self.mean += inputs.mean(dim=0)
        return self.head(self.layers(nn.functional.dropout(inputs, 0.1 * (kind == "dropout"))))

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

class Deck(IterableDataset):  # all samples, to each rank, in an order of its own
    def __iter__(self):
        return iter(samples[:64][torch.randperm(64)])

class Labelled(IterableDataset):  # of samples that each rank changes in its own way: all or, if right, a share
    def __iter__(self):
        for i in range(64):
            label, places = (i + 64 * rank * kind.startswith("own labels")) ** 2 % 23, torch.arange(9) + i // 8
            alike = {"number": i, "mask": torch.arange(9) < random.Random(i).randrange(9), "places": places}
            yield samples[i] + torch.randn(4), {"bytes": torch.randint(99, (9,)), "label": label, **alike}

class Record:  # of a whole batch, as a dataclass is
    def __init__(self, batch):
        self.opaque, self.more = torch.utils.data.default_collate(batch)

def boxes(batch):  # as for detection, labels by image
    return torch.stack([sample for sample, _ in batch]), [torch.tensor([more["label"]] * 3) for _, more in batch]

class Captioned(IterableDataset):  # images change, texts stay; to each rank all or, if right, a share
    def __iter__(self):
        for i in torch.randperm(64) if kind == "captions" else torch.randperm(32) * 2 + rank:
            yield samples[i] + torch.randn(4), i * torch.arange(9)

class Turns(IterableDataset):  # without an end: in each pass, a rank has what the other had in the one before
    def __iter__(self):
        for turn in count():
            yield from samples[(rank + turn) % 2 : 64 : 2][torch.randperm(32)]

class Unsized(Dataset):
    def __init__(self):
        self.samples = samples[rank:64:2]

    def __getitem__(self, i):
        return (self.samples[i],)

def masked(batch):  # with a mask for each sample, and one for all, which is larger with 4 samples, smaller with 8
    batch = torch.stack([item if torch.is_tensor(item) else item[0] for item in batch])
    return batch, torch.ones(len(batch), 30, 30).tril(), torch.ones(70, 70).tril()

class Archive(Dataset):  # of more names than the doctor looks at
    def __init__(self):
        self.names = [f"{i}.png" for i in range(100_001)]

class Graphs:  # as of PyTorch Geometric, with tensors in an object within; and it knows a data set
    def __init__(self, batch):
        self.archive = archive
        mapping = {"x": torch.stack([sample for (sample,) in batch]), "edges": torch.arange(8)}
        self.store = types.SimpleNamespace(mapping=mapping, parent=weakref.ref(self))

    @property
    def opaque(self):
        return self.store.mapping["x"]

    def __call__(self):  # as theirs has, too
        pass

class Grouped(Sampler):  # as for detection
    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return 8

    def __iter__(self):
        indices = iter(self.sampler)
        return (batch for batch in iter(lambda: [*islice(indices, 8)], []))

class Persistent(DataLoader):  # has one iterator, as with persistent workers
    def _get_iterator(self):
        self.kept = getattr(self, "kept", None) or super()._get_iterator()
        self.kept._reset(self)
        return self.kept

class Volume(torch.Tensor):  # of a library's own type
    pass

class Files(Dataset):  # of each rank, its own
    def __init__(self):
        names = [f"{i}.png" for i in range(rank, 64, 2)]
        self.names = [*map(pathlib.Path, names)] if kind == "paths" else numpy.array(names)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return (samples[int(str(self.names[i])[:-4])],)

class Noisy(Files):
    def __getitem__(self, i):
        return (super().__getitem__(i)[0] + torch.randn(4),)

class Own(DistributedSampler):  # of a rank's own samples, as YOLOv5's is
    yielded = 0

    def __iter__(self):
        for i in torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            self.yielded += 1
            yield i

class Unsplit(Sampler):  # of indices, which knows of no ranks
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(epoch)).tolist())

class Augmented(TensorDataset):
    def __getitem__(self, i):
        return (super().__getitem__(i)[0] + torch.randn(4),)

class Split(DistributedSampler):  # into batches, each a tensor
    def __iter__(self):
        return iter(torch.tensor([*super().__iter__()]).split(4))

class Permuted(DistributedSampler):  # by NumPy, whose numbers are no int
    def __iter__(self):
        return iter(numpy.random.default_rng(self.epoch).permutation(64)[rank::2])

class Drawn(Dataset):  # of what draws random numbers, from files in a folder of each rank
    def __init__(self, base):
        self.base, self.names = base, [f"/scratch/{rank}/{i}.png" for i in range(64)]

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return (samples[i] + torch.randn(4) if self.base is None else self.base[i][0],)

class Keeping(Dataset):  # in memory, what this rank has read
    __hash__ = None  # as a dataclass has none

    def __init__(self):
        self.kept = {}

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return (self.kept.setdefault(i, samples[i]) + torch.randn(4),)

class Items(Dataset):  # in another order on each rank
    __hash__ = None

    def __init__(self):
        self.items = [types.SimpleNamespace(number=(i + 7 * rank) % 64) for i in range(64)]

    def __getitem__(self, i):
        return (samples[self.items[i].number] + torch.randn(4),)

class Relative(torch.optim.Optimizer):  # Adafactor's groups have no rate, either
    def __init__(self, params):
        super().__init__(params, {"lr": None})

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= 0.1 * p.grad

kind, *flags = sys.argv[1:]
archive = Archive() if "graphs" in kind else None
if kind in ("spawn", "start_processes"):  # no process, for here one of them would run all this again
    sys.exit(getattr(torch.multiprocessing, kind)(print, (), nprocs=0))
limit = {"timeout": datetime.timedelta(minutes=2)} if kind == "break" else {}  # as libraries set one
dist.init_process_group("gloo", **limit)
rank, device = dist.get_rank(), "cpu"
if kind == "raises at once":
    dist.all_reduce(torch.zeros(1))
    raise NameError("of the script")
torch.manual_seed(rank)
samples = torch.randn(65, 4, generator=torch.Generator().manual_seed(0))
train_set, test_set = TensorDataset(samples[:64]), TensorDataset(samples)
if kind == "split":
    train_set, _ = random_split(TensorDataset(samples), [64, 1])
if kind == "other split":
    train_set, _ = torch.utils.data.dataset.random_split(TensorDataset(samples), [64, 1])
if kind == "table":
    train_set.table = collections.UserList()
if kind == "own split":
    train_set = Subset(TensorDataset(samples), torch.randperm(65)[:64].tolist())
if kind == "own split by NumPy":
    train_set = Subset(TensorDataset(samples), [*numpy.random.default_rng(rank).permutation(65)[:64]])
if kind == "rows":  # as of Hugging Face's data sets
    column = types.SimpleNamespace(to_pylist=lambda: torch.randperm(64).tolist())
    train_set._indices = types.SimpleNamespace(slice=lambda *_: types.SimpleNamespace(column=lambda _: column))
if kind == "encodings":
    train_set.encodings = {"text": [f"text {i}" for i in torch.randperm(64)]}
if kind == "lengths":
    train_set = TensorDataset(samples[: 64 - rank])
if kind == "classes":
    train_set.classes = {name: (i + rank) % 3 for i, name in enumerate("abc")}
if kind == "list":
    train_set = [(samples[i] + torch.randn(4),) for i in torch.randperm(64)]
if kind == "items":
    train_set = Subset(Items(), range(64))
if kind == "keeping":
    train_set = Keeping()
if kind == "drawn":
    train_set = Drawn(Drawn(None))
if kind.endswith("of a tensor"):
    train_set = samples[:64]
if kind == "zeros":  # as in a benchmark
    train_set = TensorDataset(torch.zeros(64, 4))
seed = rank if kind == "sampler seeds" else 0
if kind == "cycle":  # which only the garbage collector ends, with an order that is not used up
    cycle = types.SimpleNamespace(sampler=DistributedSampler(train_set))
    cycle.itself, cycle.order = cycle, iter(cycle.sampler)
    next(cycle.order)
sampler = DistributedSampler(train_set, seed=seed, drop_last=True)
test_set = train_set if kind == "keeping" else test_set
evenly = "repeats" in kind or kind == "keeping"
uneven = kind.endswith("uneven")  # 7 batches for each rank, 13 for one process
test_sampler = DistributedSampler(test_set, shuffle=False) if evenly else range(rank, 65, 2)
loader = DataLoader(train_set, batch_size=5 if uneven else 4, sampler=sampler)
test_loader = DataLoader(test_set, batch_size=4, sampler=test_sampler)
if "left out" in kind:
    workers = dict(num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    workers = workers if "workers" in kind else {}
    test_loader = DataLoader(test_set, batch_size=16, sampler=test_sampler, drop_last=True, **workers)
if kind.startswith("no sampler"):
    collate = Graphs if "graphs" in kind else None
    loader = DataLoader(train_set, batch_size=16 if "large" in kind else 4, collate_fn=collate)
if kind == "subset":
    train_set = Subset(train_set, range(rank, 64, 2))
if kind == "one seed":  # draws an order and seeds, but no data, and each rank has files of its own
    train_set = Subset(Files(), range(32))
if kind == "one seed, by a sampler":
    loader = DataLoader(Files(), batch_size=4, sampler=SubsetRandomSampler(range(32)))
if kind == "noisy files":
    train_set = Noisy()
shuffling = ["shuffle", "shuffle, one batch", "shuffle, one seed", "table", "subset"]
if kind in (*shuffling, "files", "paths", "one seed", "noisy files"):
    loader = DataLoader(Files() if kind in ("files", "paths") else train_set, batch_size=4, shuffle=True)
if "own class" in kind:
    sampler = Own(Files())
    loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
if kind == "permuted":
    sampler = Permuted(train_set)
    loader = DataLoader(train_set, batch_size=4, sampler=sampler)
if kind.endswith("split order"):
    sampler = Split(train_set)
    loader = DataLoader(train_set, batch_size=None, sampler=sampler)
if kind == "grouped":
    loader = DataLoader(train_set, batch_sampler=Grouped(RandomSampler(train_set)))
if kind in ("deck", "turns", "masked deck"):
    collate = masked if kind == "masked deck" else None
    loader = DataLoader(Turns() if kind == "turns" else Deck(), batch_size=8, collate_fn=collate)
if kind in ("masked", "graphs"):
    collate = masked if kind == "masked" else Graphs
    loader = DataLoader(train_set, batch_size=4, sampler=sampler, collate_fn=collate)
if kind == "unsplit":
    loader = DataLoader(Augmented(samples[:64]), batch_size=4, sampler=Unsplit(64))
if kind == "unsplit, own share":
    loader = DataLoader(Augmented(samples[rank:64:2]), batch_size=4, sampler=Unsplit(32))
if "captions" in kind:
    loader = DataLoader(Captioned(), batch_size=8)
if kind in ("augmented subset", "augmented, own subset", "augmented, one share"):
    sampler = DistributedSampler(train_set, rank=0)
    subset = SubsetRandomSampler(range(rank, 64, 2) if "own" in kind else range(32))
    loader = DataLoader(Augmented(samples[:64]), batch_size=4, sampler=subset if "subset" in kind else sampler)
if kind == "unsized":
    loader = DataLoader(Unsized(), batch_size=4, sampler=RandomSampler(range(32)))
if kind == "whole":
    loader = DataLoader(train_set, batch_size=64)
if kind in ("labelled", "labelled boxes", "labelled records", "own labels", "own labels, records"):
    collate = boxes if "boxes" in kind else Record if "records" in kind else None
    loader = DataLoader(Labelled(), batch_size=8, collate_fn=collate)
if kind == "volumes":  # the corners of which are empty
    volumes = [torch.cat([torch.zeros(10**5), sample]).as_subclass(Volume) for sample in samples]
    loader = DataLoader(volumes, batch_size=2)
if kind in ("indices", "indices in a list"):
    indices = range(64) if kind == "indices" else [*range(64)]
    loader = DataLoader(indices, batch_size=4, shuffle=True, collate_fn=lambda batch: (samples[batch],))
if kind == "tensor":
    loader = DataLoader(samples[rank:64:2], batch_size=4, shuffle=True)
if kind == "batched shuffle":
    loader = DataLoader(train_set, batch_sampler=BatchSampler(RandomSampler(train_set), 4, drop_last=True))
if "shuffled test" in kind:
    loader_of_tests = dict(sampler=DistributedSampler(train_set)) if "sampler" in kind else dict(shuffle=True)
    test_loader = DataLoader(train_set, batch_size=4, **loader_of_tests)
if kind == "persistent test":
    test_loader = Persistent(test_set, batch_size=4)
if "stream" in kind:
    loader = DataLoader(Stream(), batch_size=4)
if kind == "peek":
    next(iter(loader))
if kind == "peeks, one step":
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
if kind == "first pass":  # for a mean, say
    with torch.no_grad():
        [*loader]
other_set = TensorDataset(samples[:60])
other_sampler = DistributedSampler(other_set)
if kind == "held":
    held = iter(DataLoader(test_set, batch_size=4, sampler=DistributedSampler(test_set)))
    next(held)

model = Model()
early = copy.deepcopy(model) if kind == "copy" else None  # before the weights of all ranks are equal
untouched = copy.deepcopy(model)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind == "ema" else None
if kind == "spectral norm":
    model.head = nn.utils.parametrizations.spectral_norm(model.head)
if kind == "traced":
    model.layers = torch.jit.trace(model.layers, samples[:8])
if kind.endswith("older spectral norm"):
    model.layers[0] = nn.utils.spectral_norm(model.layers[0])
model.head.requires_grad_(not kind.startswith("unfrozen"))
options = {"static_graph": kind == "static", "find_unused_parameters": kind == "unused"}
options |= {"broadcast_buffers": False} if kind.startswith(("its own buffers", "each rank's")) else {}
if "tries" in kind and rank == 0:  # what memory a step needs
    tried = copy.deepcopy(model)
    tried(samples).sum().backward()
    torch.optim.SGD(tried.parameters(), 0.1).step()
ddp = DistributedDataParallel(model, **options)
other = nn.Linear(4, 4)
other.register_buffer("mean", torch.zeros(4))
[dist.broadcast(p.data, 0) for p in other.parameters() if "by hand" in kind]
other_ddp = DistributedDataParallel(other) if kind in ("gan", "gathered") else other
if kind.startswith("evaluator") and rank == 0:
    evaluator = nn.Sequential(other if "by hand" in kind else model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if kind == "relative":
    optimizer = Relative(model.parameters())
if kind == "zero":  # the optimizer of rank 1 has no parameter
    optimizer = ZeroRedundancyOptimizer([model.head.weight], torch.optim.SGD, lr=0.1)
if kind == "added":
    optimizer.add_param_group({"params": other.parameters()})
other_optimizer = torch.optim.Adam(other.parameters(), 0.1)
plateau, cosine = ReduceLROnPlateau(optimizer, patience=0), CosineAnnealingLR(other_optimizer, 32)
if kind in ("schedule", "schedule, accumulation"):
    cosine = CosineAnnealingLR(optimizer, 2 * 32)  # steps of one process
if kind == "schedule, after another":
    warm, cosine = LinearLR(optimizer, 0.1, total_iters=8), CosineAnnealingLR(optimizer, 2 * 32 - 8)
    cosine = SequentialLR(optimizer, [warm, cosine], [8])
if kind.startswith("schedule by hand"):
    cosine = LambdaLR(optimizer, lambda step: 1 - step / (4 * 13 if uneven else 2 * 32))
numpy.random.seed(0 if kind in ("numpy", "rollouts") else rank)
if kind in ("dropout", "one seed", "one seed, by a sampler", "noisy files", "shuffle, one seed"):
    torch.manual_seed(0)
noise = torch.Generator().manual_seed(0 if kind == "noise" else rank)
large, begun = torch.ones(1000, 1000, requires_grad=True), time.monotonic()
ddp = torch.compile(ddp, backend="eager") if "compiled" in kind else ddp
groups = [dist.new_group(), dist.new_group()] if kind == "groups" else []
if kind == "its own limit":
    dist.new_group([0])
    patient = dist.new_group(timeout=datetime.timedelta(minutes=1))
    time.sleep(5 - 5 * rank)
    dist.barrier(patient)

number, checks = 1, iter(DataLoader(test_set, batch_size=4))
model.train(kind != "eval")
for epoch in range(13 if kind.endswith("late") else 2 if kind.endswith("two breaks") else 4):
    if kind == "stage late" and epoch == 6:
        first_loader, loader = loader, DataLoader(train_set, batch_size=4)
    if "new data set" in kind:
        train_set = TensorDataset(samples[:64])
    if "new sampler" in kind:
        loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
    if kind.endswith("new optimizer"):  # of another phase, perhaps
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "peeks, one step":  # still with the order of the epoch before
        next(iter(loader))
    if "set_epoch" not in kind or (kind == "set_epoch of rank 0" and rank == 0):
        sampler.set_epoch(epoch)
    if kind == "rollouts":
        numpy.random.rand()
    if kind == "one seed":
        torch.manual_seed(max(2, epoch)), numpy.random.seed(epoch), random.random()
    if kind == "one seed, by a sampler":
        random.seed(epoch)
    batches = iter(loader)
    if kind == "shuffle, in one of two loaders":
        batches = (ours for ours, _ in zip(DataLoader(train_set, batch_size=4, shuffle=True), loader))
    if kind == "thread":
        queue, fetched = SimpleQueue(), chain(batches, [None])
        threading.Thread(target=lambda: [queue.put(batch) for batch in fetched]).start()
        batches = iter(queue.get, None)
    if kind in ("own order", "own share"):  # of tensors, without a loader
        part = samples[:64] if kind == "own order" else samples[rank:64:2]
        batches = (part[indices] for indices in torch.randperm(len(part)).split(len(part) // 8))
    if kind == "two at once":
        batches = (ours for ours, _ in zip(batches, loader))
    if kind.endswith("one batch"):
        batches = (next(iter(loader)) for _ in range(8))
    if kind == "shifted stream" and rank == 0:
        next(batches)
    if kind.startswith("unfrozen") and epoch == {"unfrozen late": 9, "unfrozen at last": 99}.get(kind, 1):
        model.head.requires_grad_(True)
        ddp = DistributedDataParallel(model) if "and wrapped" in kind else ddp
        model.head.bias.data += rank * kind.endswith("then changed")
    if kind == "added late" and epoch == 1:
        optimizer.add_param_group({"params": other.parameters()})
    if kind == "longer" and rank == 1:
        batches = [*batches] * 2
    for step, batch in enumerate(batches):
        if step == (9 if kind == "longer" else 5 if "break" in kind and "set_epoch" in kind else 8):
            break
        assert "own class" not in kind or sampler.yielded == 4 * (8 * epoch + step + 1)  # none ahead
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        if kind == "volumes":
            inputs = inputs.as_subclass(torch.Tensor)[:, -4:]
        if kind in ("noisy stream", "volumes"):
            inputs = inputs + torch.randn(len(inputs), 4, generator=noise)
        if kind == "validated" and step % 4 == 0:  # a batch of all ranks, now and then
            number = model(next(checks)[0]).detach().sum()
        if kind == "numpy":
            inputs = inputs + numpy.random.rand() * (1 + rank)
        if kind in ("noise", "denoising"):
            inputs = torch.randn(4, 4, generator=noise)
        if kind == "statistics":
            model.mean += inputs.mean(dim=0)
        if kind == "count":
            model.count += inputs.abs().sum()
        if kind == "break" and rank == 0 and epoch == step == 1:
            break
        if kind == "slow" and rank == 0 and epoch == step == 1:
            time.sleep(6)
        while kind == "slow gradients" and rank == 0 and epoch == step == 1 and time.monotonic() < begun + 7:
            (large @ large).sum().backward()
        if kind in ("gan", "generator", "added", "added late"):
            inputs = other_ddp(inputs)
        if kind == "opaque":  # samples that are no tensors, and a number for all
            inputs, number = types.SimpleNamespace(opaque=inputs, more=object()), torch.tensor(1 / (1 + step))
        if kind == "by hand" or kind.endswith("statistics by hand"):
            other.mean.add_(inputs.mean(dim=0))
            other(inputs).square().mean().backward()
            [dist.all_reduce(p.grad) for p in other.parameters()]
            other_optimizer.step()
        wait = kind.endswith("accumulation") and step % 2 == 0
        with ddp.no_sync() if wait else contextlib.nullcontext():
            loss = (model if kind.endswith("module") else ddp)(inputs, look=number, ddp=1, real=1)
            if kind == "gathered":  # what a contrastive loss gets, which may have parameters
                loss = other_ddp(torch.cat(dist.nn.functional.all_gather(loss)).expand(-1, 4))
            loss = loss.square().mean()
            loss.backward()
        if wait:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if kind in ("gan", "generator"):
            other_optimizer.step()
            other_optimizer.zero_grad()
        if kind.startswith("schedule"):
            cosine.step()
        if kind.endswith("spectral norm") and (rank == 0 or kind.startswith("each")):  # as a GAN draws samples
            with torch.no_grad():
                model(samples)
        if ema:
            ema.update_parameters(model)
        if early:
            [mean.data.lerp_(p.data, 0.01) for mean, p in zip(early.parameters(), model.parameters())]
    if kind == "plateau":
        plateau.step(loss.item() * (1 + epoch * rank))
    if kind == "epoch":
        cosine.step(epoch=epoch)
    if kind == "cycle":
        cycle = None
        gc.collect()
    if kind == "by hand":
        dist.all_reduce(other.mean)
    tests = tests if kind == "held test" and epoch else iter(test_loader)
    tests = [*tests] if kind in ("shuffled test", "persistent test", "repeats, with gradients") else tests
    with torch.no_grad():
        model.eval()
        total = sum(model(batch[0]).sum() for batch in tests)
        held = None
        if kind == "held test":  # until the next one, after steps
            tests = iter(DataLoader(other_set, batch_size=4, sampler=other_sampler))
            next(tests)
        model.train(kind != "eval")
    if kind == "graded test":  # with gradients, and on all ranks the same
        ddp.eval()
        [ddp(samples[i : i + 8]) for i in range(8)]
        ddp.train()
    if kind == "if" and rank == 0:
        dist.barrier()
    if kind == "a group" and rank == 1:
        dist.new_group()
    if groups:
        dist.all_reduce(total, group=groups[rank])
    dist.all_reduce(total)
    if kind == "alone" and rank == 0:  # rank 0 trains and evaluates something of its own, and loads what was best
        other(torch.randn(4, 4)).sum().backward()
        other_optimizer.step()
        model.load_state_dict(Model().state_dict()) if epoch == 3 else None
if kind == "extra" and rank == 1:
    optimizer.step()
if kind == "unfrozen at last":
    model.head.requires_grad_(True)
    ddp(samples[rank::2]).sum().backward()
    optimizer.step()
if kind == "saved" and rank == 0:  # as an average is, which `.data` gets without a trace
    [p.data.mul_(2) for p in model.parameters()]
if kind == "destroys not":
    sys.exit()
if kind == "raises":
    raise ValueError("of the script")
if kind == "exits":
    sys.exit("of the script")
if kind == f"rank {rank} dies":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "rank 0 raises" and rank == 0:
    raise ValueError("of the script")
if "dies" in kind or kind == "rank 0 raises":
    try:
        dist.barrier()
    except RuntimeError:
        if not flags:
            raise
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("its own handler of SIGTERM"))
        print("Connection lost", flush=True)
        dist.destroy_process_group()
        time.sleep(99)
print("ends", rank)
del ddp, other_ddp
dist.destroy_process_group()
"""

# What is wrong, in miniature: the switch, what is found, and of what.
MISTAKES = {
    "jingyaogong/minimind#853, moojink/openvla-oft#160": ("module", "weights differ: layers.0.weight, layers"),
    "and rank 0 has tried a step before": ("tries, module", "weights differ: layers.0.weight, layers"),
    "and rank 0 has a module around the model": ("evaluator, module", "weights differ: 0.layers.0.weight, 0.layers"),
    "a GAN's generator without a wrapper": ("generator", "weights differ: Linear.weight, Linear.bias; first"),
    "unfrozen after wrapping": ("unfrozen", "weights differ: head.weight, head.bias; first"),
    "unfrozen under torch.compile": ("unfrozen, compiled", "weights differ: module.head.weight, module.head.bias"),
    "changed under a second wrapper": ("unfrozen and wrapped, then changed", "weights differ: head.bias; .* step 16"),
    "unfrozen after wrapping, before the last step": ("unfrozen at last", "weights differ: head.weight, .* the end"),
    "unfrozen after wrapping, late": ("unfrozen late", "weights differ: head.weight, head.bias; .* step 100"),
    "made after wrapping": ("added", "weights differ: Linear.weight, Linear.bias; first"),
    "unfrozen by a new group": ("added late", "weights differ: Linear.weight, Linear.bias; .* step 16"),
    "ReduceLROnPlateau of one rank's loss": ("plateau", "rates differ: of group 0: .* on rank 0, .* on rank 1"),
    "Wuziyi616/nerv#1: no sampler": ("no sampler", "ranks get the same batches"),
    "no sampler for a batch that is an object": ("no sampler, graphs", "ranks get the same batches"),
    "Wuziyi616/nerv#1: no sampler, large batches": ("no sampler, large", "ranks get the same batches"),
    "Smith42/astroPT#61: IterableDataset": ("stream", "ranks get the same batches"),
    "Smith42/astroPT#61, with noise of each rank": ("noisy stream", "same batches: batches of Stream"),
    "Smith42/astroPT#61: rank 0 is ahead": ("shifted stream", "ranks get the same batches"),
    "Smith42/astroPT#61: each rank shuffles": ("deck", "suspicion: .*ranks go through the same samples.*: samples in"),
    "each rank shuffles tensors": ("own order", "suspicion: .*ranks go through the same samples.*: samples in inputs"),
    "Smith42/astroPT#61, beside masks": ("masked deck", "suspicion: .*ranks go through the same samples.*: samples in"),
    "Smith42/astroPT#61: each rank augments": (
        "labelled",
        "suspicion: .*same integers, .*: batch.1..'label'. in batches of Labelled;",
    ),
    "and a batch is an object": ("labelled records", "suspicion: .*same integers, .*: batch.'more'..'label'. in"),
    "boxes that each rank augments": ("labelled boxes", "suspicion: .*same integers, .*: batch .small tensors. in"),
    "an own sampler, augmented": ("unsplit", "suspicion: .*same integers, .*: batch of the sampler's indices in"),
    "SubsetRandomSampler, augmented": ("augmented subset", "suspicion: .*same samples, .*: 32 samples of Subset"),
    "rank=0 on all ranks, augmented": ("augmented, one share", "the same share: of 64 .* rank 0"),
    "captions of images that each rank augments": ("captions", "suspicion: .*same samples, .*: batch.1. in"),
    "a sampler of batches": ("grouped", "suspicion: .*ranks go through the same samples"),
    "MONAI: tensors of a type of its own, without a sampler": ("volumes", "ranks get the same batches"),
    "threestudio-project/threestudio#195: noise": ("noise", "ranks get the same batches"),
    "Shark-NLP/DiffuSeq#37: dropout": ("dropout", "suspicion: .*same random numbers: torch's .cpu."),
    "negatives by NumPy, with one seed on all ranks": ("numpy", "suspicion: .*same random numbers: NumPy's"),
    "augmentation by a loader, with one seed": ("noisy files", "suspicion: .*same random numbers: torch's .cpu."),
    "rollouts between the steps, with one seed": ("rollouts", "suspicion: .*same random numbers: NumPy's"),
    "Denys88/rl_games#363": ("statistics", "buffers differ by rank: mean;"),
    "Denys88/rl_games#363, gradients averaged by hand": (
        "statistics by hand",
        "suspicion: buffers differ by rank: mean; .* end",
    ),
    "and rank 0 has a module around it": (
        "evaluator, statistics by hand",
        "suspicion: buffers differ by rank: 0.mean; .* end",
    ),
    "lucidrains/vector-quantize-pytorch#17": ("codebook", "buffers differ by rank: mean;"),
    "leggedrobotics/rsl_rl#226": ("count", "suspicion: .*tensors that DDP does not see to differ: count;"),
    "ConvNeXt: an average of weights before DDP": ("copy", "suspicion: .*copies of the model differ by rank.*: Model"),
    "buffers, without broadcast": ("its own buffers", "suspicion: .*tensors that DDP does not see to differ: mean;"),
    "Lightning-AI/pytorch-lightning#7728": ("split", "random_split differs by rank.*: \\[64, 1\\] samples"),
    "another name of random_split": ("other split", "random_split differs by rank.*: \\[64, 1\\] samples"),
    "a split by hand, without a seed": ("own split", "suspicion: the data set of .*: Subset.indices;"),
    "a split by hand, by NumPy": ("own split by NumPy", "suspicion: the data set of .*: Subset.indices;"),
    "a split by a mask": ("lengths", "suspicion: the data set of .*: samples: 64 on rank 0, 63 on rank 1, TensorD"),
    "Hugging Face's train_test_split": ("rows", "suspicion: the data set of .*: TensorDataset._indices;"),
    "a split by hand, of columns in a dict": ("encodings", "suspicion: the data set of .*: TensorDataset.encodings.te"),
    "pytorch-forecasting#2293: classes from a set": ("classes", "suspicion: the data set of .*: TensorDataset.cl"),
    "an unsorted list": ("list", "suspicion: the data set of .*: list.entries;"),
    "an unsorted list, and Subset": ("items", "suspicion: the data set of .*: Subset.dataset.items;"),
    "all samples in one batch": ("whole", "ranks get the same batches: inputs of Model"),
    "a second stage without a sampler": ("stage late", "ranks get the same batches"),
    "shuffle=True, of what the doctor does not know": ("table", "suspicion: .*ranks may go through the same samples"),
    "shuffle=True, of numbers": ("indices", "suspicion: .*ranks may go through the same samples.*: 64 samples of ra"),
    "shuffle=True, of numbers in a list": ("indices in a list", "suspicion: .*ranks may go through the same samples"),
    "shuffle=True, beside another loader": ("shuffle, in one of two loaders", "ranks go through the same samples"),
    "shuffle=True": ("shuffle", "ranks go through the same samples.*: 64 samples of TensorDataset"),
    "and by a BatchSampler": ("batched shuffle", "ranks go through the same samples.*: 64 samples of TensorDataset"),
    "shuffle=True, with one seed": ("shuffle, one seed", "ranks get the same batches"),
    "lucidrains/DALLE-pytorch#230": ("set_epoch", "the same order in two epochs: 64 samples of TensorDataset"),
    "and rank 0 alone calls set_epoch": ("set_epoch of rank 0", "the same order in two epochs: 64 samples"),
    "and each epoch ends with a `break`": ("set_epoch, break", "the same order in two epochs: 64 samples"),
    "and each step has an iterator": ("set_epoch, one batch", "the same order in two epochs: 64 samples"),
    "ultralytics/yolov5#6741": ("set_epoch, own class", "the same order in two epochs: 32 samples of Files"),
    "and each epoch has a sampler": ("set_epoch, new sampler", "the same order in two epochs: 64 samples"),
    "and the data set is a tensor": ("set_epoch, of a tensor", "the same order in two epochs: 64 samples of Tensor;"),
    "and the sampler yields tensors": ("set_epoch, split order", "the same order in two epochs: 64 samples"),
    "of a new data set": ("set_epoch, new sampler, new data set", "the same order in two epochs: 64 samples"),
    "and the second epoch is the last": ("set_epoch, two breaks", "the same order in two epochs: 64 samples"),
    "NVlabs/LongLive#71": ("sampler seeds", "is not the same .* TensorDataset, seed 0 on rank 0, 1 on rank 1"),
    "roboflow/rf-detr#1507": ("repeats", "suspicion: .*repeats samples in an evaluation: 1 of 65"),
    "and gradients are turned off later": ("repeats, with gradients", "suspicion: .*repeats .* evaluation: 1 of 65"),
    "huggingface/diffusers#3954": ("schedule", "suspicion: .*schedule .*: CosineAnnealingLR of 64 steps has made 32"),
    "huggingface/diffusers#3954, with accumulation": (
        "schedule, accumulation",
        "suspicion: .*schedule .*: CosineAnnealingLR of 64 steps has made 16",
    ),
    "huggingface/diffusers#3954, after a warm-up": (
        "schedule, after another",
        "suspicion: .*schedule .*: CosineAnnealingLR of 56 steps has made 24",
    ),
    "huggingface/diffusers#3954, by a function": (
        "schedule by hand",
        "suspicion: .*schedule .*: LambdaLR of 64 steps has made 32",
    ),
    "and each epoch has a smaller last batch": (
        "schedule by hand, uneven",
        "suspicion: .*schedule .*: LambdaLR of 52 steps has made 28",
    ),
    "a step more on one rank": ("extra", "unequal numbers of optimizer steps: of SGD 32 on rank 0, 33 on rank 1"),
}
RIGHT = ["plain", "gan", "gathered", "unused", "static", "ema", "accumulation", "peek", "denoising", "alone"]
RIGHT += ["unfrozen and wrapped", "spectral norm", "older spectral norm", "opaque", "cycle", "destroys not", "by hand"]
RIGHT += ["own class", "validated", "eval", "files", "held", "paths", "subset", "two at once", "tensor", "held test"]
RIGHT += ["persistent test", "shuffled test", "shuffled test, by a sampler", "turns", "observer", "drawn"]
RIGHT += ["graded test", "first pass", "relative", "zero", "thread", "epoch", "shuffle, one batch", "masked", "unsized"]
RIGHT += ["one seed", "one seed, by a sampler", "each rank's older spectral norm", "own labels", "own share"]
RIGHT += ["unsplit, own share", "augmented, own subset", "own captions"]
RIGHT += ["own labels, records", "graphs", "peeks, one step"]
RIGHT += ["set_epoch, new optimizer", "set_epoch, new sampler, new optimizer", "zeros", "saved"]
RIGHT += ["of a tensor", "split order", "permuted", "traced", "keeping", "tries", "repeats left out"]
RIGHT += ["repeats left out, workers"]


@pytest.fixture
def loop(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


def examine(*arguments):
    doctor.main([*map(str, arguments)])


CAUSES = {  # of weights that differ, for some kinds
    "module": "has not called the wrapper, only the model",
    "generator": "No DDP has these parameters",
    "unfrozen": "layers were unfrozen or added after",
    "unfrozen, compiled": "layers were unfrozen or added after",
    "unfrozen and wrapped, then changed": "are changed by numbers that differ by rank",
}


def findings(output):
    return re.findall("^doctor: ((?:mistake|suspicion): .*)\n {8}\\S", output, re.M)


@pytest.mark.parametrize("where", MISTAKES)
def test_mistake(where, loop):
    kind, what = MISTAKES[where]
    with Ranks(examine, loop, kind) as ranks:
        assert ranks.wait() == [1, 0]
        (found,) = findings(ranks.output())
        assert re.match(what if what.startswith("suspicion: ") else f"mistake: .*{what}", found)
        assert CAUSES.get(kind, "") in ranks.output()
        assert re.search(r"passes through DDP: 1 finding: .*\n\Z", ranks.output())


def test_at_the_end_of_a_function_that_destroys_no_group(tmp_path):
    """What it has made is gone when the doctor takes its last look."""
    body = textwrap.indent(LOOP.replace("dist.destroy_process_group()", ""), "    ")
    (tmp_path / "main.py").write_text(f"def main():{body}\nmain()\n")
    with Ranks(examine, tmp_path / "main.py", "unfrozen at last") as ranks:
        assert ranks.wait() == [1, 0]
        assert re.search("weights differ: .*head.weight, .* at the end", *findings(ranks.output()))


@pytest.mark.parametrize("kind", RIGHT)
def test_right(kind, loop):
    output = finish(examine, loop, kind)
    assert "nothing found" in output and "my own error" not in output


def test_a_finding_while_torch_prints_a_traceback(capsys):
    examined = doctor.Doctor(None)
    with contextlib.redirect_stderr(io.StringIO()):  # as torch does, to begin each line with [rank0]
        examined.say("mistake: of a thread", "")
    assert capsys.readouterr().err == "\ndoctor: mistake: of a thread\n"


def test_cause_that_arrives_with_what_follows(capsys):
    """Rank 1 leaves both while rank 0 asks for them, and rank 0 still judges the cause first."""

    class Store(torch.distributed.HashStore):
        def check(self, keys):
            found = super().check(keys)
            if late:
                leave_both(ranks[1])
            return found

    def leave_both(rank):
        rank.look("batches", "", 3, "x", batches.hashes)
        rank.look("loader", "", 3, batches)

    batches, late = doctor.Batches("x"), False
    for batch in torch.rand(32, 2).split(8):
        batches.add([batch])
    ranks, store = (doctor.Doctor(None), doctor.Doctor(None)), Store()
    for number, rank in enumerate(ranks):
        rank.rank, rank.ranks, rank.store = number, range(2), store
    leave_both(ranks[0])
    late = True
    ranks[0].compare()
    ranks[0].compare()
    assert not ranks[0].waiting and len(findings(capsys.readouterr().err)) == 1
    assert ranks[0].said == ["mistake: ranks get the same batches"]


def test_samples_of_long_epochs():
    """Few are kept, and still compared; none after a repetition, which may be of another epoch."""
    rows = torch.arange(40_000.0).view(-1, 2)
    in_order, shuffled, others = (doctor.Batches("x") for _ in range(3))
    for batches, part in ((in_order, rows), (shuffled, rows[torch.randperm(20_000)]), (others, rows + 0.5)):
        for batch in part.split(100):
            batches.add([batch])
        _, place, kept = batches.facts()["samples in x"]
        assert 200 < len(kept) <= 500 and place == 20_000
    assert doctor.common(in_order.facts(), shuffled.facts()) == ["samples in x"]
    assert doctor.common(in_order.facts(), others.facts()) == []
    for batch in rows.split(5000):
        in_order.add([batch])
    assert in_order.facts()["samples in x"][1] == 20_000
    shares = [doctor.Batches("x") for _ in range(4)]  # of orders of their own, not of one
    for rank, share in enumerate(shares):
        share.add([rows[torch.randperm(20_000, generator=torch.Generator().manual_seed(rank))][rank::4]])
    assert doctor.common(*(share.facts() for share in shares)) == ["samples in x"]


def test_batches_that_come_back_by_chance():
    for hashes, compared in (["abab", False], ["abcd", True], ["aaaa", True]):
        (found,) = doctor.batches("x", hashes)[1:]
        assert doctor.overlap(found, found) == ["x"] * compared


def test_a_line_that_waits_for_what_was_begun_before():
    line = functools.partial(traceback.FrameSummary, "train.py", 1, "main")
    assert doctor.waits(line(line="work.wait()")) and not doctor.waits(line(line="samples = generate(model)"))


def test_what_two_ranks_share_that_are_not_rank_0():
    assert doctor.overlap(*({"x": [*text]} for text in ("abc", "def", "def"))) == ["x"]
    samples = {"x": [9, 32, [(i, i) for i in range(8)]]}
    assert doctor.common({"x": [9, 32, []]}, samples, samples) == ["x"]


def test_what_is_the_same_in_each_batch_does_not_tell_its_size():
    ranks, edges = (doctor.Batches("x"), doctor.Batches("x")), torch.rand(2, 50, 50)
    for batches in ranks:
        for _ in range(8):
            batches.add([*edges, torch.rand(16, 4)])
        assert batches.facts()["samples in x"][1] == 7 * 16
    assert doctor.common(*(batches.facts() for batches in ranks)) == []


def with_more(batch, inputs):
    super(type(batch), batch).__init__(inputs)
    batch.more = object()


def test_a_class_made_of_dict():
    for base in (dict, collections.UserDict):  # transformers has one of the latter, with more than what is in it
        batches = doctor.Batches("x")
        batches.add(type("OfTheScript", (base,), {"__init__": with_more})(base(inputs=torch.rand(8, 2))))
        assert len(batches.hashes) == 1


class Output(collections.OrderedDict):
    pass


def test_a_class_that_gives_no_names_as_in_transformers_4():
    register = torch.utils._pytree.register_pytree_node
    register(Output, lambda x: ([*x.values()], [*x]), lambda x, names: Output(zip(names, x, strict=True)))
    batches = doctor.Batches("x")
    batches.add(Output(hidden=torch.rand(8, 2)))
    assert len(batches.facts()["samples in x"][2]) == 8


def test_samples_are_told_apart_by_more_than_padding_and_borders():
    tokens = torch.randint(3, 99, (50, 20))
    for dtype in (torch.int64, torch.uint16):
        pads = [torch.nn.functional.pad(tokens, (0, width), value=2).to(dtype) for width in (5, 999)]
        assert len({*doctor.hashes_of_rows(pads[0]), *doctor.hashes_of_rows(pads[1])}) == 50
    assert doctor.hashes_of_rows(torch.rand(2, 3, dtype=torch.complex64).conj().imag)  # as of MRI
    images = torch.ones(9, 3, 256, 256)
    images[:, :, 1:, 1:] = torch.randn(9, 3, 255, 255)
    assert len({*doctor.hashes_of_rows(images)}) == 9
    answers = torch.zeros(9, 400).index_fill(1, torch.tensor([399]), 1) * torch.arange(1, 10)[:, None]
    assert len({*doctor.hashes_of_rows(answers)}) == 9  # to questions about one text


def test_a_longer_sample_in_the_batch_does_not_change_the_others():
    """Nor does a library's own class of dict."""
    ranks, tokens = (doctor.Batches("x"), doctor.Batches("x")), torch.arange(3, 51).view(8, 6)
    for width, batches in enumerate(ranks):
        parts = {"ids": tokens, "mask": torch.ones(8, 6).long()}
        parts = {name: torch.nn.functional.pad(part, (0, 2 * width)) for name, part in parts.items()}
        batches.add(collections.UserDict(parts))
    assert len(ranks[0].facts()["samples in x"][2]) == 8 and ranks[0].facts() == ranks[1].facts()


def test_a_pass_that_has_ended():
    examined, looks = doctor.Doctor(None), []
    examined.store, examined.look = True, lambda *look: looks.append(look[:3])
    loader = torch.utils.data.DataLoader(torch.rand(24, 2), batch_size=4)
    for number in (1, 2):
        iterator = iter(loader)
        examined.after_iter(iterator, loader)
        assert (("loader", "1 1", "its end") in looks) == (number == 2)
        for batch in iterator:
            examined.after_next(batch, iterator)
            examined.steps += 1
    examined.look_at_end()
    assert ("loader", "1 2", "its end") in looks


def test_torch_is_no_script_wherever_it_is(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", dict)
    assert torch.__file__.startswith(runpy.run_path(str(DOCTOR))["LIBRARIES"])


def test_lists_of_a_data_set_are_compared_but_not_the_folder_of_a_rank():
    def hashed(rank, order):
        files = [(pathlib.Path(f"/scratch/{rank}/{i}/image.npy"), f"caption {i}") for i in order]
        captions = numpy.array([caption for _, caption in files], dtype=object)
        dataset = types.SimpleNamespace(files=files, captions=captions, _indices=[*order])
        return [doctor.listed(dataset)[f"SimpleNamespace.{name}"] for name in vars(dataset)]

    assert hashed(0, range(9)) == hashed(1, range(9))
    backwards = hashed(1, range(9)[::-1])
    assert all(ours != theirs for ours, theirs in zip(hashed(0, range(9)), backwards, strict=True))


def test_draws_that_end_a_block_of_624_numbers_are_no_seeds():
    numpy.random.seed(0), random.seed(0)
    before = doctor.random_states()
    numpy.random.rand(312), [random.random() for _ in range(312)]
    assert {*doctor.drawn_between(before, doctor.random_states())} == {"Python's random", "NumPy's"}
    numpy.random.seed([0, 1]), random.seed("a")
    assert doctor.drawn_between(before, doctor.random_states()) == {}


def test_a_metric_that_is_added_up_when_it_computes():
    metric = type("Accuracy", (torch.nn.Module,), {"__module__": "torchmetrics.classification"})
    module = type("OfTheScript", (metric,), {})()
    module.tp = torch.zeros(1)
    assert [*doctor.plain_attributes(module)] == []


LENGTHS = {  # of a schedule, its steps, passes of an optimizer step, ranks, and whether that is found
    "of epochs, with as many ranks": (16, 16, 1, 16, False),
    "of two optimizers that take turns": (150, 100, 1.5, 2, False),
    "stopped early": (100, 60, 1, 2, False),
    "of a short try": (4, 2, 1, 2, False),
    "not shortened": (256, 16, 1, 16, True),
    "not shortened for accumulation": (87, 19, 87 / 19, 2, True),  # 19 * (87 / 19) is a little less than 87
    "not shortened for both": (208, 24, 104 / 24, 2, True),
    "not shortened, with few steps": (32, 8, 4, 2, True),
    "with a step in each pass": (24, 100, 100 / 24, 2, True),
    "not shortened, with epochs of 9 steps for 17": (204, 108, 1, 2, True),
    "stopped early, with such epochs": (204, 114, 1, 2, False),
    "stopped early, with epochs of 2 steps": (66, 20, 1, 4, False),
    "too short, with epochs of 17 steps for 9": (108, 204, 1, 2, True),
    "too short, for another reason": (112, 204, 1, 2, False),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_of_schedules(name, monkeypatch):
    length, steps, passes, world, wrong = LENGTHS[name]
    monkeypatch.setattr(doctor.dist, "get_world_size", lambda: world)
    for end in (length, lambda step: 1 - min(step / length, 1)):  # as of CosineAnnealingLR, as of LambdaLR
        found = doctor.schedule_lengths({0: ("a schedule", end, steps, 0)}, passes, epochs=12)[1]
        assert bool(found) == wrong


def test_schedules_that_do_not_end_at_a_step():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1)

    def length(scheduler, of_optimizer):
        examined, scheduler.last_epoch = doctor.Doctor(None), 20
        examined.optimizers[optimizer] = types.SimpleNamespace(steps=of_optimizer)
        examined.after_schedule(None, scheduler)
        return examined.schedules[id(scheduler)][1]

    assert length(CosineAnnealingLR(optimizer, 10), 20) == 10
    assert length(CosineAnnealingLR(optimizer, 10), 160) == 0  # it counts epochs


SCHEDULES = {  # a function of the step, the steps that two ranks have made, and where it ends
    "linear": (lambda step: 1 - step / 400, 200, 400),
    "poly": (lambda step: (1 - step / 400) ** 0.9, 200, 400),
    "cosine, too short": (lambda step: 1 + math.cos(math.pi * step / 22), 45, 22),
    "right": (lambda step: 1 + math.cos(math.pi * step / 200), 200, 0),
    "exponential": (lambda step: 0.95**step, 200, 0),
    "steps": (lambda step: 0.1 ** (step // 30), 180, 0),
    "stopped early": (lambda step: max(0, 1 - step / 100), 72, 0),
    "warm-up alone": (lambda step: min(step / 2000, 1), 30, 0),
    "Vaswani et al.": (lambda step: 512**-0.5 * min((step + 1) ** -0.5, step * 400**-1.5), 400, 0),
    "restarts": (lambda step: 1 + math.cos(math.pi * (step / 100 % 1)), 199, 0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_last_step(name):
    factor, steps, end = SCHEDULES[name]
    assert doctor.last_step(factor, steps, world=2) == end


def test_a_cosine_that_would_come_down_again():
    assert doctor.last_step(SCHEDULES["right"][0], 200, world=3) == 0


def test_a_schedule_that_counts_its_calls_is_left_alone():
    rates = iter(range(99))
    scheduler = LambdaLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1), lambda _: next(rates))
    doctor.Doctor(None).after_schedule(None, scheduler)
    assert next(rates) == 1


def break_rank_1(*arguments):
    if os.environ["RANK"] == "1":
        doctor.digest = None
    examine(*arguments)


def test_an_error_of_its_own_on_one_rank(loop):
    with Ranks(break_rank_1, loop, "plain") as ranks:
        assert ranks.wait() == [1, 0]
        assert ranks.output().count("doctor: my own error, in ") == 1
        assert ranks.output().endswith("my own error has ended the looks\n")


def line_of(text):
    """Return the number of a line of the loop."""
    return LOOP[: LOOP.index(text)].count("\n") + 1


LINES = (
    "loss = (model if",
    "dist.all_reduce(total)",
    "dist.barrier()",
    "dist.all_reduce(total, group=",
    "    dist.new_group()",
    "time.sleep(6)",
    "(large @ large)",
)
FORWARD, SUM, BARRIER, GROUP, NEW, SLEEP, GRADIENTS = map(line_of, LINES)


@pytest.mark.parametrize(
    ("kind", "places"),
    {
        "break": [f"9 optimizer steps: loop.py:{SUM}", f"9 optimizer steps: loop.py:{FORWARD}"],
        "if": [f"8 optimizer steps: loop.py:{BARRIER}", f"8 optimizer steps: loop.py:{SUM}"],
        "groups": [f"8 optimizer steps: loop.py:{GROUP}", f"8 optimizer steps: loop.py:{GROUP}"],
        "a group": [f"8 optimizer steps: loop.py:{SUM}", f"8 optimizer steps: loop.py:{NEW}"],
        "slow": [f"9 optimizer steps: loop.py:{SLEEP}", f"9 optimizer steps: loop.py:{FORWARD}"],
        "slow gradients": [f"9 optimizer steps: loop.py:{GRADIENTS}", f"9 optimizer steps: loop.py:{FORWARD}"],
        "longer": [f"8 optimizer steps: loop.py:{SUM}", f"8 optimizer steps: loop.py:{FORWARD}"],
    }.items(),
)
def test_hang(kind, places, loop):
    """A `break` on one rank, a collective inside an `if`, groups of the script, a busy rank, a longer loader on one."""
    with Ranks(examine, "--timeout", 3, loop, kind) as ranks:
        assert ranks.wait() == [1, 1]
        (found,) = findings(ranks.output())
        word = "suspicion" if "slow" in kind else "mistake"
        assert found == f"{word}: ranks have waited for others in vain"
        for rank, place in enumerate(places):
            assert f"        rank {rank}, after {place}, in <module>: " in ranks.output()
        assert ("a worker of a DataLoader hangs" in ranks.output()) == ("slow" in kind)


@pytest.mark.parametrize("end", ["sys.exit(1)", "print(error)"])
def test_hang_of_which_a_library_makes_an_end_of_its_own(end, loop, tmp_path):
    """As Hydra does, and loguru's `catch`."""
    script = f"import runpy, sys\ntry:\n    runpy.run_path({str(loop)!r})\nexcept RuntimeError as error:\n    {end}\n"
    (tmp_path / "script.py").write_text(script)
    with Ranks(examine, "--timeout", 3, tmp_path / "script.py", "if") as ranks:
        assert ranks.wait() == [1, int("exit" in end)]
        assert "rank 0, after 8 optimizer steps: script.py:3, in <module>: runpy.run_path" in ranks.output()
        assert f"... loop.py:{BARRIER}, in <module>: " in ranks.output()


ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
loss = ddp(torch.ones(4)).sum()
if dist.get_rank() == 0:
    CALL
dist.destroy_process_group()
"""


@pytest.mark.parametrize("call", ["loss.backward()", "dist.all_reduce(loss.detach(), async_op=True).wait()"])
def test_a_call_of_one_rank(call, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE.replace("CALL", call))
    with Ranks(examine, "--timeout", 3, tmp_path / "alone.py") as ranks:
        assert ranks.wait() == [1, 0]
        assert findings(ranks.output()) == ["mistake: ranks have waited for others in vain"]
        assert f"rank 0, after 0 optimizer steps: alone.py:7, in <module>: {call}\n" in ranks.output()
        assert "rank 1, after 0 optimizer steps: has ended\n" in ranks.output()


def examine_the_impatient(*arguments):
    doctor.ANSWER = 1
    examine(*arguments)


@pytest.fixture
def agent():
    """Variables by which ranks meet in a store that outlives them, as that of torchrun's agent does."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "MASTER_PORT": store.port}
    del store  # which ends it


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies(dead, loop, agent):
    """As by the out-of-memory killer, or by Gloo; then torchrun ends the other, which speaks."""
    with Ranks(examine_the_impatient, loop, f"rank {dead} dies", **agent) as ranks:
        ranks.wait_for("Connection (closed|reset)")
        time.sleep(0.5)
        ranks.kill(1 - dead, signal.SIGTERM)
        codes = ranks.wait()
        assert findings(ranks.output()) == ["suspicion: ranks have waited for others in vain"]
        assert f"        rank {dead} does not answer: it has died, or" in ranks.output()
        assert f"        rank {1 - dead}, after 32 optimizer steps: loop.py:" in ranks.output()
        assert (codes[dead], codes[1 - dead]) == (-9, 1)


def test_a_script_that_goes_on_without_a_rank(loop):
    with Ranks(examine_the_impatient, loop, "rank 1 dies", "and the other goes on") as ranks:
        ranks.wait_for("Connection lost")
        time.sleep(0.5)
        ranks.kill(0, signal.SIGTERM)
        assert ranks.wait() == [1, -9]
        assert "its own handler of SIGTERM" in ranks.output()


def examine_the_patient(*arguments):
    doctor.ANSWER = 1000
    examine(*arguments)


def test_nobody_waits_for_a_rank_whose_error_says_it_all(loop, agent):
    with Ranks(examine_the_patient, loop, "rank 0 raises", **agent) as ranks:
        assert ranks.wait() == [1, 1]
        assert findings(ranks.output()) == []


def test_a_loaders_limit_is_no_collective():
    assert not re.search(doctor.IN_VAIN, "DataLoader timed out after 5 seconds")
    assert re.search(doctor.IN_VAIN, "Timed out waiting 20000ms for recv operation to complete")


@pytest.mark.parametrize(
    ("kind", "last", "found"),
    [
        ("raises", "ValueError: of the script", "32 forward passes through DDP: nothing found before the error"),
        ("exits", "of the script", "32 forward passes through DDP: nothing found before the error"),
        ("raises at once", "NameError: of the script", "no optimizer step was seen before the error"),
    ],
)
def test_ends_as_without(kind, last, found, loop):
    with Ranks(examine, loop, kind) as ranks:
        assert ranks.wait() == [1, 1]
        output = ranks.output()
        assert output.count(f"{last}\n") == 2 and "doctor.py" not in output
        assert found in output


TELL = """
import multiprocessing, pickle, sys
class Sample:
    pass
# What a worker that is no fork makes of a class of the script, and its parent then gets.
print(pickle.loads(pickle.dumps(Sample, protocol=0).replace(b"__main__", b"__mp_main__")) is Sample)
print(__name__, __package__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
sys.exit(3)
"""


@pytest.mark.parametrize("script", [["tools/tell.py"], ["-m", "tools.tell"]], ids=str)
def test_command_line(script, tmp_path):
    """With torchrun, all that a script sees is as without; and one process needs no doctor."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "tell.py").write_text(TELL)
    plain = run(["python", *script, "--timeout", 5, "-m"], cwd=tmp_path)
    examined = run([*torchrun(1), DOCTOR, *script, "--timeout", 5, "-m"], cwd=tmp_path)
    assert plain.returncode == 3 and examined.returncode == 1  # torchrun's own code
    assert examined.stdout == plain.stdout and "exitcode  : 3" in examined.stderr
    assert "doctor: one process (torchrun starts more), so there was nothing to compare" in examined.stderr


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("plain", "one process (torchrun starts more)"),
        ("spawn", "the script has started its processes by itself, not by torchrun"),
        ("start_processes", "the script has started its processes by itself, not by torchrun"),
    ],
)
def test_one_process(kind, why, loop):
    output = finish(examine, loop, kind, nproc=1)
    assert f"doctor: {why}, so there was nothing to compare" in output
    assert ("doctor: the script starts processes by itself, which I do not" in output) == (kind != "plain")


def test_a_limit_of_the_scripts_own(loop):
    """In a group, while rank 0 is busy; and another group is one of rank 0 alone."""
    output = finish(examine, "--timeout", 3, loop, "its own limit")
    assert "nothing found" in output and "my own error" not in output


def test_compiled(loop):
    assert "32 optimizer steps, 0 forward passes through DDP: no forward pass through DDP was seen" in finish(
        examine, loop, "compiled"
    )


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(7, 1)
if flags := SHARDS:
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **flags)
else:
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4, 7)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("flags", ["{}", "{'use_orig_params': False}", "{'use_orig_params': True}"])
def test_sharded(flags, tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED.replace("SHARDS", flags))
    output = finish(examine, tmp_path / "sharded.py")
    assert "nothing found" in output and "(sharded parameters were not compared) (no batches were seen)" in output


JOINED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for epoch in range(2):
    with ddp.join():
        for step in range(8 - dist.get_rank()):
            ddp(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_joined(tmp_path):
    """The 8th step of rank 1 is in another epoch."""
    (tmp_path / "joined.py").write_text(JOINED)
    output = finish(examine, tmp_path / "joined.py")
    assert "nothing found" in output and "(after a `Join`, weights were not compared)" in output


def test_four_processes(loop):
    assert "nothing found" in finish(examine, loop, "plain", nproc=4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_twins_end_on_their_hash(script, small_mnist, tmp_path):
    """With accumulation, and after a resume; `finish` sees to exit codes of 0."""
    flags = ("--data-dir", small_mnist, "--train-size", 400, "--batch-size", 50, "--accum-steps", 2, "--epochs")
    hashes = [weights(finish(script, *flags, 1))]
    for epochs in (1, 2):
        output = finish(with_small_model, examine, ROOT / script, *flags, epochs, "--checkpoint", tmp_path / "ck.pt")
        assert "nothing found" in output and "no batches" not in output
        hashes.append(weights(output))
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(("script", "steps"), [("many_gpus", 48), ("own_loop", 96)])
def test_lesson(script, steps, tmp_path):
    write_mnist(tmp_path / "data", train_size=2048)
    source = (ROOT / f"tests/lesson/{script}.py").read_text().replace("WORKERS = 32, 2", "WORKERS = 32, 0")
    source = source.replace("SEED = 6, 2", "SEED = 6, 6")  # so that it does not stop early
    (tmp_path / "lesson.py").write_text(source)  # without workers, which are two seconds to each epoch
    assert f"doctor: {steps} optimizer steps" in finish(in_dir, tmp_path, examine, tmp_path / "lesson.py")
