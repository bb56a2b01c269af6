"""Train ResNet18 on MNIST, data-parallel, with torch's DistributedDataParallel.

    python train_ddp.py                                       # one process
    torchrun --standalone --nproc_per_node=2 train_ddp.py     # two; --nproc_per_node=gpu: one per GPU
    ... train_ddp.py --dataset synthetic                      # without a download
    ... train_ddp.py --checkpoint ck.pt                       # goes on from ck.pt, if it is there
    ... train_ddp.py --help                                   # every flag

Each process (a rank) holds the whole model and trains on its own part of every batch. The
ranks average their gradients, so all take the same optimizer step and stay equal. NCCL
carries the gradients between GPUs, Gloo between CPUs.

train_manual_ddp.py is this script with DistributedSampler and DistributedDataParallel
written out by hand. Their diff is the lesson; with two processes both end on the same bits.

To train your own model on your own data, change `build_model` and `load_data` (and the sizes below).
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from datetime import timedelta
from pathlib import Path

PARENT = os.getppid()  # torchrun, if it started this process
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
received = []  # when these have reached this process, by time.monotonic()


def on_signal(number, frame):
    """Remember that this process was asked to stop: `train_epoch` does it, together with all ranks."""
    received.append(time.monotonic())
    if number == signal.SIGINT:  # whoever presses Ctrl-C twice means it; torchrun passes the second on as SIGTERM
        for stop in STOP_SIGNALS:
            signal.signal(stop, signal.SIG_DFL)


if __name__ == "__main__":  # up here, for the imports below take seconds
    for stop in STOP_SIGNALS:
        signal.signal(stop, on_signal)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from tqdm import tqdm

TRAIN_IMAGES, TEST_IMAGES, CLASSES = 60_000, 10_000, 10
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, scaled to [0, 1]
WARMUP = 0.3  # the part of the training in which the learning rate rises
LOCK_WAIT = 20  # seconds: more than the ranks of a torchrun that was killed go on
PROFILE_AFTER, PROFILED = 5, 3  # steps: the first ones are slow, they allocate memory

TRAIN_RESULT = "epoch {epoch}  train loss {train_loss:.4f}  {samples_per_second:,.0f} samples/s  "
TEST_RESULT = "test loss {test_loss:.4f}  accuracy {test_accuracy:.2%} of {test_samples:,} test images"


def number(name, kind, minimum):
    """Return an argparse type: an int or float of at least `minimum`, described by `name`."""

    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if minimum <= value < 2**31:  # never true of NaN
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {name} below 2**31")

    return parse


def parse_args():
    """Return the flags. A mistake ends the process with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.error = lambda message: fail(f"{message} (see --help)", code=2)
    positive, natural = number("a positive int", int, 1), number("a non-negative int", int, 0)
    positive_float = number("a positive float", float, sys.float_info.min)
    non_negative_float = number("a non-negative float", float, 0)
    add = parser.add_argument
    add("--epochs", type=natural, default=3, metavar="N", help="0 sets up, evaluates and exits")
    # Not 1: BatchNorm's last maps are 1 x 1, so of one image there is no variance.
    several = number("an int above 1", int, 2)
    add("--batch-size", type=several, default=128, metavar="N", help="samples per process and forward pass")
    add("--accum-steps", type=positive, default=1, metavar="N", help="forward passes per optimizer step")
    add("--lr", type=positive_float, default=3e-3, metavar="X", help="peak learning rate")
    add("--scale-lr", choices=("none", "linear", "sqrt"), default="none", help="scale --lr with global batch / 256")
    add("--clip-grad-norm", type=non_negative_float, default=0, metavar="X", help="limit of its norm; 0 is off")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--dataset", choices=("mnist", "synthetic"), default="mnist", help="synthetic needs no files")
    add("--data-dir", type=Path, default="data", metavar="DIR", help="holds MNIST/raw, or will")
    add("--train-size", type=positive, metavar="N", help="only the first N training images; None is all")
    add("--seed", type=natural, default=0, metavar="N", help="of weights, order and synthetic images")
    add("--deterministic", action="store_true", help="the same bits on every run, on GPUs too")
    add("--backend", metavar="NAME", help="what connects the ranks; None is nccl for CUDA and ROCm, gloo for CPU")
    add("--bucket-cap-mb", type=positive, metavar="N", help="gradient bucket size in MiB; None is 1, then 25")
    add("--timeout", type=positive_float, default=300, metavar="S", help="seconds that a collective may wait")
    add("--log-interval", type=positive, default=20, metavar="N", help="steps between progress reports")
    add("--metrics", type=Path, metavar="FILE", help="append one JSON object per epoch, and one at the end")
    add("--profile", type=Path, metavar="DIR", help="trace a few steps: a file per rank, for Perfetto")
    add("--checkpoint", type=Path, metavar="FILE", help="save to FILE, and go on from it if it is there")
    add("--save-every", type=natural, default=0, metavar="N", help="save every N steps too, not only after each epoch")
    args = parser.parse_args()
    if args.save_every and not args.checkpoint:
        parser.error("--save-every: where to? Give --checkpoint as well")
    return args


def fail(message, code=1):
    """End this process with one line on stderr."""
    # torchrun ends its other processes when one has ended: let local rank 0 first say what all would say.
    patience = time.monotonic() + 10 * (os.environ.get("LOCAL_RANK", "0") != "0")
    while time.monotonic() < patience:
        if received:  # it has
            sys.exit(code)
        time.sleep(0.1)
    line = " ".join(message.partition("\nException raised from")[0].split())  # cut torch's C++ stack off
    sys.stderr.write(f"{Path(__file__).name}: error: {line}\n")  # in one piece, unlike print
    sys.exit(code)


def say(line, file=None):
    """Print a line on rank 0: messages to stderr, results to stdout."""
    with contextlib.suppress(BrokenPipeError):  # a Ctrl-C that asks us to save has ended `| tee log` already
        if dist.get_rank() == 0:
            print(line, file=file or sys.stderr, flush=True)


def gather(value):
    """Return the list of all ranks' values, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def fail_together(problem):
    """End all ranks if one has a problem: a line, or None. Collective: every rank calls it."""
    for line in filter(None, gather(problem)):
        fail(line)


def follow_torchrun():
    """End this process within a second or two of a torchrun that was killed, and so could not end it."""

    def watch():
        while os.getppid() == PARENT:
            time.sleep(1)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def read_world():
    """Return rank, local rank, world size and local world size as torchrun sets them, or else a world of one."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not given and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        fail("every Slurm task would train alone, on the same files: run one task a node, and torchrun in it")
    if not given:
        return 0, 0, 1, 1
    if len(given) == len(names) and all(given[name].isdigit() for name in names[:5]):
        rank, local_rank, size, local_size = (int(given[name]) for name in names[:4])
        if rank < size and local_rank < local_size <= size:
            return rank, local_rank, size, local_size
    fail(f"torchrun sets {', '.join(names)}, but here they are {given}: start with torchrun")


def count_steps(args, world_size, images):
    """Return the optimizer steps of an epoch: the whole global batches among the training images."""
    size, batch = args.train_size or images, world_size * args.batch_size * args.accum_steps
    if size > images:
        fail(f"--train-size {size}: there are {images} training images")
    if size < batch:
        fail(f"{size} training images, but a step takes {batch}: world size x --batch-size x --accum-steps")
    return size // batch


def list_backends(device):
    """Return the names of the backends of this build of torch that connect devices of this type."""
    connect = [name for name, types in dist.Backend.backend_capability.items() if device.type in types]
    return [name for name in connect if name != "fake" and dist.is_backend_available(name)]


def choose_device(local_rank, local_size):
    """Return this rank's device: an accelerator that some backend connects, or else the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device and list_backends(device):
        if local_size > (gpus := torch.accelerator.device_count()):
            fail(
                f"{local_size} processes on this machine but {gpus} GPUs to be seen: lower --nproc_per_node, "
                "or train on CPUs by hiding the GPUs (CUDA_VISIBLE_DEVICES= torchrun ...)"
            )
        torch.accelerator.set_device_index(local_rank)
        return torch.device(device.type, local_rank)
    if device and local_rank == 0:
        print(f"torch.distributed has no backend for {device.type}: training on the CPU", file=sys.stderr)
    # torchrun turns an unset OMP_NUM_THREADS into 1, and cores idle. Share them, unless more than 1 was asked for.
    if local_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        limit = os.environ.get("OMP_THREAD_LIMIT", "")
        torch.set_num_threads(max(1, min(cores // local_size, int(limit) if limit.isdigit() else cores)))
    return torch.device("cpu")


def join_group(args, device, rank, world_size):
    """Meet the other processes in the default process group. Returns the name of the device's backend."""
    backend = args.backend or dist.get_default_backend_for_device(device)
    if backend not in list_backends(device):
        fail(f"--backend {backend}: this torch connects {device.type} by {', '.join(list_backends(device))}")
    bound = None if device.type == "cpu" else device  # or NCCL would guess which GPU is whose
    # Gloo as well, so that what one CPU tells the others need not wait for a GPU.
    backends = backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    timeout = timedelta(seconds=args.timeout)
    try:
        store = dist.HashStore()
        if world_size > 1:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # After a restart, torchrun's store still holds the addresses of the dead: look elsewhere in it. (With
            # several nodes, their counts may differ; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a new store.)
            store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        # init_process_group would wait for the others too, but deaf: torchrun may be ending us since one has died.
        arrival, arrived = time.monotonic(), store.add("arrived", 1)
        while arrived < world_size:
            time.sleep(0.1)
            if time.monotonic() > arrival + args.timeout:
                raise RuntimeError(f"{arrived} of {world_size} have arrived")
            if received and time.monotonic() > max(arrival, received[0]) + 10:
                store.add("arrived", -1)
                fail("stopped by a signal, and not all other processes have arrived")
            arrived = store.add("arrived", 0)
        dist.init_process_group(
            backends, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
        )
    except (RuntimeError, ValueError) as error:
        fail(
            f"rank {rank} of {world_size} has not met the others: have all started, with the same MASTER_ADDR, a free "
            f"MASTER_PORT, and the interface between them in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME? {error}"
        )
    return backend


class DeviceImages(Dataset):
    """Images, uint8, (N, 28, 28), and labels, (N,), on `device` once and for all, read in whole batches."""

    def __init__(self, images, labels, device):
        self.images = torch.as_tensor(images, device=device)
        self.labels = torch.as_tensor(labels, device=device).long()

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):  # which a DataLoader prefers to __getitem__
        """Return normalised images, float32, (B, 1, 28, 28), and labels, int64, (B,)."""
        index = torch.tensor(indices, device=self.labels.device)
        return (self.images[index].unsqueeze(1) / 255 - PIXEL_MEAN) / PIXEL_STD, self.labels[index]


def synthesize(seed, split, size):
    """Return images, uint8, (size, 28, 28), and labels, (size,): ten faint prototypes under noise."""
    prototypes = np.random.default_rng(seed).standard_normal((CLASSES, 7, 7), dtype=np.float32)
    rng = np.random.default_rng([seed, split])
    labels = rng.integers(CLASSES, size=size)
    images = rng.standard_normal((size, 28, 28), dtype=np.float32)
    images *= 64
    for label, prototype in enumerate(128 + 20 * prototypes.repeat(4, axis=1).repeat(4, axis=2)):
        images[labels == label] += prototype
    return images.clip(0, 255, out=images).astype(np.uint8), labels


def read_mnist(folder):
    """Return MNIST's training and test set, images and labels each, downloading what `folder` lacks.

    Raises ValueError, which says what to do, if they can be neither read nor downloaded.
    """
    raw = folder / "MNIST" / "raw"
    if not raw.exists():
        print(f"downloading MNIST to {raw}", file=sys.stderr, flush=True)
    socket.setdefaulttimeout(5)  # seconds: a firewall may drop packets without a word
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            sets = [MNIST(folder, train, download=True) for train in (True, False)]
        sets = [(part.data, part.targets) for part in sets]
        for images, labels in sets:
            if images.shape != (len(labels), 28, 28) or labels.max() >= CLASSES:
                raise ValueError(f"images {tuple(images.shape)}, labels {tuple(labels.shape)}")
    except Exception as error:  # a damaged file makes torchvision raise nearly anything
        names = ", ".join(name for name, _ in MNIST.resources)
        for empty in (raw, raw.parent, folder):
            with contextlib.suppress(OSError):
                empty.rmdir()  # what torchvision has made, perhaps in the wrong place
        raise ValueError(
            f"no usable MNIST in {raw}: give --data-dir the folder that holds MNIST/raw, or put the files there "
            f"({names}; delete damaged ones), or use --dataset synthetic. {type(error).__name__}: {error}"
        )
    finally:
        socket.setdefaulttimeout(None)
    return sets


class ResumableSampler:
    """Deals out what a distributed sampler does, but from any place in an epoch on."""

    def __init__(self, sampler):
        self.sampler, self.rank, self.skip = sampler, sampler.rank, 0

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        return itertools.islice(self.sampler, self.skip, None)

    def set_position(self, epoch, samples):
        """Begin in `epoch` after its first `samples`, which the ranks have used together, however many they were."""
        self.sampler.set_epoch(epoch)  # without this, every epoch has the same order
        # Of the samples left, the first W go to the W ranks. This one's is the `skip`-th of all those that the
        # sampler deals to a rank, another one perhaps: each W-th from there on is dealt to the same.
        self.skip, self.sampler.rank = divmod(samples + self.rank, self.sampler.num_replicas)


def load_data(args, device, rank, local_rank, world_size):
    """Return the loaders of the training and the test set. Collective: every rank calls it."""
    sets = error = None
    if args.dataset == "synthetic":
        sets = synthesize(args.seed, 0, TRAIN_IMAGES), synthesize(args.seed, 1, TEST_IMAGES)
    # Rank 0 first, then one process of each node, then all: nothing is downloaded twice.
    for turn in (rank == 0, local_rank == 0, True):
        if turn and not sets:
            try:
                sets = read_mnist(args.data_dir)
            except ValueError as problem:
                error = str(problem)
        fail_together(error)
    (images, labels), test = sets
    count_steps(args, world_size, len(images))
    train_set = DeviceImages(images[: args.train_size], labels[: args.train_size], device)
    test_set = DeviceImages(*test, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    share = range(rank, len(test_set), world_size)  # every W-th image, no padding: each is counted once
    options = {"batch_size": args.batch_size, "collate_fn": lambda batch: batch}  # __getitems__ has collated
    train_loader = DataLoader(train_set, sampler=ResumableSampler(sampler), drop_last=True, **options)
    return train_loader, DataLoader(test_set, sampler=share, **options)


def build_model():
    """Return torchvision's ResNet18 from images, (B, 1, 28, 28), to logits, (B, CLASSES)."""
    model = resnet18(num_classes=CLASSES)
    model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def lr_factor(progress):
    """Return what part of the peak learning rate to use at `progress`, 0 to 1, through the training.

    Linear warm-up, then a cosine to zero: a pure function, so there is no state to save.
    """
    if progress < WARMUP:
        return progress / WARMUP
    return (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


@dataclasses.dataclass
class Progress:
    """How far the training has come, whatever the number of ranks: all counts are over all of them."""

    epoch: int = 0  # how many are complete
    samples: int = 0  # how many of the next one are used
    loss_sum: float = 0.0  # over these
    step: int = 0  # optimizer steps in all
    history: list = dataclasses.field(default_factory=list)  # the lines of --metrics so far


class Checkpoint:
    """The file of --checkpoint: at every moment one whole state of the training, the last to be saved.

    `setting`, a dict of str, says how this run trains.
    """

    FIXED = ("--dataset", "--train-size", "--seed", "optimizer")  # with another, the saved position means nothing

    def __init__(self, path, setting):
        self.path, self.setting = path and path.resolve(), setting  # of a link, the target will be replaced
        self.temporary = Path(f"{self.path}.tmp")

    def load(self, model, optimizer):
        """Load the newest file that any rank can read, as nodes need not share a disk; return its Progress.

        Collective. From here on until this process ends, no other run can use the file. Where there is none, return
        the Progress of a new run; where there are but unreadable or unfit ones, end all ranks.
        """
        if not self.path:
            return Progress()
        state = found = problem = None
        try:
            if dist.get_rank() == 0:
                self._lock()
        except OSError as error:
            problem = f"--checkpoint: {error}"
        fail_together(problem)
        try:
            state = self._read()
            found = state["progress"]["epoch"], state["progress"]["samples"]
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = f"--checkpoint: {error}"
        except Exception as error:  # a damaged file makes torch.load raise nearly anything
            problem = f"--checkpoint {self.path}: not a checkpoint, or a damaged one; give another name, or delete it "
            problem += f"to start over. {type(error).__name__}: {error}"
        answers = gather((found, problem))
        newest = max((found for found, _ in answers if found), default=None)
        for line in filter(None, (problem for _, problem in answers)):
            say(line) if newest else fail(line)
        if not newest:
            return Progress()
        if problem and dist.get_rank() == 0:
            self.path.replace(f"{self.path}.damaged")  # it may be precious to another program
        box = [state]
        dist.broadcast_object_list(box, src=[found for found, _ in answers].index(newest))
        try:
            old, new = box[0]["setting"], self.setting
            changed = {name: f"{name} {old.get(name)} -> {new.get(name)}" for name in old | new}
            changed = {name: words for name, words in changed.items() if str(old.get(name)) != str(new.get(name))}
            for name in filter(changed.get, self.FIXED):
                fail(f"--checkpoint {self.path} is of another run: {changed[name]}. Undo that, or give another name")
            model.load_state_dict(box[0]["model"])
            optimizer.load_state_dict(box[0]["optimizer"])
            progress = Progress(**box[0]["progress"])
        except Exception as error:  # each of these has its own
            fail(f"--checkpoint {self.path} is of another model or script: give another name. {str(error)[:400]}")
        say("; ".join([f"going on from {self.path}", *changed.values()]))
        return progress

    def save(self, model, optimizer, progress):
        """Replace the file, on rank 0, by one that is whole and on the disk. If it cannot, the old one stays."""
        if not self.path or dist.get_rank() != 0:
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        try:
            with self.temporary.open("wb") as file:
                torch.save(state | {"setting": self.setting, "progress": vars(progress)}, file)
                file.flush()
                os.fsync(file.fileno())
            self.temporary.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch.save hides the first behind the second
            with contextlib.suppress(OSError):
                self.temporary.unlink()
            fail(f"--checkpoint {self.path}: not saved, the one before it is as it was. {error.__context__ or error}")
        with contextlib.suppress(OSError):  # not every file system can, but without, a power cut may undo the renaming
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def _lock(self):
        # A file of its own, as the checkpoint is replaced each time. It is locked until this process ends.
        self.lock = Path(f"{self.path}.lock").open("a")  # noqa: SIM115
        patience = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise BlockingIOError(f"another run is using {self.path}")
                time.sleep(0.5)
            except OSError as error:  # Lustre, for one, may be mounted without locks
                say(f"{self.path} is not locked, see that no other run uses it: {error}")
                break
        self.temporary.touch()  # better to learn now than after an hour that the folder cannot be written to
        self.temporary.unlink()

    def _read(self):
        with zipfile.ZipFile(self.path) as file:  # as torch.save writes it; torch.load skips the checksums
            if part := file.testzip():
                raise ValueError(f"wrong checksum of {part}")
        state = torch.load(self.path, map_location="cpu", weights_only=True)  # no code in it is run
        if not isinstance(state, dict) or state.keys() != {"model", "optimizer", "progress", "setting"}:
            raise ValueError("another program's file")
        return state


def train_step(model, optimizer, batches, device, args):
    """Take one optimizer step over `accum_steps` batches. Returns this rank's mean loss, on the device."""
    mean_loss = 0
    for i, (images, labels) in enumerate(batches, 1):
        # Until the last batch of the step, gradients only add up on this rank.
        with contextlib.nullcontext() if i == args.accum_steps else model.no_sync():
            with record_function("forward"):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    logits = model(images.to(device))
                loss = F.cross_entropy(logits.float(), labels.to(device)) / args.accum_steps
            with record_function("backward"):
                loss.backward()
        mean_loss += loss.detach()
    if args.clip_grad_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
    with record_function("step"):
        optimizer.step()
    optimizer.zero_grad()
    return mean_loss


def train_epoch(model, optimizer, loader, progress, save, profiler, device, args):
    """Train from `progress` to the end of its epoch, or until a signal.

    Calls `save()` every --save-every steps, and before it stops. Returns the epoch's part of the --metrics, or
    None if it has stopped, which all ranks do after the same step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = world_size * args.batch_size * args.accum_steps  # samples of one step
    steps = len(loader) // args.accum_steps  # of a whole epoch
    left = max(0, len(loader.sampler) * world_size - progress.samples) // batch
    name = f"epoch {progress.epoch + 1}/{args.epochs}"
    if progress.samples:
        odd = len(loader.dataset) - progress.samples - left * batch
        say(f"{name}  {progress.samples:,} samples are used: {left} steps to go, {odd} samples will be left out")
    loader.sampler.set_position(progress.epoch, progress.samples)
    batches = iter(loader)
    model.train()
    unread, start = [], time.perf_counter()
    since = start
    # Only a terminal gets a bar: in a log file its carriage returns make one endless line.
    quiet = rank != 0 or not sys.stderr.isatty()
    with tqdm(total=steps, initial=steps - left, desc=name, unit="step", leave=False, disable=quiet) as bar:
        for step in range(steps - left + 1, steps + 1):
            # While the step is computed, the ranks tell each other whether a signal has reached any of them.
            stop = torch.tensor(len(received))
            answers = dist.all_reduce(stop, async_op=True)
            # Progress at mid-step, so that neither the first step nor the last has a rate of zero.
            done = (progress.epoch * steps + progress.samples / batch + 0.5) / (args.epochs * steps)
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * lr_factor(done)
            # What is random in a model depends on the place in the training too, and need not be saved.
            torch.manual_seed(hash((args.seed, progress.step, rank)))
            step_batches = itertools.islice(batches, args.accum_steps)
            unread.append(train_step(model, optimizer, step_batches, device, args))
            progress.samples += batch
            progress.step += 1
            bar.update()
            answers.wait()
            if profiler:
                profiler.step()
            due = stop or (args.save_every and progress.step % args.save_every == 0)
            if step % args.log_interval and step < steps and not due:
                continue
            # To read a loss is to wait for the GPU: read many at once, averaged over the ranks.
            means = torch.stack(unread) / world_size
            dist.all_reduce(means)
            means, unread = means.tolist(), []
            for i, loss in enumerate(means, step - len(means) + 1):
                if not math.isfinite(loss):
                    bar.close()
                    fail(f"the loss is {loss} in {name}, step {i}: try a lower --lr, or --clip-grad-norm 1")
                progress.loss_sum += loss * batch
            speed, since = len(means) * batch / (time.perf_counter() - since), time.perf_counter()
            status = f"lr {group['lr']:.2e}  loss {sum(means) / len(means):.4f}  {speed:,.0f} samples/s"
            bar.set_postfix_str(status)
            if bar.disable:
                say(f"{name}  step {step}/{steps}  {status}")
            if due:
                save()
            if stop:
                return None
    return {
        "lr": optimizer.param_groups[0]["lr"],
        "train_loss": progress.loss_sum / progress.samples,
        "samples_per_second": left * batch / (time.perf_counter() - start),
    }


@torch.no_grad()
def evaluate(model, loader, device, args):
    """Return the --metrics of the test set, each image counted once over all ranks.

    `model` is the bare module: DDP's forward may communicate, and ranks may differ in their number of batches.
    """
    for buffer in model.buffers():  # BatchNorm's running statistics: each rank has seen other images
        dist.broadcast(buffer, src=0)
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images.to(device)).float()
        labels = labels.to(device)
        totals[0] += F.cross_entropy(logits, labels, reduction="none").double().sum()
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    if not math.isfinite(loss):
        fail(f"the test loss is {loss / count}: try a lower --lr, or --clip-grad-norm 1")
    return {"test_loss": loss / count, "test_accuracy": correct / count, "test_samples": int(count)}


def weights_sha256(model):
    """Return the SHA-256 of a bare module's state: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def open_metrics(path):
    """Return the file of --metrics, open for new lines, on rank 0; elsewhere the null device. Collective."""
    file = problem = None
    try:
        file = (path if path and dist.get_rank() == 0 else Path(os.devnull)).open("a", buffering=1)
    except OSError as error:
        problem = f"--metrics: {error}"
    fail_together(problem)
    return file


def mend_metrics(file, history):
    """Give the file of --metrics the lines of `history`: a kill may have cost it the last one, or half of that."""
    if history and Path(file.name).is_file():
        lines = Path(file.name).read_bytes()
        file.truncate(lines.rfind(b"\n") + 1)
        file.writelines(f"{line}\n" for line in map(json.dumps, history) if f"{line}\n".encode() not in lines)


@contextlib.contextmanager
def trace_steps(folder):
    """Give a profiler that writes a trace of PROFILED steps of each rank to `folder`, or None. Collective."""
    if not folder:
        return (yield None)
    problem, last = None, PROFILE_AFTER + PROFILED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # better to learn now that it cannot be written to
    except OSError as error:
        problem = f"--profile: {error}"
    fail_together(problem)

    def write(profiler):
        if profiler.step_num == last:  # else it was stopped before
            profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))
            say(f"each rank's trace is in {folder}: open one in https://ui.perfetto.dev or chrome://tracing")

    if not torch.accelerator.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would report as an ERROR that there is no GPU
    steps = schedule(wait=PROFILE_AFTER - 1, warmup=1, active=PROFILED, repeat=1)
    with profile(schedule=steps, on_trace_ready=write) as profiler:  # left in the middle of a trace, it would crash
        yield profiler
    if profiler.step_num < last:
        say(f"--profile: no trace, that takes an epoch of {last} steps, and this had {profiler.step_num}")


def main():
    args = parse_args()
    rank, local_rank, world_size, local_size = read_world()
    count_steps(args, world_size, TRAIN_IMAGES)
    device = choose_device(local_rank, local_size)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has to be told as well
        torch.use_deterministic_algorithms(True)
    follow_torchrun()
    backend = join_group(args, device, rank, world_size)
    metrics = open_metrics(args.metrics)

    train_loader, test_loader = load_data(args, device, rank, local_rank, world_size)
    steps, batch = len(train_loader) // args.accum_steps, world_size * args.batch_size * args.accum_steps
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    places = gather(f"{socket.gethostname()}, {name}, CPU threads: {torch.get_num_threads()}")
    say(f"torch {torch.__version__}, backend {backend}")
    for place, ranks in itertools.groupby(range(world_size), key=places.__getitem__):
        say(f"rank {', '.join(map(str, ranks))} on {place}")
    say(f"global batch {batch} = {world_size} processes x {args.batch_size} samples x {args.accum_steps} accumulated")
    say(f"steps per epoch {steps}")

    torch.manual_seed(args.seed)
    model = build_model().to(device)
    if args.compile:
        model.compile()
    scale = {"none": 1, "linear": batch / 256, "sqrt": math.sqrt(batch / 256)}[args.scale_lr]  # Goyal et al., 2017
    # The default second beta, 0.999, averages over a thousand steps, more than this run has.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * scale, betas=(0.9, 0.99), fused=True)
    setting = {f"--{flag.replace('_', '-')}": str(value) for flag, value in vars(args).items()} | {
        "--train-size": str(len(train_loader.dataset)),
        "optimizer": type(optimizer).__name__,
        "processes": str(world_size),
        "device": name,
        "CPU threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
    }
    checkpoint = Checkpoint(args.checkpoint, setting)
    progress = checkpoint.load(model, optimizer)
    save = functools.partial(checkpoint.save, model, optimizer, progress)
    mend_metrics(metrics, progress.history)

    def record(entry):
        progress.history.append(entry)
        save()
        print(json.dumps(entry), file=metrics)

    ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # once in `evaluate` is enough, in every forward it costs time
    start, first_step, entry = time.perf_counter(), progress.step, None
    folder = args.profile
    while progress.epoch < args.epochs:
        with trace_steps(folder) as profiler:
            trained = train_epoch(ddp, optimizer, train_loader, progress, save, profiler, device, args)
        folder = None  # one epoch is enough
        if not trained:
            place = f"stopped by a signal in epoch {progress.epoch + 1}, after {progress.samples:,} samples of it"
            if not args.checkpoint:
                fail(f"{place}; nothing is saved without --checkpoint")
            return say(f"{place}; saved to {args.checkpoint}, from where the same command goes on")
        entry = {"epoch": progress.epoch + 1, "step": progress.step} | trained
        entry |= evaluate(model, test_loader, device, args)
        say((TRAIN_RESULT + TEST_RESULT).format(**entry), sys.stdout)
        progress.epoch, progress.samples, progress.loss_sum = progress.epoch + 1, 0, 0.0
        record(entry)
    if not entry:
        if progress.epoch:
            say(f"nothing to train: {progress.epoch} of {args.epochs} epochs are done")
        say(TEST_RESULT.format(**evaluate(model, test_loader, device, args)), sys.stdout)
    seconds, samples = time.perf_counter() - start, (progress.step - first_step) * batch
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        peak = torch.accelerator.max_memory_allocated()
    peak, hashes = max(gather(peak)), gather(weights_sha256(model))
    if len(set(hashes)) > 1:
        fail(f"the ranks have ended on different weights: {', '.join(sha256[:8] for sha256 in hashes)}")
    say(
        f"{samples:,} samples in {seconds:.1f} s, evaluation included: {samples / seconds:,.0f} samples/s, "
        f"peak memory {peak / 2**20:,.0f} MiB per process\nweights sha256 {hashes[0]}, the same on every rank",
        sys.stdout,
    )
    summary = {
        "weights_sha256": hashes[0],
        "world_size": world_size,
        "global_batch_size": batch,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "peak_memory_bytes": peak,
    }
    if not (progress.history and "weights_sha256" in progress.history[-1]):  # else it was recorded back then
        record(summary)


if __name__ == "__main__":
    try:
        main()
        dist.destroy_process_group()
        for stop in STOP_SIGNALS:  # one more signal must not turn success into failure while Python shuts down
            signal.signal(stop, signal.SIG_IGN)
    except torch.OutOfMemoryError:
        fail("the GPU is out of memory: halve --batch-size, and double --accum-steps to keep the global batch")
    except RuntimeError as error:
        if "deterministic" in str(error):
            fail(f"--deterministic: {error}")
        gloo_says = ("gloo", "timed out", "pair closure")
        if isinstance(error, dist.DistError) or any(words in str(error) for words in gloo_says):
            fail(f"lost touch with another rank: see what each rank said first, on every node. {error}")
        raise
    except OSError as error:  # the disk of --metrics may be full
        fail(str(error))
