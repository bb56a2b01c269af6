"""How fast: a step of the scripts against DDP at its defaults and no synchronisation at all; how far it scales.

    python tests/benchmark.py                                  # on GPUs, or on CPUs where there are none
    python tests/benchmark.py --processes 2 --batch-size 64    # flags of train_ddp.py go to the scripts' steps
    python tests/benchmark.py --link none 2.5gbit 1gbit        # between two hosts: what is overlap worth?

A round is a few steps of each way, interleaved in the same processes; a ratio is the median of those in each round.
Images are synthetic; a process has one CPU thread. The hosts of --link (Linux, root) are namespaces that share a GPU.
"""

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_ddp
import train_manual_ddp

LIMIT, SCRIPT, DEFAULTS = "no synchronisation", "train_ddp.py", "DDP at its defaults"
SYNCS = ["--sync bucketed", "--sync flat", "--sync per-parameter"]


def print_table(*rows):
    """Print a table. Its first row is the header."""
    print()
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print("|", " | ".join(row), "|", flush=True)


def spread(values, digits=0):
    """Return the median and the interquartile range."""
    low, median, high = (f"{value:,.{digits}f}" for value in np.percentile(values, (25, 50, 75)))
    return f"{median} ({low} to {high})"


def endless_batches(data, indices, device, args):
    """Yield full batches without end, in epochs of a hundred, however many images there are."""
    endless = cycle(indices)
    while True:
        yield from train_ddp.load(data, list(islice(endless, 100 * args.batch_size)), device, args)


def script_step(way, train_set, indices, device, args):
    """Return a function that takes a step as the scripts do, from reading the batch to the optimizer."""
    batches = endless_batches(train_set, indices, device, args)
    model = train_ddp.build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True)
    if way in SYNCS:
        averager = train_manual_ddp.GradientAverager(model, way.split()[1])
        return lambda: train_manual_ddp.train_step(model, averager, optimizer, args.lr, batches, device, args)
    model.no_sync = contextlib.nullcontext  # DDP has one of its own
    ddp = model if way == LIMIT else DistributedDataParallel(model, gradient_as_bucket_view=way == SCRIPT)
    return lambda: train_ddp.train_step(ddp, optimizer, args.lr, batches, device, args)


def rate(text):
    """Return the rate of a link, such as 2.5gbit, 100mbit or none (no limit), in Mbit/s."""
    return float(text.replace("gbit", "e3").replace("mbit", "").replace("none", "inf"))


def limit(link):
    """Return the command that limits what a host sends to the rate of the link, in Mbit/s."""
    queue = "noqueue" if link == math.inf else f"tbf rate {link}mbit burst 1mb latency 200ms"
    return ["tc", "qdisc", "replace", "dev", "eth0", "root", *queue.split()]


def measure(args, options):
    """In each process: measure. Rank 0 prints, as JSON, for each link and way the ms per step in every round."""
    torch.set_num_threads(1)
    rank, local_rank, _, device = train_ddp.setup(args)
    train_set, _ = train_ddp.load_data(args, rank, local_rank, device)
    indices = list(DistributedSampler(train_set, seed=args.seed, drop_last=True))
    ways = (LIMIT, SCRIPT, *SYNCS, DEFAULTS)
    steps = {way: script_step(way, train_set, indices, device, args) for way in ways}

    def clock():
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    rng = random.Random(0)  # the same order on all ranks
    ms = {link: {way: [] for way in steps} for link in options.link or [math.inf]}
    turns = [(link, way) for link in ms for way in steps]
    turns = [turn for _ in range(1 + options.rounds) for turn in rng.sample(turns, len(turns))]
    for link, way in tqdm(turns, unit="turn", disable=None if rank == 0 else True):
        if options.link:
            subprocess.run(limit(link), check=True)
        start = clock()
        for _ in range(options.steps):
            steps[way]()
        ms[link][way].append(1000 * (clock() - start) / options.steps)
    if rank == 0:  # the first round does not count, as DDP assigns parameters to buckets anew in it
        print(json.dumps({link: {way: ms[link][way][1:] for way in steps} for link in ms}))
    dist.destroy_process_group()


def torchrun(world, *command):
    """Run a script in `world` processes with one CPU thread each. Return what rank 0 prints, as JSON, at the end."""
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", f"--nproc_per_node={world}", *command]
    return json.loads(subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).splitlines()[-1])


def on_two_hosts(links, command):
    """As torchrun(), in one process on each of two hosts, whose link has at first the last of these rates."""
    import pytest
    from cluster import TOOLS, Network, require

    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.213.0.10", "MASTER_PORT": "999"}
    env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    try:
        require(*TOOLS, "tc")
        with tempfile.TemporaryDirectory() as folder, Network.up(Path(folder)) as network:
            # Some kernels have bbr as default, which takes CPU time to pace what it sends. Some have no tbf.
            for setting in (["sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"], *map(limit, links)):
                for node in network.nodes:
                    node.must(*setting)
            node0, node1 = (node.inside(sys.executable, *command) for node in network.nodes)
            subprocess.Popen(node1, env=env | {"RANK": "1"})  # its host's end ends it, too
            return json.loads(subprocess.check_output(node0, env=env | {"RANK": "0"}).splitlines()[-1])
    except (pytest.skip.Exception, AssertionError) as error:  # of require(), must()
        sys.exit(f"--link: {error}")


def compare_links(links, command):
    """Measure on two hosts. Print a table, which has a column for each link between them."""
    results = on_two_hosts(links, command).values()
    rows = [[way, *(spread(ms[way]) for ms in results)] for way in (LIMIT, SCRIPT, *SYNCS, DEFAULTS)]
    megabits = sum(p.nbytes for p in train_ddp.build_model().parameters()) * 8 / 1e6
    times = [1000 * megabits / link for link in links]  # as W is 2
    paper = [f"{np.median(ms[LIMIT]) + t:,.0f}" if t else "" for ms, t in zip(results, times, strict=True)]
    rows.append(["flat, on paper: C + t", *paper])
    rows.append(["flat / bucketed", *(spread(np.divide(ms[SYNCS[1]], ms[SYNCS[0]]), 2) for ms in results)])
    names = ["no limit" if link == math.inf else f"{link / 1000:g} Gbit/s" for link in links]
    print_table(["ms per step, link of", *names], *rows)


def main():
    command = [Path(__file__).resolve(), *sys.argv[1:]]
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="All other flags go to train_ddp.py.")
    parser.add_argument("--processes", nargs="+", type=int, metavar="N", help="default: 1, 2, 4, ...")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each way; default: 10")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps of a turn; default: 3")
    parser.add_argument("--link", nargs="+", type=rate, metavar="RATE", help="such as: none 2.5gbit 1gbit")
    options, flags = parser.parse_known_args()
    sys.argv[1:] = [*flags, "--dataset", "synthetic"]
    args = train_ddp.parse_args()
    if "RANK" in os.environ:
        return measure(args, options)
    samples = args.batch_size * args.accum_steps  # of a process in each step
    print(f"{samples} samples per process and step; median of {options.rounds} rounds (interquartile range)")
    if options.link:
        return compare_links(options.link, command)
    most = torch.cuda.device_count() or os.cpu_count()
    scaling = []
    for world in options.processes or [2**i for i in range(most.bit_length())]:
        (ms,) = torchrun(world, *command).values()
        rows = [[way, spread(ms[way]), spread(np.divide(ms[DEFAULTS], ms[way]), 2)] for way in ms]
        print_table([f"processes: {world}", "ms per step", f"times as fast as {DEFAULTS}"], *rows)
        scaling.append([f"{world}", spread(1000 * world * samples / np.array(ms[SCRIPT]))])
    print_table(["processes", f"samples/s of {SCRIPT}"], *scaling)


if __name__ == "__main__":
    main()
