"""How fast: steps against DDP and against no synchronisation at all, what each change brings, and how far it scales.

    python tests/benchmark.py                               # on GPUs, or on CPUs (CUDA_VISIBLE_DEVICES= hides GPUs)
    python tests/benchmark.py --only steps --processes 2 --rounds 30
    python tests/benchmark.py --json results.json           # every single measurement as well

What is compared is measured in turns, in one session, and a ratio is the median of the ratios of all rounds. Processes
on CPUs get equally many threads at every number of processes, as if each were a machine of its own.
"""

import argparse
import copy
import functools
import json
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, Background, launch, read_metrics, run, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import MNIST

import train_ddp
import train_manual_ddp

LIMIT, DDP, MANUAL = "no synchronisation", "train_ddp.py", "train_manual_ddp.py"
DEFAULTS, FLAT, PER_PARAMETER = "DDP at its defaults", "--sync flat", "--sync per-parameter"
SYNCS = {name: name for name in (LIMIT, MANUAL, DDP, DEFAULTS, FLAT, PER_PARAMETER)}
# The textbook reads single images through PIL, and takes Adam as it comes. Each of these goes one change further.
TEXTBOOK, TEXTBOOK_DDP, ON_DEVICE, FUSED = "textbook, by hand", "textbook DDP", "+ data on the device", "+ fused AdamW"
BY_THE_BOOK = (TEXTBOOK, TEXTBOOK_DDP, ON_DEVICE, FUSED)
WAYS = {
    TEXTBOOK: TEXTBOOK,
    TEXTBOOK_DDP: TEXTBOOK_DDP,
    ON_DEVICE: ON_DEVICE,
    FUSED: FUSED,
    DEFAULTS: "+ the loop of the scripts",
    DDP: "+ DDP as train_ddp.py sets it",
    MANUAL: "or train_manual_ddp.py",
    LIMIT: "the limit: no synchronisation",
}
TWINS = {DDP: DDP, MANUAL: MANUAL}  # nothing else runs between them
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
FLAGS = (DDP, "--precision bf16", *(("--compile", "--compile --precision bf16") if COMPILER else ()))
FLAGS = {name: name for name in FLAGS}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    parts = ("steps", "twins", "flags", "scripts")
    add("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=f"of {', '.join(parts)}")
    add("--processes", nargs="+", type=int, metavar="N", help="None is 1, 2, 4, ... up to the cores or GPUs")
    add("--rounds", type=int, default=10, metavar="N", help="turns of each contestant; a third of that for scripts")
    add("--steps", type=int, default=5, metavar="N", help="of a turn; four times that for scripts")
    add("--batch-size", type=int, default=128, metavar="N", help="samples per process")
    add("--json", type=Path, metavar="FILE", help="write all measurements here")
    add("--worker", nargs=3, help=argparse.SUPPRESS)  # under torchrun: part, backend, and where to leave the results
    return parser.parse_args()


class TextbookMNIST(MNIST):
    """torchvision's data set, which makes a PIL image of each sample and a tensor of that; but from memory."""

    def __init__(self, images, labels):
        self.data, self.targets, self.target_transform = torch.from_numpy(images), labels, None
        normalize = transforms.Normalize((train_ddp.PIXEL_MEAN,), (train_ddp.PIXEL_STD,))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])


def average_by_the_book(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def make_contestant(name, args, device, place):
    """Return a function that trains `args.train_size` samples with a model and an optimizer of its own."""
    args = copy.copy(args)
    args.compile, args.precision = "--compile" in name, "bf16" if "bf16" in name else "fp32"
    torch.manual_seed(args.seed)
    model = train_ddp.build_model().to(device)
    if args.compile:
        model.compile()
    if name in (TEXTBOOK, TEXTBOOK_DDP, ON_DEVICE):
        optimizer = torch.optim.Adam(model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if name in (TEXTBOOK, TEXTBOOK_DDP):
        images, labels = train_ddp.synthesize(args.seed, 0, args.train_size)
        data = TextbookMNIST(images, labels)
        loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data), drop_last=True)
    else:
        loader, _ = (train_manual_ddp if name == MANUAL else train_ddp).load_data(args, device, *place)

    wrapped = model
    if name in (DEFAULTS, TEXTBOOK_DDP, ON_DEVICE, FUSED):
        wrapped = DistributedDataParallel(model)
    elif name in FLAGS:  # as in its main()
        ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb, gradient_as_bucket_view=True)
        ddp.broadcast_buffers = False
        wrapped = ddp
    elif name in (MANUAL, FLAT, PER_PARAMETER):
        averager = train_manual_ddp.GradientAverager(model, "bucketed" if name == MANUAL else name.split()[1])

    def train_by_the_book():
        wrapped.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images), labels).backward()
            if name == TEXTBOOK:
                average_by_the_book(model)
            optimizer.step()

    def train_as_the_scripts():
        rest = (optimizer, loader, train_ddp.Progress(), None, None, device, args)
        if name in (MANUAL, FLAT, PER_PARAMETER):
            train_manual_ddp.train_epoch(model, averager, *rest)
        elif name == LIMIT:  # nor does it tell the others of signals
            with mock.patch("torch.distributed.all_reduce"):
                train_ddp.train_epoch(model, *rest)
        else:
            train_ddp.train_epoch(wrapped, *rest)

    return train_by_the_book if name in BY_THE_BOOK else train_as_the_scripts


def work(options):
    """Under torchrun: measure a part's contestants in turns. Rank 0 writes the seconds a step, by name."""
    part, backend, results = options.worker
    rank, local_rank, world_size, local_size = train_ddp.read_world()
    sys.argv = [DDP, "--dataset", "synthetic", "--epochs", "1", "--batch-size", str(options.batch_size)]
    sys.argv += ["--train-size", str(options.steps * options.batch_size * world_size), "--backend", backend]
    args = train_ddp.parse_args()
    device = train_ddp.choose_device(local_rank, local_size)
    train_ddp.join_group(args, device, rank, world_size)

    def meet():
        if device.type != "cpu":
            torch.accelerator.synchronize()
        dist.all_reduce(torch.zeros(1))

    images = functools.cache(train_ddp.synthesize)  # the same for all contestants
    train_ddp.synthesize = train_manual_ddp.synthesize = images
    train_ddp.say = train_manual_ddp.say = lambda *_: None
    names = {"steps": WAYS | SYNCS, "twins": TWINS, "flags": FLAGS, "limit": [LIMIT]}[part]
    train = {name: make_contestant(name, args, device, (rank, local_rank, world_size)) for name in names}
    seconds = {name: [] for name in names}
    for round_ in range(-1, options.rounds):
        for name in random.Random(round_).sample([*names], len(names)):  # the same order on all ranks
            meet()
            began = time.perf_counter()
            train[name]()
            meet()
            if round_ >= 0:  # in the first, DDP lays its buckets out, and --compile compiles
                seconds[name].append((time.perf_counter() - began) / options.steps)
    if rank == 0:
        Path(results).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def check(result):
    """Return the result of a command that has not failed; raise RuntimeError with what it says of itself."""
    if result.returncode:
        said = result.stderr.splitlines()
        raise RuntimeError(next((line for line in said if "error: " in line or "Error: " in line), said[-1]))
    return result


def measure_steps(part, backend, processes, threads, options, rounds=None):
    """Return the seconds a step of a part's contestants, a list of all rounds, by name."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        flags = ("--rounds", rounds or options.rounds, "--steps", options.steps, "--batch-size", options.batch_size)
        command = (*start(processes), __file__, *flags, "--worker", part, backend, results)
        check(run(command, gpu=True, timeout=None, **threads))
        return json.loads(results.read_text())


def measure_script(script, backend, processes, batch_size, size, threads):
    """Train an epoch of `size` samples; return the lines of --metrics as one dict."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        flags = ("--dataset", "synthetic", "--epochs", 1, "--batch-size", batch_size, "--train-size", size)
        flags += ("--backend", backend, "--metrics", metrics)
        check(launch(ROOT / script, *flags, nproc=processes, gpu=True, timeout=None, **threads))
        epoch, end = read_metrics(metrics)
        return end | epoch  # the samples/s of the training, without the evaluation


def measure_start(backend, processes, batch_size, threads):
    """Return the seconds from the launch of train_ddp.py to the end of its first step."""
    flags = ("--dataset", "synthetic", "--batch-size", batch_size, "--train-size", processes * batch_size)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = (*start(processes), ROOT / DDP, *flags, "--backend", backend)
        with Background(*command, log=Path(folder) / "log", gpu=True, **threads) as job:
            job.wait_for("step 1/1", timeout=600)
            return time.perf_counter() - began


def measure_scripts(backend, worlds, threads, options):
    """Return a list of one dict a round: what was measured, by kind and number of processes."""
    most, batch = max(worlds), options.batch_size
    size = 4 * options.steps * batch  # of an epoch of one process
    measures = {
        "weak": lambda n: measure_script(DDP, backend, n, batch, n * size, threads),
        "strong": lambda n: measure_script(DDP, backend, n, batch * most // n, most * size, threads),
        "twin": lambda n: measure_script(MANUAL, backend, n, batch, n * size, threads),
        "start": lambda n: measure_start(backend, n, batch, threads),
        "limit": lambda n: measure_steps("limit", backend, n, threads, options, rounds=1)[LIMIT][0],
    }
    turns = [(kind, n) for kind in measures for n in worlds if (kind, n) != ("strong", most)]  # which is weak as well
    rounds = []
    for _ in range(max(1, options.rounds // 3)):
        rounds.append({kind: {} for kind in measures})
        for kind, n in random.sample(turns, len(turns)):
            rounds[-1][kind][n] = measures[kind](n)
        rounds[-1]["strong"][most] = rounds[-1]["weak"][most]
    return rounds


def spread(values, form="{:.0f}"):
    """Return the median of some values, and the range of their middle half."""
    low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return f"{form.format(median)} ({form.format(low)} to {form.format(high)})"


def ratios(values, others):
    """Return the ratio of each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def print_table(title, head, rows):
    print(f"\n{title}\n")
    for row in (head, ["---"] * len(head), *rows):
        print("|", " | ".join(row), "|")


def print_steps(title, seconds, names, reference):
    """Print a table of the contestants `names`, with their samples/s as multiples of those of `reference`."""
    rows = []
    for name, words in names.items():
        speed_up = spread(ratios(seconds[reference], seconds[name]), "{:.3f}")
        rows.append((words, spread([1000 * s for s in seconds[name]]), speed_up))
    print_table(title, ("", "ms a step", "speed-up"), rows)


def print_scripts(title, rounds, worlds):
    """Print a table of what `measure_scripts` returns."""
    first, rows = worlds[0], []
    for kind, script in (("weak", DDP), ("strong", f"{DDP}, fixed global batch"), ("twin", MANUAL)):
        for n in worlds:
            speeds, alone = ([found[kind][i]["samples_per_second"] for found in rounds] for i in (n, first))
            efficiency = spread([first / n * ratio for ratio in ratios(speeds, alone)], "{:.0%}")
            limits = ratios(*([found["limit"][i] for found in rounds] for i in (first, n)))
            memory = max(found[kind][n]["peak_memory_bytes"] for found in rounds) / 2**20
            begun = f"{spread([found['start'][n] for found in rounds], '{:.1f}')} s"
            once = (spread(limits, "{:.0%}"), begun) if kind == "weak" else ("-", "-")
            rows.append((script, str(n), spread(speeds), efficiency, once[0], f"{memory:,.0f} MiB", once[1]))
    head = ("script", "processes", "samples/s", "efficiency", "its limit", "peak memory of a process")
    print_table(title, (*head, "from launch to first step"), rows)


def main():
    options = parse_args()
    if options.worker:
        return work(options)
    device = torch.accelerator.current_accelerator(check_available=True)
    gpu = device is not None and bool(train_ddp.list_backends(device))
    device = device if gpu else torch.device("cpu")
    most = torch.accelerator.device_count() if gpu else len(os.sched_getaffinity(0))
    worlds = options.processes or [2**i for i in range(most.bit_length())]
    if not set(worlds) <= {*range(1, most + 1)} or min(options.rounds, options.steps) < 1 or options.batch_size < 2:
        sys.exit(f"error: --processes from 1 to {most} here, --rounds and --steps from 1, --batch-size from 2")
    threads = {} if gpu else dict.fromkeys(("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"), most // max(worlds))
    backends = train_ddp.list_backends(device)
    name = torch.get_device_module(device).get_device_name() if gpu else read_cpu()
    machine = f"{most} x {name}, torch {torch.__version__}"
    print(
        f"{machine}; {options.batch_size} samples a process and step; {options.steps} steps x {options.rounds} in turns"
    )
    if threads:
        print(f"CPU threads a process: {threads['OMP_NUM_THREADS']}, at every number of processes")

    problems = [f"more than {most} process{'es' * (most > 1)}: there are no more {'GPUs' if gpu else 'cores'}"]
    problems += [] if gpu else ["GPUs, and so NCCL: there are none"]
    problems += ["--compile: it needs a C++ compiler"] if "flags" in options.only and not COMPILER else []
    found = {"machine": machine, "options": {key: str(value) for key, value in vars(options).items()}}

    def measure(title, function, *arguments):
        try:
            found[title] = function(*arguments)
        except RuntimeError as error:
            problems.append(f"{title}: {error}")
        return found.get(title)

    for backend in backends:
        for n in worlds if "steps" in options.only else ():
            title = f"{n} process{'es' * (n > 1)}, {backend}"
            if seconds := measure(title, measure_steps, "steps", backend, n, threads, options):
                print_steps(f"Synchronisation, {title}", seconds, SYNCS, DDP)
                print_steps(f"What each change brings, {title}", seconds, WAYS, TEXTBOOK)
        for part, names, words in (("twins", TWINS, "The twins alone"), ("flags", FLAGS, "Flags of train_ddp.py")):
            if part in options.only:
                title = f"{words}, {max(worlds)} process{'es' * (max(worlds) > 1)}, {backend}"
                if seconds := measure(title, measure_steps, part, backend, max(worlds), threads, options):
                    print_steps(title, seconds, names, DDP)
        if "scripts" in options.only:
            title = f"Epochs of {4 * options.steps} steps, {max(1, options.rounds // 3)} in turns, {backend}"
            if rounds := measure(title, measure_scripts, backend, worlds, threads, options):
                print_scripts(title, rounds, worlds)

    print("", *(f"not measured: {problem}" for problem in problems), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found))


def read_cpu():
    """Return the name of the CPU."""
    names = re.findall(r"(?m)^model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
