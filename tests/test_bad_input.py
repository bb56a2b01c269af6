"""A user's mistake, or a bad network, gets a line that says what to do, and an exit code; nothing hangs or is lost."""

import math
import os
import re
import signal
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import (
    DDP,
    MANUAL,
    ROOT,
    SCRIPTS,
    Background,
    Ranks,
    fail,
    finish,
    run,
    torchrun,
    write_mnist,
)
from small_model import run_script, with_small_model
from torchvision.datasets import MNIST

import train_ddp

POSITIVE = {
    "positive int": ("--accum-steps 0", "--train-size 0", "--log-interval 0", "--train-size -1", "--save-every 0.5"),
    "non-negative int": ("--epochs -1", "--seed -1"),
    "positive float": ("--lr 0.0", "--timeout 0.0", "--lr nan", "--timeout inf"),
    "non-negative float": ("--clip-grad-norm -1.0",),
}
MISTAKES = {
    flag: f"argument {flag.split()[0]}: invalid {kind} value: '{flag.split()[1]}'"
    for kind, flags in POSITIVE.items()
    for flag in flags
} | {
    "--check ck.pt": "unrecognized arguments: --check ck.pt",
    "--batch-size many": "argument --batch-size: invalid positive int value: 'many'",
    "--precision fp8": "argument --precision: invalid choice: 'fp8'",
    "--save-every 5": "--save-every needs --checkpoint FILE",
    "--batch-size 70000": "a step takes 70000 of 600 samples: lower --batch-size",
    "--metrics missing/m.jsonl": "No such file or directory: 'missing/m.jsonl'",
    "--epochs 1 --checkpoint /proc/ck.pt": "No such file or directory: '/proc/tmp",  # not ck.pt.tmp, after an epoch
    "--epochs 0 --checkpoint no.pt": "--checkpoint no.pt is not there, and --epochs 0 would test random weights",
    "--backend carrier-pigeon": "carrier-pigeon",
    "--data-dir /proc/no": "no usable MNIST in /proc/no/MNIST/raw: put the four .gz files there, or",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes(flags, small_mnist):
    assert MISTAKES[flags] in fail(DDP, "--data-dir", small_mnist, *flags.split())


def as_a_task_of_srun():
    del os.environ["RANK"]  # which torchrun sets
    run_script(DDP)


def test_starts_that_would_go_wrong_in_silence():
    line = "srun has started unconnected processes: use torchrun, see slurm_submit_ddp.sh"
    assert line in fail(as_a_task_of_srun, SLURM_STEP_NUM_TASKS=2)
    name = "TORCHELASTIC_MAX_RESTARTS"
    assert run([*torchrun(1, "--standalone", "--max-restarts=3"), "--no-python", "printenv", name]).stdout == "3\n"
    fix = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts=..."
    with Ranks(DDP, nproc=1, **{name: 3}) as ranks:
        assert ranks.wait() == [1]
        assert ranks.output() == f"a restarted process would look for the dead ones, and wait: use {fix}\n"


@pytest.mark.parametrize("damage", [lambda whole: whole[:5000], lambda _: b"<html>Sign in to use this network</html>"])
def test_damaged_data(damage, tmp_path):
    file = write_mnist(tmp_path) / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    assert f"no usable MNIST in {file.parent}: " in fail(MANUAL, "--data-dir", tmp_path, "--batch-size", 8)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_stops_every_rank_and_is_not_saved(script, small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--log-interval", 3, "--checkpoint", tmp_path / "ck.pt")
    with Ranks(script, *flags, "--lr", 1e38) as ranks:
        assert ranks.wait() == [1, 1]
        first, second = re.findall(r"(?m)^step \d: the loss is not finite: try a lower --lr.*", ranks.output())
        assert first == second and not (tmp_path / "ck.pt").exists()
    # The loss of the only step is finite, but with the weights after it, that of the test images is not.
    line = fail(script, *flags, "--train-size", 64, "--lr", 1e25, nproc=2)
    assert line.startswith("the test: the loss is not finite: try a lower --lr")


def infinite_on_rank_1():
    dist.init_process_group("gloo")
    train_ddp.sum_over_ranks_or_exit([math.inf if dist.get_rank() else 0.5], "cpu", "step 1")


def test_an_infinite_loss_ends_all_ranks():
    assert fail(infinite_on_rank_1, nproc=2).startswith("step 1: the loss is not finite")


def sums_that_lack_a_rank():
    """What NCCL leaves behind between the end of a rank and that of the others; on CPUs, Gloo raises an error."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.all_reduce = lambda sums: None  # each rank keeps its own numbers
    train_ddp.sum_over_ranks_or_exit([0.5], "cpu", "step 1")


def test_sums_that_lack_a_rank_end_all_ranks():
    assert fail(sums_that_lack_a_rank, nproc=2) == "step 1: 1 of 2 ranks are left"


def with_two_gpus(*command):
    """Run a script that believes in two GPUs."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = lambda device: sys.exit(f"chosen: {device}")
    run_script(*command)


def test_each_process_has_a_gpu_of_its_node_or_says_that_there_are_too_few():
    for script, gpu in {DDP: "cuda:1", "tests/lesson/many_gpus.py": "1", "tests/lesson/own_loop.py": "1"}.items():
        assert fail(with_two_gpus, ROOT / script, RANK=3, LOCAL_RANK=1, WORLD_SIZE=4) == f"chosen: {gpu}"
    line = fail(with_two_gpus, DDP, LOCAL_RANK=2)
    assert line.startswith("no GPU for local rank 2, as this node has 2: lower --nproc-per-node, or train on CPUs: ")


def into_a_full_disk(*command):
    """Run a script whose output goes to a file that can take no more."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    with_small_model(run_script, *command)


def test_a_log_on_a_full_disk(small_mnist):
    line = fail(into_a_full_disk, DDP, "--data-dir", small_mnist, "--epochs", 0)
    assert line == "OSError: [Errno 28] No space left on device"


def test_help_succeeds_and_an_exception_is_in_torchruns_summary(small_mnist):
    assert finish(DDP, "--help", nproc=1).startswith("usage:")
    result = run([*torchrun(1), ROOT / DDP, "--data-dir", small_mnist, "--metrics", "no/m"])
    summary = result.stderr.partition("Root Cause")[2]
    assert "error_file: <N/A>" not in summary and "No such file or directory: 'no/m'" in summary


def test_a_peer_that_never_arrives_and_one_that_hangs(small_mnist):
    assert "1/2 clients joined" in fail(DDP, "--timeout", 2, WORLD_SIZE=2)
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--timeout", 3, "--log-interval", 1)
    with Ranks(MANUAL, *flags, PAUSE=1) as ranks:
        ranks.wait_for("step 1 ")
        ranks.kill(1, signal.SIGSTOP)
        ranks.processes[0].join(60)
        assert ranks.processes[0].exitcode == 1


def with_mirror(mirror, folder, *flags):
    """Run a script whose torchvision downloads from elsewhere, and other files. Rank 0 is alone on its node.

    The nodes have disks of their own, unless the folder is called `shared`.
    """
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(max(rank - 1, 0))
    MNIST.mirrors = [mirror]
    MNIST.resources = [(name, None) for name, _ in MNIST.resources]  # None: the checksums are not known
    run_script(DDP, "--data-dir", folder / f"{min(rank, 1) if folder.name != 'shared' else ''}", *flags)


def test_each_file_is_downloaded_once_by_each_node(tmp_path):
    raw = write_mnist(tmp_path) / "MNIST" / "raw"
    run(["gzip", "--recursive", raw])
    server = (sys.executable, "-u", "-m", "http.server", 0, "--bind", "127.0.0.1", "--directory", raw)
    with Background(*server, log=tmp_path / "log") as mirror:
        (url,) = mirror.wait_for(r"(http://\S+/)").groups()
        for disks, count in (("own", 16), ("own", 16), ("shared", 24)):  # torchvision asks for redirects first
            command = (with_mirror, url, tmp_path / disks, "--epochs", 0)
            assert "  test_samples 101\n" in finish(*command, nproc=3, no_proxy="*")
            requests = re.findall("GET (.*) HTTP", mirror.output())
            assert (len(requests), len(set(requests))) == (count, 4)


def test_a_firewall_that_swallows_everything(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, but never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert "timed out" in fail(with_mirror, url, tmp_path, no_proxy="*")


def test_sockets_of_the_user_get_no_time_out(small_mnist):
    train_ddp.read_mnist(small_mnist)
    with pytest.raises(SystemExit, match="no usable MNIST"):
        train_ddp.read_mnist("/proc/no")
    assert socket.getdefaulttimeout() is None
