"""Train ResNet18 on MNIST, data-parallel, with torch's DistributedDataParallel (DDP).

    python train_ddp.py                                      # one process
    torchrun --standalone --nproc_per_node=2 train_ddp.py    # two; =gpu: one for each GPU
    ... train_ddp.py --dataset synthetic                     # without a download
    ... train_ddp.py --checkpoint ck.pt                      # goes on from ck.pt, if it is there

Each process (a rank; there are W of them) holds the whole model, and trains on its own part of
every batch. The ranks average their gradients, so all take the same optimizer step, and their
weights stay equal. They do so by collectives: calls that all ranks make together, such as an
all-reduce, which gives each the sum of all. NCCL carries them out between GPUs, Gloo between CPUs.

Begin with `main`, at the end. Seven changes make a script distributed. They have the numbers of
the README: 1 and 2 stand in `setup`, 6 in `evaluate`, the others in `main`. (Other collectives
serve downloads, reports and checkpoints.) train_manual_ddp.py is this script with
DistributedSampler and DistributedDataParallel written by hand; their diff is the next lesson.
For your own model and data, change `build_model`, `load_data` and `load_batches`; the loss is in
`train_step` and `evaluate`.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from tqdm import tqdm

TRAIN_IMAGES, TEST_IMAGES, CLASSES = 60_000, 10_000, 10
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, scaled to [0, 1]
WARMUP = 0.3  # the part of the training in which the learning rate rises
TESTED = "test loss {test_loss:.4f}  accuracy {test_accuracy:.2%} of {test_samples:,} test images"


def parse_args():
    """Return the flags. A mistake ends the process with a line that names it, and exit code 2."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--epochs", type=int, default=3, metavar="N", help="0 evaluates and exits")
    add("--batch-size", type=int, default=128, metavar="N", help="samples per forward pass")
    add("--accum-steps", type=int, default=1, metavar="N", help="forward passes per step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--scale-lr", action="store_true", help="--lr x global batch / 256 (Goyal et al., 2017)")
    add("--clip-grad-norm", type=float, default=0, help="limit; 0 is off")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--dataset", choices=("mnist", "synthetic"), default="mnist", help="synthetic: no files")
    add("--data-dir", type=Path, default="data", metavar="DIR", help="MNIST is, or goes, there")
    add("--train-size", type=int, metavar="N", help="the first N training images; None is all")
    add("--seed", type=int, default=0, help="of weights, order, synthetic images")
    add("--deterministic", action="store_true", help="the same bits on every run, on GPUs too")
    add("--backend", help="None is nccl on NVIDIA's GPUs, gloo on CPUs")
    add("--timeout", type=float, default=300, help="seconds a collective may wait")
    add("--log-interval", type=int, default=20, metavar="N", help="steps between reports")
    add("--metrics", type=Path, default=os.devnull, metavar="FILE", help="JSON lines, appended")
    add("--checkpoint", type=Path, metavar="FILE", help="save to it; go on from it if it is there")
    add("--save-every", type=int, default=0, metavar="N", help="steps; 0: only after each epoch")
    args = parser.parse_args()
    may_be_zero = ("epochs", "clip_grad_norm", "seed", "save_every")
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (value > 0 or (value == 0 and name in may_be_zero)):
            parser.error(f"--{name.replace('_', '-')} {value}: give a positive number")
    if args.save_every and not args.checkpoint:
        parser.error("--save-every needs --checkpoint FILE")
    return args


def setup(args):
    """Join the process group. Return rank, local rank (on this node), world size and device."""
    if "RANK" not in os.environ:  # not started by torchrun: a world of one; port 0 is any free one
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])

    # 1. Take the device of your own: the GPU with the number of the local rank, or the CPU.
    device, device_id = torch.device("cpu"), None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator and accelerator.type != "mps":  # Apple's GPUs have no backend
        gpus = torch.accelerator.device_count()
        if local_rank >= gpus:
            fix = "lower --nproc_per_node, or train on CPUs: CUDA_VISIBLE_DEVICES= torchrun ..."
            sys.exit(f"no GPU for local rank {local_rank}, as this node has {gpus}: {fix}")
        device = device_id = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)  # torch.cuda.set_device, for any make

    # 2. Meet the others, at MASTER_ADDR:MASTER_PORT. (device_id lets NCCL connect at once.)
    backend = args.backend or dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=device_id)
    place = f"{socket.gethostname()}, {device}, {torch.get_num_threads()} CPU threads, {backend}"
    sys.stderr.write(f"rank {rank} of {world_size} on {place}, torch {torch.__version__}\n")
    return rank, local_rank, world_size, device


def read_mnist(folder):
    """Return MNIST's training and test set: images, uint8, (N, 28, 28); labels, int64, (N,)."""
    socket.setdefaulttimeout(5)  # seconds: a firewall may drop packets without a word
    try:
        sets = [MNIST(folder, train, download=True) for train in (True, False)]
    except Exception as error:  # a damaged file makes torchvision raise nearly anything
        fix = "put the four .gz files there, or use --dataset synthetic; delete damaged files"
        sys.exit(f"no usable MNIST in {folder}/MNIST/raw: {fix}. {error!r}")
    return [(part.data, part.targets) for part in sets]


def synthesize(seed, split, size):
    """Return images, uint8, (size, 28, 28), and labels, int64, (size,): ten noisy prototypes."""
    prototypes = np.random.default_rng(seed).standard_normal((CLASSES, 7, 7), dtype=np.float32)
    prototypes = 128 + 20 * prototypes.repeat(4, axis=1).repeat(4, axis=2)
    rng = np.random.default_rng([seed, split])
    labels = rng.integers(CLASSES, size=size)
    images = prototypes[labels] + 64 * rng.standard_normal((size, 28, 28), dtype=np.float32)
    return images.clip(0, 255).astype(np.uint8), labels


def load_data(args, rank, local_rank, device):
    """Return training and test set: images, float32, (1, 28, 28); labels, int64; on `device`."""
    sets, datasets = None, []
    if args.dataset == "synthetic":
        sets = [synthesize(args.seed, 0, TRAIN_IMAGES), synthesize(args.seed, 1, TEST_IMAGES)]
    # Three turns, with a wait after each. In the first, rank 0 downloads. In the second, one rank
    # of each node does, if it does not see rank 0's files. In the third, all others read.
    for my_turn in (rank == 0, local_rank == 0, True):
        if my_turn and not sets:
            sets = read_mnist(args.data_dir)
        dist.barrier()  # a collective: nobody goes on before all are here
    for (images, labels), size in zip(sets, (args.train_size, None), strict=True):
        images = torch.as_tensor(images[:size], device=device).unsqueeze(1) / 255
        labels = torch.as_tensor(labels[:size], device=device)
        datasets.append(TensorDataset((images - PIXEL_MEAN) / PIXEL_STD, labels))
    return datasets


def load_batches(dataset, indices, device, args):
    """Yield these samples in batches: images, (B, 1, 28, 28), and labels, (B,), on `device`."""
    # The images are in memory, so a batch is one indexing. For files, it would be (see the README)
    # DataLoader(dataset, args.batch_size, sampler=indices, num_workers=...).
    for batch in torch.tensor(indices, dtype=torch.int64, device=device).split(args.batch_size):
        yield dataset[batch]


def build_model():
    """Return ResNet18 from images, float32, (B, 1, 28, 28), to logits, float32, (B, CLASSES)."""
    model = resnet18(num_classes=CLASSES)
    model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def lr_factor(progress):
    """Return the part of the peak learning rate at `progress`, 0 to 1: warm-up, then a cosine."""
    if progress < WARMUP:
        return progress / WARMUP
    return (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


def train_step(ddp, optimizer, batches, args):
    """Take one optimizer step, over `accum_steps` batches. Return this rank's loss, float32."""
    mean_loss = 0
    for i in range(1, args.accum_steps + 1):
        images, labels = next(batches)
        # Gradients add up on this rank until the last pass, in which all ranks average: change 4.
        with contextlib.nullcontext() if i == args.accum_steps else ddp.no_sync():
            with torch.autocast(images.device.type, torch.bfloat16, args.precision == "bf16"):
                logits = ddp(images)  # which prepares the averaging; `model(images)` would not
            loss = F.cross_entropy(logits.float(), labels) / args.accum_steps
            loss.backward()
        mean_loss += loss.detach()
    if args.clip_grad_norm:
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), args.clip_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss


@torch.no_grad()
def evaluate(model, test_set, device, args):
    """Return loss and accuracy on the whole test set, the same on all ranks, for --metrics."""
    # 6. Evaluate together: each rank takes every W-th image, then all add up their counts.
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    for buffer in model.buffers():  # BatchNorm's running statistics: each rank saw other images
        dist.broadcast(buffer, src=0)  # all take those of rank 0
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in load_batches(test_set, share, device, args):
        # Not through the wrapper: its forward may be a collective; some ranks have fewer batches.
        logits = model(images)
        totals[0] += F.cross_entropy(logits, labels, reduction="none").double().sum()
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    if count != len(test_set):
        sys.exit(f"{count:.0f} of {len(test_set)} test images were counted: a rank is missing")
    if not math.isfinite(loss):
        sys.exit(f"the test loss is {loss / count}: try a lower --lr, or --clip-grad-norm 1")
    return {
        "test_loss": loss / count,
        "test_accuracy": correct / count,
        "test_samples": len(test_set),
    }


def weights_sha256(model):
    """Return the SHA-256 of a bare module's state, parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().ravel().view(torch.uint8).numpy())
    return digest.hexdigest()


# Checkpoints and signals. Skip them on a first reading, and go on with `main`.

stop_signals = []  # those that have reached this process: at the next report, all ranks stop


def check_launch():
    """End a start that would go wrong in silence. Under torchrun, make this process die with it."""
    if "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        sys.exit(
            "srun has started several worlds of one: use torchrun, as slurm_submit_ddp.sh does"
        )
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        fix = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts=..."
        sys.exit(f"a restarted process would look for the dead ones, and wait: use {fix}")
    if dist.is_torchelastic_launched() and sys.platform == "linux":
        # An orphan would write over the checkpoint of the next run. (1 is PR_SET_PDEATHSIG.)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def on_signal(number, frame):
    stop_signals.append(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from now on, Ctrl-C ends the process at once


def data_flags(args):
    return f"--dataset {args.dataset} --train-size {args.train_size} --seed {args.seed}"


def save_checkpoint(args, model, optimizer, position):
    """Replace the file of --checkpoint: it is whole at any moment, the old one or the new one."""
    if not args.checkpoint:
        return
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        sys.exit("the weights are not finite, and were not saved: try a lower --lr")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": position,
        "data": data_flags(args),
    }
    temporary = f"{args.checkpoint}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # all of it is on the disk before it gets the name
    os.replace(temporary, args.checkpoint)


def load_checkpoint(args, model, optimizer):
    """Load what was saved last. Return its position: epochs done, samples used of the next."""
    path, state = args.checkpoint, None
    if path and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()  # if we cannot write there, this raises
        try:
            if path.exists():
                state = torch.load(path, map_location="cpu")
        except Exception as error:  # a damaged file makes torch.load raise nearly anything
            sys.exit(f"--checkpoint {path} is damaged: delete it, or give another name. {error!r}")
    box = [state]
    # Other nodes may not see the file. (DDP sends rank 0's weights, but no optimizer state.)
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0, 0
    ours, theirs = data_flags(args), box[0].get("data")
    if ours != theirs:  # in another order, the position means nothing
        sys.exit(f"--checkpoint {path} is of a run with {theirs}, not {ours}: give another name")
    model.load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    return box[0]["position"]


def main():
    check_launch()
    args = parse_args()
    rank, local_rank, world_size, device = setup(args)
    metrics = (args.metrics if rank == 0 else Path(os.devnull)).open("a")

    def say(line, file=sys.stderr):
        if rank == 0:
            tqdm.write(line + "\n", file=file, end="")  # one write, above the bar, if there is one
            file.flush()

    train_set, test_set = load_data(args, rank, local_rank, device)
    global_batch = world_size * args.batch_size * args.accum_steps  # samples of one optimizer step
    steps = len(train_set) // global_batch  # of an epoch
    if steps == 0:
        sys.exit(f"a step takes {global_batch} of {len(train_set)} samples: lower --batch-size")
    say(
        f"global batch {global_batch} = {world_size} processes x {args.batch_size} samples "
        f"x {args.accum_steps} passes"
    )
    # 3. Deal out the data: of one shuffled order, each rank takes every W-th sample.
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)

    torch.manual_seed(args.seed)  # for the weights; below, each step seeds the ranks differently
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has to be told as well
        torch.use_deterministic_algorithms(True)
    model = build_model().to(device)
    if args.compile:
        model.compile()
    peak_lr = args.lr * global_batch / 256 if args.scale_lr else args.lr
    # The default second beta, 0.999, averages over a thousand steps, as many as the run has.
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.99), fused=True)
    epoch, samples = load_checkpoint(args, model, optimizer)
    # Steps that an earlier run has taken of this epoch; rounded up if the global batch has changed.
    first = min(steps, math.ceil(samples / global_batch))
    if epoch or first:
        say(f"going on from {args.checkpoint} after {epoch} epochs and {first} of {steps} steps")
    # 4. Start from equal weights, those of rank 0, and average the gradients in each step.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # it copies no averages
    # Else ddp(...) broadcasts BatchNorm's statistics in each step; once, in `evaluate`, is enough.
    ddp.broadcast_buffers = False  # (Given as an argument, it makes torch 2.14 warn.)

    if args.checkpoint:  # else there is nothing to save, and a signal just ends the process
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, on_signal)
    if epoch >= args.epochs:
        say(TESTED.format(**evaluate(model, test_set, device, args)), sys.stdout)

    while epoch < args.epochs:
        model.train()
        sampler.set_epoch(epoch)  # 5. Shuffle again: without this, every epoch has the same order.
        # After a restart, skip what was used: of each rank, `first` steps' worth of its indices.
        indices = list(sampler)[first * global_batch // world_size :]
        batches = load_batches(train_set, indices, device, args)
        loss_sum, reported = 0, first  # of the steps since the last report; when that was
        epoch_start = last_report = time.perf_counter()
        hidden = None if rank == 0 else True  # None: hidden where stderr is no terminal
        with tqdm(total=steps, initial=first, leave=False, disable=hidden) as bar:
            for step in range(first + 1, steps + 1):
                global_step = epoch * steps + step
                # Progress at mid-step, so that neither the first step nor the last has a rate of 0.
                lr = peak_lr * lr_factor((global_step - 0.5) / (args.epochs * steps))
                for group in optimizer.param_groups:
                    group["lr"] = lr
                # What a model draws (dropout) differs by rank and step; a restart draws the same.
                torch.manual_seed(hash((args.seed, global_step, rank)))
                loss_sum += train_step(ddp, optimizer, batches, args)
                bar.update()
                last = step == steps  # which is saved below, after the evaluation
                save_now = args.save_every and global_step % args.save_every == 0 and not last
                report_now = step % args.log_interval == 0 or save_now or last
                if not report_now:  # on all ranks alike, or some would wait in the all-reduce below
                    continue

                # A report: by one all-reduce, every rank learns the loss of all. The other two
                # numbers can wait for a second reading: how many signals to stop have come, and
                # how many ranks took part: when one has died, NCCL may return without the sum.
                report = torch.tensor([loss_sum, len(stop_signals), 1], device=device)
                dist.all_reduce(report)
                loss, stop, ranks = report.tolist()
                loss /= world_size * (step - reported)
                if ranks != world_size:
                    sys.exit(f"only {ranks:.0f} of {world_size} ranks are left: nothing was saved")
                if not math.isfinite(loss):
                    sys.exit(f"loss {loss} in step {step}: try a lower --lr, or --clip-grad-norm 1")
                if rank == 0 and (save_now or stop):  # as in 7, below
                    save_checkpoint(args, model, optimizer, (epoch, step * global_batch))
                now = time.perf_counter()
                speed = (step - reported) * global_batch / (now - last_report)
                loss_sum, reported, last_report = 0, step, now
                status = f"lr {lr:.2e}  loss {loss:.4f}  {speed:,.0f} samples/s"
                say(f"epoch {epoch + 1}/{args.epochs}  step {step}/{steps}  {status}")
                if stop:
                    say(f"stopped by a signal, saved to {args.checkpoint}: start it again to go on")
                    return

        result = {"epoch": epoch + 1, "step": (epoch + 1) * steps}
        line = "epoch {epoch}  "
        if first < steps:  # else an earlier run has taken them all, and was stopped here
            speed = (steps - first) * global_batch / (time.perf_counter() - epoch_start)
            result |= {"lr": lr, "train_loss": loss, "samples_per_second": speed}
            line += "train loss {train_loss:.4f}  {samples_per_second:,.0f} samples/s  "
        result |= evaluate(model, test_set, device, args)
        say(json.dumps(result), metrics)
        say((line + TESTED).format(**result), sys.stdout)
        epoch, first = epoch + 1, 0
        # 7. Let one rank write, and put no collective behind such an `if`: the others skip it.
        if rank == 0:
            save_checkpoint(args, model, optimizer, (epoch, 0))

    hashes = [None] * world_size
    dist.all_gather_object(hashes, weights_sha256(model))
    if len(set(hashes)) > 1:
        sys.exit(f"the ranks have ended on different weights: {', '.join(h[:8] for h in hashes)}")
    say(f"weights sha256 {hashes[0]}, the same on every rank", sys.stdout)
    result = {"weights_sha256": hashes[0], "world_size": world_size}
    say(json.dumps(result | {"global_batch_size": global_batch}), metrics)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
