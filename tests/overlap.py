"""Draw one step of `--sync flat` and one of `--sync bucketed` as Mermaid charts: what is sent during backward()?

    python tests/overlap.py                                     # two processes
    python tests/overlap.py --link 1gbit                        # on two hosts, as in benchmark.py (Linux, root)
    python tests/overlap.py --batch-size 64 --accum-steps 2     # flags of train_ddp.py go to the steps

The bar of a bucket begins when its all-reduce is called (on a GPU: begins), and ends when the bucket has arrived.
CUDA_VISIBLE_DEVICES= before the command hides a GPU, which else both hosts share.
"""

import argparse
import json
import os
import sys

import torch.distributed as dist
from benchmark import on_two_hosts, rate, script_step, torchrun, train_ddp, train_manual_ddp
from torch.autograd import DeviceType
from torch.profiler import profile


def read_step(events):
    """Return (start, end) of backward() and of each all-reduce in a step, in ms."""
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]

    def spans(name, events=events):
        found = [event.time_range for event in events if name in event.name]
        return sorted((span.start / 1000, span.end / 1000) for span in found)  # from µs

    # With --accum-steps, it is the last backward() that sends the gradients. The last loss is computed before it.
    if on_gpu:  # which runs behind the CPU: what counts is when its kernels ran
        (_, start), (stop, _) = spans("nll_loss_forward", on_gpu)[-1], spans("Optimizer.step", on_gpu)[-1]
        computing = {*spans("", on_gpu)} - {*spans("nccl", on_gpu)}
        works = [span for span in spans("nccl:all_reduce", on_gpu) if span[0] > start]
        return (start, max(end for began, end in computing if began < stop)), works
    _, start = spans("aten::cross_entropy_loss")[-1]
    nodes = [span for span in spans("autograd::engine::evaluate_function") if span[0] > start]
    # Gloo has threads of its own. In `works`, one of them is at work on a bucket; before, the bucket may have to queue.
    calls, works = spans("c10d::allreduce_"), spans("gloo:all_reduce")
    backward = nodes[0][0], max(end for _, end in nodes)
    return backward, [(call[0], work[1]) for call, work in zip(calls, works, strict=True)]


def measure():
    """In each process: profile a step of each way. Rank 0 prints, as JSON, read_step() and the sizes of the buckets."""
    args = train_ddp.parse_args()
    rank, local_rank, _, device = train_ddp.setup(args)
    train_set, _ = train_ddp.load_data(args, rank, local_rank, device)
    steps = {}
    for sync in ("flat", "bucketed"):
        step = script_step(f"--sync {sync}", train_set, range(rank, len(train_set), 2), device, args)
        for _ in range(3):
            step()
        with profile() as profiled:
            dist.barrier()  # a profiler takes a while to start
            step()
        averager = train_manual_ddp.GradientAverager(train_ddp.build_model().to(device), sync)
        steps[sync] = *read_step(profiled.events()), [bucket.flat.nbytes for bucket in averager.buckets]
    if rank == 0:
        print(json.dumps(steps))
    dist.destroy_process_group()


def draw(sync, backward, all_reduces, sizes):
    """Print the chart of a step, in ms since the beginning of its backward()."""

    def bar(name, span):
        start, end = (round(time - backward[0]) for time in span)
        print(f"    {name}, {end - start} ms : {start}, {end}")

    print(f"```mermaid\ngantt\n    title --sync {sync}: one step of rank 0, in ms\n    dateFormat x\n    axisFormat %Q")
    print("    section backward")
    bar("backward()", backward)
    print("    section all-reduce")
    for i, (size, span) in enumerate(zip(sizes, all_reduces, strict=True), 1):
        bar(f"bucket {i} ({size / 2**20:.0f} MiB)", span)
    print("```")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="All other flags go to train_ddp.py.")
    parser.add_argument("--link", type=rate, metavar="RATE", help="such as 1gbit")
    options, flags = parser.parse_known_args()
    command = sys.argv = [__file__, *flags, "--dataset", "synthetic"]
    if "RANK" in os.environ:
        measure()
    else:
        steps = on_two_hosts([options.link], command) if options.link else torchrun(2, *command)
        for sync, step in steps.items():
            draw(sync, *step)
