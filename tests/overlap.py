r"""Draw one step of `--sync flat` and one of `--sync bucketed` as Mermaid charts, from what `--profile` has written.

    torchrun --standalone --nproc_per_node=2 train_manual_ddp.py --dataset synthetic --epochs 1 --train-size 2048 \
        --sync flat --profile traces_flat    # then the same with bucketed
    python tests/overlap.py traces_flat traces_bucketed

The bar of a bucket begins when its all-reduce is called and ends when the bucket has arrived. This reads what Gloo
writes, on CPUs. With NCCL, most of the work is GPU kernels: look at such traces in ui.perfetto.dev.
"""

import gzip
import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_manual_ddp import GradientAverager, build_model


def read_step(folder):
    """Return (start, end) of backward() and of each all-reduce in the second step that rank 0 traced, in ms."""
    trace = max(Path(folder).glob("rank0.*.pt.trace.json.gz"))  # the newest: the name holds the time
    spans = {name: [] for name in ("backward", "c10d::allreduce_", "gloo:all_reduce", "average")}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event["name"] in spans and event["ph"] == "X":
            spans[event["name"]].append((event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000))  # from µs
    average = sorted(spans["average"])[1]
    # With --accum-steps, it is the last backward() that sends the gradients.
    backward = max(span for span in spans["backward"] if span < average)
    start, end = backward[0], average[1]
    calls = sorted(span for span in spans["c10d::allreduce_"] if start < span[0] < end)
    # Gloo has threads of its own. Here, one of them is at work on a bucket; before, the bucket may have to queue.
    works = sorted(span for span in spans["gloo:all_reduce"] if start < span[0] < end)
    return backward, [(call[0], work[1]) for call, work in zip(calls, works, strict=True)]


def draw(sync, folder):
    """Print the chart of a step, in ms since the beginning of its backward()."""
    backward, all_reduces = read_step(folder)
    numbered = enumerate(zip(GradientAverager(build_model(), sync).buckets, all_reduces, strict=True), 1)
    sections = {
        "backward": [("backward()", backward)],
        "all-reduce": [(f"bucket {i} ({bucket.nbytes / 2**20:.0f} MiB)", span) for i, (bucket, span) in numbered],
    }
    print(f"```mermaid\ngantt\n    title --sync {sync}: one step of rank 0, in ms\n    dateFormat x\n    axisFormat %Q")
    for section, bars in sections.items():
        print(f"    section {section}")
        for name, span in bars:
            start, end = (round(time - backward[0]) for time in span)
            print(f"    {name}, {end - start} ms : {start}, {end}")
    print("```")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the sizes of the buckets
    for sync, folder in zip(("flat", "bucketed"), sys.argv[1:], strict=True):
        draw(sync, folder)
