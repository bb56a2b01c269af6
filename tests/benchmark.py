"""How fast: a step of the scripts against plain DDP, the textbook and no synchronisation at all; how far it scales.

    python tests/benchmark.py                                      # on GPUs, or on CPUs where there are none
    python tests/benchmark.py --processes 2 --rounds 20            # more exact, for two processes only
    python tests/benchmark.py --batch-size 512 --precision bf16    # flags of train_ddp.py go to the scripts' steps

All ways are measured interleaved in the same processes: a round is a few steps of each, in random order. The speed-up
is the median of the ratios within each round. The images are synthetic. Each process has one CPU thread.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_ddp
import train_manual_ddp

LIMIT, SCRIPT, DEFAULTS = "no synchronisation", "train_ddp.py", "DDP at its defaults"
SYNCS = ["--sync bucketed", "--sync flat", "--sync per-parameter"]
TEXTBOOK, TEXTBOOK_DDP = "textbook, by hand", "textbook, DDP"
RULE = "| --- | --- | --- | --- |"


class TextbookMNIST(datasets.MNIST):
    """torchvision's data set, which makes each image through PIL when it is asked for; but from memory."""

    def __init__(self, images, labels):
        self.data, self.targets, self.target_transform = torch.from_numpy(images), labels, None
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])


def textbook_step(way, indices, device, args):
    """Return a function that takes a step as tutorials do: no flag makes it faster."""
    data = TextbookMNIST(*train_ddp.synthesize(args.seed, 0, args.train_size or train_ddp.TRAIN_IMAGES))
    batches = iter(DataLoader(data, args.batch_size, sampler=cycle(indices)))
    model = train_ddp.build_model().to(device)
    forward = DistributedDataParallel(model) if way == TEXTBOOK_DDP else model
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        for images, labels in islice(batches, args.accum_steps):
            loss = torch.nn.functional.cross_entropy(forward(images.to(device)), labels.to(device))
            loss.backward()
        for p in model.parameters() if way == TEXTBOOK else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        loss.item()  # for a report in every step: a GPU has to finish first

    return step


def script_step(way, train_set, indices, device, args):
    """Return a function that takes a step as the scripts do, from reading the batch to the optimizer."""
    batches = train_ddp.load_batches(train_set, cycle(indices), device, args)
    model = train_ddp.build_model().to(device)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True)
    if way in SYNCS:
        averager = train_manual_ddp.GradientAverager(model, way.split()[1])
        return lambda: train_manual_ddp.train_step(model, averager, optimizer, islice(batches, args.accum_steps), args)
    model.no_sync = contextlib.nullcontext  # DDP has one of its own
    ddp = model if way == LIMIT else DistributedDataParallel(model, gradient_as_bucket_view=way == SCRIPT)
    ddp.broadcast_buffers = way == DEFAULTS
    return lambda: train_ddp.train_step(ddp, optimizer, islice(batches, args.accum_steps), args)


def measure(args, rounds, steps_per_turn):
    """Under torchrun: print, as JSON, a list for each way: the seconds per step in every round."""
    rank, local_rank, _, device = train_ddp.setup(args)
    torch.set_num_threads(1)
    train_set, _ = train_ddp.load_data(args, rank, local_rank, device)
    indices = list(DistributedSampler(train_set, seed=args.seed, drop_last=True))
    steps = {way: script_step(way, train_set, indices, device, args) for way in (LIMIT, SCRIPT, DEFAULTS, *SYNCS)}
    steps |= {way: textbook_step(way, indices, device, args) for way in (TEXTBOOK, TEXTBOOK_DDP)}

    def clock():
        if device.type != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()
        return time.perf_counter()

    rng = random.Random(0)  # the same order on all ranks
    turns = [way for _ in range(1 + rounds) for way in rng.sample(list(steps), len(steps))]
    seconds = {way: [] for way in steps}
    for way in tqdm(turns, unit="turn", disable=None if rank == 0 else True):
        start = clock()
        for _ in range(steps_per_turn):
            steps[way]()
        seconds[way].append((clock() - start) / steps_per_turn)
    if rank == 0:  # in the first round, --compile compiles and DDP lays out its buckets: that does not count
        print(json.dumps({way: values[1:] for way, values in seconds.items()}))
    dist.destroy_process_group()


def spread(values, form):
    """Return the median and the interquartile range."""
    low, median, high = (form.format(value) for value in np.percentile(values, (25, 50, 75)))
    return f"{median} ({low} to {high})"


def main():
    own_flags = sys.argv[1:]
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="All other flags go to train_ddp.py.")
    parser.add_argument("--processes", nargs="+", type=int, metavar="N", help="default: 1, 2, 4, ...")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each way; default: 10")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a turn; default: 5")
    options, flags = parser.parse_known_args()
    sys.argv[1:] = [*flags, "--dataset", "synthetic"]
    args = train_ddp.parse_args()
    if "RANK" in os.environ:
        return measure(args, options.rounds, options.steps)

    device = torch.accelerator.current_accelerator(check_available=True)
    most = torch.accelerator.device_count() if device and device.type != "mps" else os.cpu_count()
    samples = args.batch_size * args.accum_steps  # of a process in each step
    print(f"{samples} samples per process and step; median of {options.rounds} rounds (interquartile range)")
    first, scaling = None, []
    for world in options.processes or [2**i for i in range(most.bit_length())]:
        torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", f"--nproc_per_node={world}"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        result = subprocess.run([*torchrun, __file__, *own_flags], env=env, stdout=subprocess.PIPE, check=True)
        seconds = {way: np.array(values) for way, values in json.loads(result.stdout.splitlines()[-1]).items()}
        first = first or seconds
        print(f"\n| processes: {world} | ms per step | speed-up over {SCRIPT} | over {TEXTBOOK} |\n{RULE}")
        for way, values in seconds.items():
            speed_ups = [spread(seconds[base] / values, "{:.2f}") for base in (SCRIPT, TEXTBOOK)]
            print("|", " | ".join([way, spread(1000 * values, "{:.0f}"), *speed_ups]), "|", flush=True)
        efficiencies = [f"{np.median(first[way]) / np.median(seconds[way]):.0%}" for way in (SCRIPT, LIMIT)]
        speed = spread(world * samples / seconds[SCRIPT], "{:,.0f}")
        scaling.append(f"| {world} | {speed} | {' | '.join(efficiencies)} |")
    print(f"\n| processes | samples/s of {SCRIPT} | efficiency | efficiency of {LIMIT} |\n{RULE}")
    print(*scaling, sep="\n")


if __name__ == "__main__":
    main()
