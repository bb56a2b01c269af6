"""Train ResNet18 on MNIST, data-parallel, with torch's DistributedDataParallel (DDP).

    python train_ddp.py                                      # one process
    torchrun --standalone --nproc-per-node=2 train_ddp.py    # two (or =gpu: one per GPU)
    ... train_ddp.py --dataset synthetic                     # without a download
    ... train_ddp.py --checkpoint ck.pt                      # resumes from ck.pt, if it exists

Each process, called a rank, holds the whole model and trains on batches of its own. The
ranks average their gradients, so all of them take the same optimizer step and their weights stay
equal. They communicate by collectives, calls that all ranks make together, such as an all-reduce,
which gives every rank the sum over all ranks. On GPUs, NCCL carries them out; on CPUs, Gloo does.
If one rank fails, torchrun ends the others on its node.

Read from the top: `main` first, then what it calls. The comments 1 to 7 are the seven changes of
the README, which make a script distributed. In `main`, `collective` marks the lines that all ranks
have to reach. The twin, train_manual_ddp.py, is this script with DistributedSampler and
DistributedDataParallel written by hand: their diff is the next lesson.
"""

import atexit
import contextlib
import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from tqdm import tqdm


@record  # torchrun's summary then shows the traceback of an exception
def main(args):
    """Train and test. With --checkpoint, save before each test and when a signal says stop."""
    rank, local_rank, world_size, device = setup(args)  # 1. and 2., collective
    train_set, test_set = load_data(args, rank, local_rank, device)  # collective
    # 3. Split the data: all ranks shuffle identically, and each of W ranks takes every W-th sample.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    samples_per_rank = args.batch_size * args.accum_steps  # in one optimizer step
    global_batch = world_size * samples_per_rank
    steps = len(train_set) // global_batch  # in one epoch, which leaves out the last few samples
    if steps == 0:
        sys.exit(f"a step takes {global_batch} of {len(train_set)} samples: lower --batch-size")
    log(args, world_size=world_size, global_batch=global_batch, steps_per_epoch=steps)

    torch.manual_seed(args.seed)  # for rank 0's weights, which all ranks get below
    model = build_model().to(device)
    peak_lr = args.lr * global_batch / 256 if args.scale_lr else args.lr  # for SGD
    # Fused is faster. A beta of 0.99 averages over 100 steps. The default, 0.999, is for long runs.
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.99), fused=True)
    # Collective: rank 0 reads the file, if there is one, and all ranks get what is in it.
    first_epoch, steps_done = load_checkpoint(args, model, optimizer, global_batch, steps)
    # 4. Start from equal weights, those of rank 0, and average the gradients in every step.
    # (Each p.grad becomes a part of the bucket that is sent, not a copy: this saves memory.)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # collective
    stop_signals = catch_signals(args)  # a list, which grows when a signal arrives

    for epoch in range(first_epoch, args.epochs):
        model.train()
        sampler.set_epoch(epoch)  # 5. Shuffle again in every epoch, or the order never changes.
        # The seed of dropout differs by rank and epoch, and is a new one if an epoch is resumed.
        torch.manual_seed(hash((args.seed, epoch, steps_done, rank)))
        # A resumed epoch skips the samples that were used before the interruption.
        indices = list(sampler)[steps_done * samples_per_rank :]
        batches = iter(load(train_set, indices, device, args))
        losses, start = [], time.perf_counter()  # since the last report
        for step in progress_bar(steps_done, steps):  # steps_done + 1, ..., steps
            # `step - 0.5` is the middle of the step, so the last step has a rate above 0, too.
            lr = peak_lr * lr_factor((epoch * steps + step - 0.5) / (args.epochs * steps))
            loss = train_step(ddp, optimizer, lr, batches, device, args)  # collective
            losses.append(loss)
            save_now = step == steps or step % args.save_every == 0
            stop = 0  # signals on all ranks, added up below
            # A loss that is not finite ends the run here, so this comes before each save, too.
            if save_now or step % args.log_interval == 0:
                # 7. Let all ranks decide: a signal may reach only one rank, so all add up theirs.
                numbers = [sum(losses) / len(losses), len(stop_signals)]
                total, stop = sum_over_ranks_or_exit(numbers, device, f"step {step}")  # collective
                speed = len(losses) * global_batch / (time.perf_counter() - start)
                values = {"lr": lr, "loss": total / world_size, "samples_per_second": speed}
                log(args, epoch=epoch + 1, step=step, **values)  # rank 0 prints
                losses, start = [], time.perf_counter()
            if rank == 0 and (save_now or stop):  # 7. Let one rank write.
                # Count samples, not steps, as W may change. After the last step, all are done.
                samples_done = step * global_batch if step < steps else len(train_set)
                save_checkpoint(args, model, optimizer, epoch, samples_done)
            if stop:  # on all ranks alike, and so outside of any `if rank == 0`
                log(args, stopped=f"by a signal, saved to {args.checkpoint}")
                return
        log(args, epoch=epoch + 1, **evaluate(model, test_set, device, args))  # 6., collective
        steps_done = 0  # only a resumed epoch begins in its middle

    if first_epoch >= args.epochs:  # there was nothing to train
        log(args, **evaluate(model, test_set, device, args))  # collective
    log(args, weights_sha256=equal_weights_sha256(model))  # collective


def setup(args):
    """Join the process group. Return rank, local rank (on this node), world size and device."""
    set_environment(args)
    rank = int(os.environ["RANK"])  # set by torchrun; for plain python, by set_environment
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])

    # 1. Pick your own device: the GPU with the number of the local rank, or the CPU.
    device, device_id = torch.device("cpu"), None
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            fix = "lower --nproc-per-node, or train on CPUs: CUDA_VISIBLE_DEVICES= torchrun ..."
            sys.exit(f"no GPU for local rank {local_rank}, as this node has {gpus}: {fix}")
        device = device_id = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)

    # 2. Join the process group: wait at MASTER_ADDR:MASTER_PORT until all ranks are there. With
    # device_id, NCCL connects the GPUs immediately rather than in the first collective.
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=args.timeout)  # of every collective: a hang becomes an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    place = f"{socket.gethostname()}, {device}, {torch.get_num_threads()} CPU threads, {backend}"
    sys.stderr.write(f"rank {rank} of {world_size} on {place}, torch {torch.__version__}\n")
    return rank, local_rank, world_size, device


def train_step(ddp, optimizer, lr, batches, device, args):
    """Take an optimizer step over `accum_steps` batches. Return this rank's loss. Collective."""
    mean_loss = 0
    for i in range(1, args.accum_steps + 1):
        # MNIST is on the device. Other data are copied without a wait, if pin_memory=True.
        images, labels = (part.to(device, non_blocking=True) for part in next(batches))
        # With no_sync(), gradients add up on this rank; in the last pass, all ranks average them.
        last = i == args.accum_steps
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
                logits = ddp(images)  # 4. again: with `model(images)`, nothing would be averaged
            loss = F.cross_entropy(logits.float(), labels) / args.accum_steps  # in fp32
            loss.backward()  # ddp averages here, in the last pass: collective
        mean_loss += loss.detach()
    if args.clip_grad_norm:  # the averages are clipped, in the same way on all ranks
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), args.clip_grad_norm)
    for group in optimizer.param_groups:  # one rate for all parameters
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss


def sum_over_ranks_or_exit(numbers, device, where):
    """Return the sums of these numbers over all ranks, a list of floats. Collective.

    All ranks exit if a rank is missing or a sum is not finite. The message begins with `where`.
    """
    sums = torch.tensor([*numbers, 1], dtype=torch.float64, device=device)  # the 1 counts ranks
    dist.all_reduce(sums)
    *sums, ranks = sums.tolist()
    # When a rank dies, NCCL may return wrong sums a moment before torch ends this process, as the
    # reference of init_process_group says at `timeout`. So exit here, before `main` saves.
    if ranks != dist.get_world_size():
        sys.exit(f"{where}: {ranks:g} of {dist.get_world_size()} ranks are left")
    if not math.isfinite(sum(sums)):
        sys.exit(f"{where}: the loss is not finite: try a lower --lr, or --clip-grad-norm 1")
    return sums


@torch.no_grad()
def evaluate(model, test_set, device, args):
    """Return loss and accuracy on the whole test set, the same on all ranks. Collective."""
    # 6. Evaluate together. BatchNorm's running statistics differ by rank, as each has trained on
    # different images: all take those of rank 0. (DDP would do so only in the next step.)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    # Each rank takes every W-th image. Then they add up their results.
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    loss = correct = count = 0
    for batch in load(test_set, share, device, args):
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        # Not DDP's wrapper: its forward pass may be a collective, and a rank may have no batch.
        logits = model(images)
        loss += F.cross_entropy(logits, labels, reduction="none").double().sum()
        correct += (logits.argmax(dim=1) == labels).sum()
        count += len(labels)
    loss, correct, count = sum_over_ranks_or_exit([loss, correct, count], device, "the test")
    if count != len(test_set):
        sys.exit(f"{count:.0f} test images were counted, but there are {len(test_set)}")
    return {"test_loss": loss / count, "test_accuracy": correct / count, "test_samples": int(count)}


def equal_weights_sha256(model):
    """Return the SHA-256 of the state_dict. Exit if it differs by rank. Collective."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().ravel().view(torch.uint8).numpy())
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, digest.hexdigest())
    if len(set(hashes)) > 1:
        sys.exit(f"the ranks have ended on different weights: {', '.join(h[:8] for h in hashes)}")
    return hashes[0]


# The lesson ends here. For a model and data of your own, replace `build_model`, `load_data`, `load`
# and `data_flags`. The loss is in `train_step` and in `evaluate`, and the optimizer in `main`.

TRAIN_IMAGES, TEST_IMAGES, CLASSES = 60_000, 10_000, 10
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, scaled to [0, 1]
WARMUP = 0.3  # the fraction of the training in which the learning rate rises


def build_model():
    """Return ResNet18 from images, float32, (B, 1, 28, 28), to logits, float32, (B, CLASSES)."""
    model = resnet18(num_classes=CLASSES)
    model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def lr_factor(progress):
    """Return the fraction of the peak rate at `progress`, 0 to 1: warm-up, then a cosine."""
    if progress < WARMUP:
        return progress / WARMUP
    return (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


def load_data(args, rank, local_rank, device):
    """Return training and test set: images, float32, (1, 28, 28); labels, int64; on `device`."""
    if args.dataset == "synthetic":
        sets = [synthesize(args.seed, 0, TRAIN_IMAGES), synthesize(args.seed, 1, TEST_IMAGES)]
    else:
        if rank == 0:
            read_mnist(args.data_dir)  # downloads what is missing
        dist.barrier()  # a collective: it returns when all ranks have called it
        if local_rank == 0:  # a node that does not see rank 0's files downloads its own
            read_mnist(args.data_dir)
        dist.barrier()
        sets = read_mnist(args.data_dir)
    datasets = []
    for (images, labels), size in zip(sets, (args.train_size, None), strict=True):
        images = torch.as_tensor(images[:size, None], device=device) / 255
        labels = torch.as_tensor(labels[:size], device=device)
        datasets.append(TensorDataset((images - PIXEL_MEAN) / PIXEL_STD, labels))
    return datasets


def data_flags(args):
    """Return what decides the samples and their order: a run resumes only with the same values."""
    return f"--dataset {args.dataset} --train-size {args.train_size} --seed {args.seed}"


def load(dataset, indices, device, args):
    """Return a loader of these samples, in batches: images, (B, 1, 28, 28), and labels, (B,)."""
    # For files, where dataset[i] is one sample:
    # return DataLoader(dataset, args.batch_size, sampler=indices, num_workers=4, pin_memory=True,
    #                   multiprocessing_context="fork", worker_init_fn=ignore_signals)
    # Here, all is in memory, and dataset[a tensor of indices] is a whole batch. So the sampler
    # yields such tensors, and batch_size is None.
    index_batches = torch.tensor(indices, dtype=torch.int64, device=device).split(args.batch_size)
    return DataLoader(dataset, batch_size=None, sampler=index_batches)


def read_mnist(folder):
    """Return MNIST's training and test set: images, uint8, (N, 28, 28); labels, int64, (N,)."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)  # seconds: a firewall may drop packets without a word
    try:
        sets = [MNIST(folder, train, download=True) for train in (True, False)]
    except Exception as error:  # a damaged file makes torchvision raise almost anything
        fix = "put the four .gz files there, or use --dataset synthetic; delete damaged files"
        sys.exit(f"no usable MNIST in {folder}/MNIST/raw: {fix}. {error!r}")
    finally:
        socket.setdefaulttimeout(timeout)
    return [(part.data, part.targets) for part in sets]


def synthesize(seed, split, size):
    """Return images, uint8, (size, 28, 28), and labels, int64, (size,): ten noisy prototypes."""
    prototypes = np.random.default_rng(seed).standard_normal((CLASSES, 7, 7), dtype=np.float32)
    prototypes = 128 + 20 * prototypes.repeat(4, axis=1).repeat(4, axis=2)
    rng = np.random.default_rng([seed, split])
    labels = rng.integers(CLASSES, size=size)
    images = prototypes[labels] + 64 * rng.standard_normal((size, 28, 28), dtype=np.float32)
    return images.clip(0, 255).astype(np.uint8), labels


# Long runs also need the rest: a bar and a log, guards, signals, checkpoints, flags.


def progress_bar(steps_done, steps):
    """Return steps_done + 1, ..., steps. A loop over them draws a bar, and clears it at its end."""
    hidden = None if dist.get_rank() == 0 else True  # None: tqdm draws a bar, if in a terminal
    numbers = range(steps_done + 1, steps + 1)
    return tqdm(numbers, total=steps, initial=steps_done, leave=False, disable=hidden)


def log(args, **values):
    """On rank 0, print these values as one line on stdout, and append them to --metrics as JSON."""
    if dist.get_rank() != 0:
        return
    words = []
    for name, value in values.items():
        if isinstance(value, float):
            value = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
        words.append(f"{name} {value}")
    with contextlib.suppress(BrokenPipeError):  # Ctrl-C has ended `| tee log`: go on, to save
        tqdm.write(f"{'  '.join(words)}\n", end="")  # in one piece, above the bar if there is one
        sys.stdout.flush()
    with args.metrics.open("a") as file:
        file.write(json.dumps(values) + "\n")


def set_environment(args):
    """Set what torchrun has not set. Exit where ranks would not find each other."""
    if "RANK" not in os.environ:  # plain python: a world of one; port 0 stands for any free port
        several = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
        if several and not sys.stdin.isatty():  # in a shell of `srun --pty`, stdin is a terminal
            fix = "use torchrun, see slurm_submit_ddp.sh"
            sys.exit(f"srun has started unconnected processes: {fix}")
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        fix = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts=..."
        sys.exit(f"a restarted process would look for the dead ones, and wait: use {fix}")
    if dist.is_torchelastic_launched() and sys.platform == "linux":
        # If torchrun is killed from now on, so is this process. Otherwise, it might live on, and
        # write over the file of a run that resumes.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has to be told as well
        torch.use_deterministic_algorithms(True)


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # the last one is Ctrl-C


def catch_signals(args):
    """Return a list. With --checkpoint, signals are added to it; without, they end the process."""
    signals = []

    def on_signal(number, frame):
        signals.append(number)
        if number == signal.SIGINT and not dist.is_torchelastic_launched():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # so a second Ctrl-C ends plain python

    for number in SIGNALS:  # SIG_DFL: Python's own handler of Ctrl-C could print into the bar
        signal.signal(number, on_signal if args.checkpoint else signal.SIG_DFL)
    atexit.register(end_workers)  # workers of a loader, as these ignore signals
    return signals


def ignore_signals(worker):
    """Keep a DataLoader's worker alive: torchrun signals it, too, while its rank has to save."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_workers():
    """Kill a failed rank's workers: they ignore SIGTERM, and the rank would wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or torch would raise an error for each of them
    for worker in multiprocessing.active_children():
        worker.kill()


def save_checkpoint(args, model, optimizer, epoch, samples_done):
    """Replace the file of --checkpoint: at any moment it is whole, the old one or the new one."""
    if not args.checkpoint:
        return
    if not all(p.isfinite().all() for p in model.parameters()):
        sys.exit("the weights are not finite, and were not saved: try a lower --lr")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": (epoch, samples_done),  # the epoch, and how many of its samples are done
        "data": data_flags(args),
    }
    path = args.checkpoint.resolve()  # a link stays, and the file that it points to is replaced
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # all of it is on the disk before it gets the name
    os.replace(temporary, path)


def load_checkpoint(args, model, optimizer, global_batch, steps):
    """Load what was saved last. Return the epoch to begin with and its steps done. Collective."""
    path, state = args.checkpoint, None
    if path and dist.get_rank() == 0:
        if args.epochs:  # else, nothing will be saved
            folder = path.resolve().parent
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # if we cannot write there, this raises
        elif not path.exists():
            sys.exit(f"--checkpoint {path} is not there, and --epochs 0 would test random weights")
        try:
            state = dict(torch.load(path, map_location="cpu")) if path.exists() else None
        except Exception as error:  # a damaged file makes torch.load raise almost anything
            sys.exit(f"--checkpoint {path} cannot be read: move it, or use another name. {error!r}")
    # Rank 0 sends what it has read, as other nodes may not see the file. With NCCL, this takes GPU
    # memory: if there is too little, use torch.distributed.checkpoint and a shared disk.
    box = [state]
    dist.broadcast_object_list(box, src=0)
    epoch = steps_done = 0
    if (state := box[0]) is not None:
        ours, theirs = data_flags(args), state.get("data")
        if ours != theirs:  # in another order, the position means nothing
            sys.exit(f"--checkpoint {path} is of a run with {theirs}, not {ours}: use another name")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, samples_done = state["position"]
        # Where the global batch has changed, this rounds up, so that no sample is used twice.
        steps_done = min(steps, math.ceil(samples_done / global_batch))
        log(args, resumed=f"from {path}", epoch=epoch + 1, step=steps_done)
    return epoch, steps_done


def positive(kind, or_zero=False):
    """Return a type for argparse, whose errors read `invalid positive int value: '-1'`."""

    def parse(text):
        value = kind(text)
        if not (0 < value < math.inf or (or_zero and value == 0)):  # nan is neither
            raise ValueError
        return value

    parse.__name__ = f"{'non-negative' if or_zero else 'positive'} {kind.__name__}"
    return parse


def parse_args():
    """Return the flags. If one is malformed, argparse names it, and exits with code 2."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add, count, rate = parser.add_argument, positive(int), positive(float)
    add("--epochs", type=positive(int, or_zero=True), default=3, metavar="N", help="0: only test")
    add("--batch-size", type=count, default=128, metavar="N", help="samples per forward pass")
    add("--accum-steps", type=count, default=1, metavar="N", help="forward passes per step")
    add("--lr", type=rate, default=3e-3, help="peak learning rate")
    add("--scale-lr", action="store_true", help="for SGD: --lr x global batch / 256 (Goyal et al.)")
    add("--clip-grad-norm", type=positive(float, or_zero=True), default=0, help="limit; 0 is off")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of training; tests are fp32")
    add("--dataset", choices=("mnist", "synthetic"), default="mnist", help="synthetic: no files")
    add("--data-dir", type=Path, default="data", metavar="DIR", help="MNIST is, or goes, there")
    add("--train-size", type=count, metavar="N", help="the first N training images; None is all")
    add("--seed", type=positive(int, or_zero=True), default=0, help="of weights, order, images")
    add("--deterministic", action="store_true", help="the same bits on every run, on GPUs too")
    add("--backend", help="None is nccl on GPUs, gloo on CPUs")
    add("--timeout", type=rate, default=300, help="seconds a collective may wait")
    add("--log-interval", type=count, default=20, metavar="N", help="steps between two reports")
    add("--metrics", type=Path, default=os.devnull, metavar="FILE", help="JSON lines, appended")
    add("--checkpoint", type=Path, metavar="FILE", help="save to it; resume from it if it exists")
    add("--save-every", type=count, default=math.inf, metavar="N", help="steps; also each epoch")
    args = parser.parse_args()
    if args.save_every < math.inf and not args.checkpoint:
        parser.error("--save-every needs --checkpoint FILE")
    return args


if __name__ == "__main__":
    main(parse_args())  # not parsed in `main`, as @record would swallow the exit of --help
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a late SIGUSR1 would end this process
    dist.destroy_process_group()
