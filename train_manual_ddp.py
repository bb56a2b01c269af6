"""Train ResNet18 on MNIST, data-parallel, with gradient averaging written by hand.

    python train_manual_ddp.py                                      # one process
    torchrun --standalone --nproc_per_node=2 train_manual_ddp.py    # two; --nproc_per_node=gpu: one per GPU
    ... train_manual_ddp.py --sync flat                             # another way to average

This is train_ddp.py with torch's DistributedSampler and DistributedDataParallel replaced by
the two classes below, `ManualDistributedSampler` and `GradientAverager`. Their diff is the
lesson; with two processes on CPUs, both end on the same bits.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from tqdm import tqdm

TRAIN_IMAGES, TEST_IMAGES, CLASSES = 60_000, 10_000, 10
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, scaled to [0, 1]
WARMUP = 0.3  # the part of the training in which the learning rate rises


def parse_args():
    """Return the flags. A mistake ends the process with a line that names it, and exit code 2."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=3, metavar="N", help="0 sets up, evaluates and exits")
    add("--batch-size", type=int, default=128, metavar="N", help="samples per process and forward pass")
    add("--accum-steps", type=int, default=1, metavar="N", help="forward passes per optimizer step")
    add("--lr", type=float, default=3e-3, metavar="X", help="peak learning rate")
    add("--scale-lr", action="store_true", help="multiply --lr by global batch / 256 (Goyal et al., 2017)")
    add("--clip-grad-norm", type=float, default=0, metavar="X", help="limit of the gradient's norm; 0 is off")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast")
    add("--sync", choices=("bucketed", "flat", "per-parameter"), default="bucketed", help="how to average gradients")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--dataset", choices=("mnist", "synthetic"), default="mnist", help="synthetic needs no files")
    add("--data-dir", type=Path, default="data", metavar="DIR", help="holds MNIST/raw, or will after a download")
    add("--train-size", type=int, metavar="N", help="only the first N training images; None is all")
    add("--seed", type=int, default=0, metavar="N", help="of weights, order and synthetic images")
    add("--deterministic", action="store_true", help="the same bits on every run, on GPUs too")
    add("--backend", metavar="NAME", help="of torch.distributed; None is nccl on GPUs, gloo on CPUs")
    add("--timeout", type=float, default=300, metavar="S", help="seconds that a collective may wait")
    add("--log-interval", type=int, default=20, metavar="N", help="optimizer steps between reports")
    add("--metrics", type=Path, metavar="FILE", help="append one JSON object per epoch, and one at the end")
    add("--profile", type=Path, metavar="DIR", help="trace steps 6 to 8 into a file per rank, for ui.perfetto.dev")
    add("--checkpoint", type=Path, metavar="FILE", help="save to FILE, and go on from it if it is there")
    add("--save-every", type=int, default=0, metavar="N", help="save every N steps too, not only after each epoch")
    args = parser.parse_args()
    for name, value in vars(args).items():
        may_be_zero = name in ("epochs", "clip_grad_norm", "seed", "save_every")
        if type(value) in (int, float) and not (value > 0 or (value == 0 and may_be_zero)):
            parser.error(f"--{name.replace('_', '-')} {value}: it has to be {'0 or ' * may_be_zero}positive")
    if args.save_every and not args.checkpoint:
        parser.error("--save-every needs --checkpoint FILE")
    return args


def setup(args):
    """Join the process group. Return rank, local rank (the number on this node: its GPU), world size and device."""
    # torchrun sets these. Without it, the defaults make a world of one process; port 0 is any free one.
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= defaults | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | os.environ
    rank, local_rank, world_size, local_world_size = (int(os.environ[name]) for name in defaults)

    device = torch.accelerator.current_accelerator(check_available=True)
    if device and device.type != "mps":  # Apple's GPUs have no backend: there, train on the CPU
        if local_world_size > (gpus := torch.accelerator.device_count()):
            sys.exit(f"{local_world_size} processes on this node, but {gpus} GPUs: lower --nproc_per_node")
        device = torch.device(device.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    else:
        device = torch.device("cpu")
        # torchrun gives each process one thread, and cores idle: share them. Any other number is the user's choice, and
        # under Slurm the batch script's.
        if local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1" and "SLURM_JOB_ID" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, cores // local_world_size))
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has to be told as well
        torch.use_deterministic_algorithms(True)

    if dist.is_torchelastic_launched() and sys.platform == "linux":
        # Die with torchrun (1 is PR_SET_PDEATHSIG): an orphan would write over the checkpoint of the next run.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    timeout = timedelta(seconds=args.timeout)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # keys and values, at MASTER_ADDR:MASTER_PORT
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # After a restart, it still holds the addresses of the dead: take new keys. (Several nodes count differently.)
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = args.backend or dist.get_default_backend_for_device(device)
    bound = None if device.type == "cpu" else device  # or NCCL would guess which GPU is whose
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
    place = f"{socket.gethostname()}, {device}, {torch.get_num_threads()} CPU threads"
    sys.stderr.write(f"rank {rank} of {world_size} on {place}, {backend}, torch {torch.__version__}\n")
    return rank, local_rank, world_size, device


def read_mnist(folder):
    """Return MNIST's training and test set, each images, uint8, (N, 28, 28), and labels, int64, (N,)."""
    socket.setdefaulttimeout(5)  # seconds: a firewall may drop packets without a word
    try:
        sets = [MNIST(folder, train, download=True) for train in (True, False)]
    except Exception as error:  # a damaged file makes torchvision raise nearly anything
        advice = "put the four .gz files there, or use --dataset synthetic; delete damaged files"
        sys.exit(f"no usable MNIST in {folder}/MNIST/raw: {advice}. {error!r}")
    return [(part.data, part.targets) for part in sets]


def synthesize(seed, split, size):
    """Return images, uint8, (size, 28, 28), and labels, int64, (size,): ten faint prototypes under noise."""
    prototypes = np.random.default_rng(seed).standard_normal((CLASSES, 7, 7), dtype=np.float32)
    prototypes = 128 + 20 * prototypes.repeat(4, axis=1).repeat(4, axis=2)
    rng = np.random.default_rng([seed, split])
    labels = rng.integers(CLASSES, size=size)
    images = prototypes[labels] + 64 * rng.standard_normal((size, 28, 28), dtype=np.float32)
    return images.clip(0, 255).astype(np.uint8), labels


def load_data(args, rank, local_rank, device):
    """Return the training and the test set: normalized images, float32, (1, 28, 28), and labels, int64, on `device`."""
    sets, datasets = None, []
    if args.dataset == "synthetic":
        sets = synthesize(args.seed, 0, TRAIN_IMAGES), synthesize(args.seed, 1, TEST_IMAGES)
    # In three rounds, rank 0, then local rank 0 of each node, then all: so no file is downloaded twice.
    for my_turn in (rank == 0, local_rank == 0, True):
        if my_turn and not sets:
            sets = read_mnist(args.data_dir)
        dist.barrier()
    for (images, labels), size in zip(sets, (args.train_size, None), strict=True):
        images = torch.as_tensor(images[:size], device=device).unsqueeze(1) / 255
        labels = torch.as_tensor(labels[:size], device=device)
        datasets.append(TensorDataset((images - PIXEL_MEAN) / PIXEL_STD, labels))
    return datasets


class ManualDistributedSampler:
    """Deal the indices of a data set out to the ranks: rank r of W takes every W-th of one shuffled order.

    As in torch.utils.data.DistributedSampler with drop_last=True, the last few, fewer than W, are left out.
    """

    def __init__(self, dataset, num_replicas, rank, seed=0):
        self.size, self.num_replicas, self.rank = len(dataset), num_replicas, rank
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        """Choose the order of `epoch`, the same on every rank."""
        self.epoch = epoch

    def __len__(self):
        return self.size // self.num_replicas

    def __iter__(self):
        # Were the ranks to shuffle differently, some samples would be used twice and others never.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        return iter(order[self.rank : len(self) * self.num_replicas : self.num_replicas])


def load_batches(dataset, indices, device, args):
    """Yield the samples with these indices in batches: images, (B, 1, 28, 28), and labels, (B,), on `device`."""
    batches = BatchSampler(indices, args.batch_size, drop_last=False)
    # Without one of its own, a loader draws from the model's generator. This seed differs by rank and epoch.
    generator = torch.Generator().manual_seed(torch.initial_seed())
    # Here dataset[indices] is a whole batch. For single samples, see "Your own model and data" in the README.
    for images, labels in DataLoader(dataset, sampler=batches, batch_size=None, generator=generator):
        yield images.to(device), labels.to(device)


def build_model():
    """Return torchvision's ResNet18 from images, float32, (B, 1, 28, 28), to logits, float32, (B, CLASSES)."""
    model = resnet18(num_classes=CLASSES)
    model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def lr_factor(progress):
    """Return the part of the peak learning rate at `progress`, 0 to 1: linear warm-up, then a cosine to zero."""
    if progress < WARMUP:
        return progress / WARMUP
    return (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


stop_signals = []  # those that have reached this process: at the next report, all ranks save and stop


def on_signal(number, frame):
    stop_signals.append(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from now on, Ctrl-C ends the process at once


def save_checkpoint(args, model, optimizer, place):
    """Replace the file of --checkpoint, on rank 0: it is whole at any moment, the old one or the new one."""
    if dist.get_rank() != 0 or not args.checkpoint or not all(t.isfinite().all() for t in model.state_dict().values()):
        return  # never replace a checkpoint by one that is not finite
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "place": place}
    state["args"] = {name: str(value) for name, value in vars(args).items()}
    temporary = f"{args.checkpoint}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # all of it is on the disk before it gets the name
    os.replace(temporary, args.checkpoint)


def load_checkpoint(args, model, optimizer):
    """Load what was saved last and return its place: epochs done, samples used of the next, and their mean loss."""
    box = [None]
    if dist.get_rank() == 0 and args.checkpoint:
        if not os.access(args.checkpoint.parent, os.W_OK):  # better to learn it now than after an epoch
            sys.exit(f"--checkpoint {args.checkpoint}: cannot write to the folder {args.checkpoint.parent}")
        try:
            box = [torch.load(args.checkpoint, map_location="cpu")] if args.checkpoint.exists() else [None]
        except Exception as error:  # a damaged file makes torch.load raise nearly anything
            sys.exit(f"--checkpoint {args.checkpoint} is damaged: delete it, or give another name. {error!r}")
    dist.broadcast_object_list(box, src=0)  # other nodes may not see the file
    if not (state := box[0]):
        return 0, 0, 0.0
    for name in ("seed", "dataset", "train_size"):  # with another, the place means nothing
        if state["args"][name] != str(getattr(args, name)):
            flag = f"--{name.replace('_', '-')} {state['args'][name]}"
            sys.exit(f"--checkpoint {args.checkpoint} is of a run with {flag}: use that, or give another name")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["place"]


class GradientAverager:
    """Give every rank the average of all ranks' gradients: DistributedDataParallel, by hand.

        averager = GradientAverager(model)     # every rank takes rank 0's parameters and buffers
        with averager.no_sync():
            loss(model, batch).backward()      # gradients add up on this rank
        loss(model, last_batch).backward()     # "bucketed" averages them meanwhile,
        averager.average()                     # and now each p.grad is the average

    `sync` is "per-parameter", an all-reduce for each gradient; "flat", one for all; or "bucketed", one for each of a
    few buckets, while backward() goes on (Li et al., VLDB 2020, arXiv:2006.15704); then, a backward() that lacks its
    no_sync() raises RuntimeError. Gradients are dense; where no rank has one, all get zeros.
    """

    def __init__(self, model, sync="bucketed"):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.accumulating = False
        self.buckets = []  # flat tensors, in the order in which they are sent
        self.missing = []  # of each bucket, the parameters whose gradients are not in it yet
        self.works = []  # the all-reduces of the first len(works) buckets, which are under way
        self.bucket_of, self.view_of = {}, {}  # of each parameter, the number of its bucket, and its part of that
        if sync != "per-parameter":
            self._fill_buckets(first=2**20 if sync == "bucketed" else math.inf)
        if sync == "bucketed":
            for p in self.params:
                p.register_post_accumulate_grad_hook(self._on_gradient)

    def _fill_buckets(self, first, others=25 * 2**20):
        # A bucket is full at so many bytes. A small first one gives the network something to do early.
        params, size = [], 0
        for p in reversed(self.params):  # backward() begins with the last layer
            if params and (size >= (others if self.buckets else first) or p.dtype != params[0].dtype):
                self._add_bucket(params)
                params, size = [], 0
            params.append(p)
            size += p.numel() * p.element_size()
        if params:
            self._add_bucket(params)

    def _add_bucket(self, params):
        bucket = params[0].detach().new_zeros(sum(p.numel() for p in params))
        for p, part in zip(params, bucket.split([p.numel() for p in params]), strict=True):
            self.bucket_of[p] = len(self.buckets)
            self.view_of[p] = part.as_strided(p.size(), p.stride())  # laid out in memory as p is
        self.buckets.append(bucket)
        self.missing.append(set(params))

    @contextlib.contextmanager
    def no_sync(self):
        """Let backward() add gradients up on this rank, and send nothing."""
        self.accumulating = True
        yield
        self.accumulating = False

    def _on_gradient(self, p):
        # Autograd calls this in the middle of backward(), as soon as p.grad is complete.
        if not self.accumulating:
            if p not in self.missing[self.bucket_of[p]]:
                raise RuntimeError("a second backward() before average(): put all but the last under no_sync()")
            self._collect(p)
            self._send_full_buckets()

    def _collect(self, p):
        view = self.view_of[p]
        # Dividing before the sum, as DDP does: a sum of half-precision gradients might overflow.
        p.grad = view.zero_() if p.grad is None else torch.div(p.grad, dist.get_world_size(), out=view)
        self.missing[self.bucket_of[p]].remove(p)

    def _send_full_buckets(self):
        # In order, though a later one may be full: all ranks have to send the same ones in the same order.
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self.works.append(dist.all_reduce(self.buckets[len(self.works)], async_op=True))

    @record_function("average")
    def average(self):
        """Average the gradients. Collective: every rank calls it, once for each optimizer step."""
        if not self.buckets:  # "per-parameter"
            for p in self.params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
                dist.all_reduce(p.grad)
        for p in set().union(*self.missing):  # those that backward() has not reached; if "flat", all
            self._collect(p)
        self._send_full_buckets()
        for work in self.works:
            work.wait()
        self.works = []  # and all gradients are missing again
        for p, bucket in self.bucket_of.items():
            self.missing[bucket].add(p)


def train_step(model, averager, optimizer, batches, args):
    """Take one optimizer step over `accum_steps` batches. Return this rank's mean loss, a float32 on its device."""
    mean_loss = 0
    for i, (images, labels) in enumerate(batches, 1):
        # The last backward() of a step sends gradients to the other ranks; before, they only add up on this one.
        with contextlib.nullcontext() if i == args.accum_steps else averager.no_sync():
            with torch.autocast(images.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels) / args.accum_steps
            with record_function("backward"):
                loss.backward()
        mean_loss += loss.detach()
    averager.average()
    if args.clip_grad_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss


@torch.no_grad()
def evaluate(model, test_set, device, args):
    """Return the --metrics of the test set. `model` is the bare module, as ranks may differ in number of batches."""
    # Each image counts once. A DistributedSampler would give some to two ranks, so that all have equally many.
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    for buffer in model.buffers():  # BatchNorm's running statistics: each rank has seen other images
        dist.broadcast(buffer, src=0)
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in load_batches(test_set, share, device, args):
        logits = model(images)
        totals[0] += F.cross_entropy(logits, labels, reduction="none").double().sum()
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    if not math.isfinite(loss):
        sys.exit(f"the test loss is {loss / count}: try a lower --lr, or --clip-grad-norm 1")
    return {"test_loss": loss / count, "test_accuracy": correct / count, "test_samples": int(count)}


def weights_sha256(model):
    """Return the SHA-256 of a bare module's state, parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main():
    args = parse_args()
    rank, local_rank, world_size, device = setup(args)

    def say(line, file=sys.stderr):
        if rank == 0:
            print(line, file=file, flush=True)

    # Rank 0 writes, else every rank would write each line. (A missing folder ends the run here, not after an epoch.)
    metrics = (args.metrics if args.metrics and rank == 0 else Path(os.devnull)).open("a", buffering=1)

    train_set, test_set = load_data(args, rank, local_rank, device)
    global_batch = world_size * args.batch_size * args.accum_steps  # samples of one optimizer step
    steps = len(train_set) // global_batch
    if not steps:
        sys.exit(f"a step takes {global_batch} samples, but there are {len(train_set)}: lower --batch-size")
    say(f"global batch {global_batch} = {world_size} processes x {args.batch_size} samples x {args.accum_steps} passes")
    sampler = ManualDistributedSampler(train_set, world_size, rank, args.seed)  # every W-th of one order

    torch.manual_seed(args.seed)
    model = build_model().to(device)
    if args.compile:
        model.compile()
    peak_lr = args.lr * (global_batch / 256 if args.scale_lr else 1)
    # The default second beta, 0.999, averages over a thousand steps, as many as the whole run has.
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.99), fused=True)
    epoch, samples, mean_loss = load_checkpoint(args, model, optimizer)
    done = min(steps, math.ceil(samples / global_batch))  # of this epoch; rounded up if the global batch has changed
    if epoch or done:
        say(f"going on from {args.checkpoint} after {epoch} epochs and {done} of {steps} steps")
    # All ranks take the weights of rank 0. From then on they stay equal, as each step averages the gradients.
    averager = GradientAverager(model, args.sync)

    profiler = None
    if args.profile:
        write = tensorboard_trace_handler(args.profile, f"rank{rank}", use_gzip=True)
        profiler = profile(schedule=schedule(wait=4, warmup=1, active=3, repeat=1), on_trace_ready=write)
        profiler.start()
    if args.checkpoint:  # else there is nothing to save, and a signal ends the process (Slurm's script sends USR1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, on_signal)
    start = time.perf_counter()
    start_step = epoch * steps + done
    test_line = "test loss {test_loss:.4f}  accuracy {test_accuracy:.2%} of {test_samples:,} test images"
    if epoch >= args.epochs:
        say(test_line.format(**evaluate(model, test_set, device, args)), sys.stdout)

    while epoch < args.epochs:
        model.train()
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        batches = load_batches(train_set, list(sampler)[done * global_batch // world_size :], device, args)
        first = done  # steps that an earlier run has taken
        loss_sum = mean_loss * done
        report = torch.zeros(2, dtype=torch.float64, device=device)
        epoch_start = last_report = time.perf_counter()
        # On a terminal, a bar; in a file, where that is one endless line, a line for each report.
        bar = tqdm(total=steps, initial=done, unit="step", leave=False, disable=None if rank == 0 else True)
        for step in range(done + 1, steps + 1):
            # Progress at mid-step, so that neither the first step nor the last has a rate of zero.
            lr = peak_lr * lr_factor((epoch * steps + step - 0.5) / (args.epochs * steps))
            for group in optimizer.param_groups:
                group["lr"] = lr
            # What a model draws at random (dropout) differs by rank, and is the same after a restart.
            torch.manual_seed(hash((args.seed, epoch, step, rank)))
            loss = train_step(model, averager, optimizer, itertools.islice(batches, args.accum_steps), args)
            report[0] += loss / world_size
            bar.update()
            if profiler:
                profiler.step()
            save_now = args.save_every and (epoch * steps + step) % args.save_every == 0
            if step % args.log_interval and step < steps and not save_now:
                continue  # all ranks alike, else some would wait in the all-reduce below for ever

            # A report: one all-reduce tells every rank the loss of all, and whether any was asked to stop.
            report[1] = len(stop_signals)
            dist.all_reduce(report)
            loss, stop = report.tolist()  # loss: the mean over the ranks, summed over the steps since the last report
            report.zero_()
            if not math.isfinite(loss):
                sys.exit(f"loss {loss} in epoch {epoch + 1}, step {step}: try a lower --lr, or --clip-grad-norm 1")
            new = step - done  # steps since the last report
            done = step
            loss_sum += loss
            if save_now or stop:
                save_checkpoint(args, model, optimizer, (epoch, done * global_batch, loss_sum / done))
            speed = new * global_batch / (time.perf_counter() - last_report)
            last_report = time.perf_counter()
            status = f"lr {lr:.2e}  loss {loss / new:.4f}  {speed:,.0f} samples/s"
            bar.set_postfix_str(status)
            if bar.disable:
                say(f"epoch {epoch + 1}/{args.epochs}  step {step}/{steps}  {status}")
            if stop:
                return say(f"stopped by a signal, saved to {args.checkpoint}: the same command goes on from there")
        bar.close()

        result = {
            "epoch": epoch + 1,
            "step": (epoch + 1) * steps,
            "lr": optimizer.param_groups[0]["lr"],
            "train_loss": loss_sum / done,
            "samples_per_second": (done - first) * global_batch / (time.perf_counter() - epoch_start),
        }
        result |= evaluate(model, test_set, device, args)
        print(json.dumps(result), file=metrics)
        line = "epoch {epoch}  train loss {train_loss:.4f}  {samples_per_second:,.0f} samples/s  " + test_line
        say(line.format(**result), sys.stdout)
        epoch, done, mean_loss = epoch + 1, 0, 0.0
        save_checkpoint(args, model, optimizer, (epoch, done, mean_loss))

    seconds = time.perf_counter() - start
    hashes = [None] * world_size
    dist.all_gather_object(hashes, weights_sha256(model))
    if len(set(hashes)) > 1:
        sys.exit(f"the ranks have ended on different weights: {', '.join(sha256[:8] for sha256 in hashes)}")
    say(f"weights sha256 {hashes[0]}, the same on every rank", sys.stdout)
    result = {"weights_sha256": hashes[0], "world_size": world_size, "global_batch_size": global_batch}
    result |= {"seconds": seconds, "samples_per_second": (epoch * steps - start_step) * global_batch / seconds}
    print(json.dumps(result), file=metrics)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
