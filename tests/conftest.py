"""What all tests share: starting the scripts as a user does, a small MNIST, and who may skip."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train_ddp.py", "train_manual_ddp.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

sys.path.insert(0, str(ROOT))


def environment(gpu=False, **changes):
    """Return this process's environment, made independent of who started the tests, with `changes`."""
    env = {name: value for name, value in os.environ.items() if name not in (*DISTRIBUTED, "OMP_NUM_THREADS")}
    # Nothing listens there: a test that would download fails at once, on every machine.
    env |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9") | {"PYTHONPATH": str(ROOT)}
    env |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return env | {name: str(value) for name, value in changes.items()}


def run(command, cwd=ROOT, gpu=False, timeout=180, **env):
    """Run a command to its end; return the CompletedProcess, its output decoded but otherwise as it is."""
    env = environment(gpu, **env)
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=env, timeout=timeout, **pipes)
    result.stdout, result.stderr = result.stdout.decode(), result.stderr.decode()
    return result


def launch(*command, nproc=None, **options):
    """Run `python command...`, or torchrun with `nproc` processes."""
    start = [sys.executable] if nproc is None else [TORCHRUN, "--standalone", f"--nproc_per_node={nproc}"]
    return run([*start, *command], **options)


def train(script, *flags, **options):
    """Run a script that must succeed; return its CompletedProcess, with `.metrics`, its JSON objects."""
    metrics = Path(options.pop("metrics"))
    result = launch(ROOT / script, *flags, "--metrics", metrics, **options)
    assert result.returncode == 0, result.stderr
    result.metrics = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    return result


def own_lines(result):
    """Return what the scripts printed, on stderr and stdout, without the lines of torchrun and of older Gloos."""
    lines = (result.stderr + result.stdout).splitlines()
    return [line for line in lines if not re.match(r"[WEI]\d{4} |.*\[Gloo\]|.*peer ranks|$", line)]


def errors(result):
    """Return the lines in which the scripts say why they failed; never a traceback of theirs."""
    assert result.returncode != 0, result.stdout
    assert not re.search(r'File ".*train_(manual_)?ddp\.py", line', result.stderr), result.stderr
    return [
        line for line in result.stderr.splitlines() if line.startswith(tuple(f"{name}: error: " for name in SCRIPTS))
    ]


def write_idx(path, array):
    """Write a uint8 array in MNIST's file format: magic number, sizes, bytes."""
    header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + array.astype(np.uint8).tobytes())


def write_mnist(folder, train=600, test=101, shape=(28, 28)):
    """Write a data set in MNIST's layout: each class a bright bar of its own, under noise."""
    rng = np.random.default_rng(0)
    for split, size in (("train", train), ("t10k", test)):
        labels = rng.integers(10, size=size)
        images = rng.integers(100, size=(size, *shape))
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 3 : 2 * label + 6] += 150
        write_idx(folder / "MNIST" / "raw" / f"{split}-images-idx3-ubyte", images)
        write_idx(folder / "MNIST" / "raw" / f"{split}-labels-idx1-ubyte", labels)
    return folder


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory):
    """A folder for --data-dir: 600 training images and 101 for testing, which no world size here divides."""
    return write_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture(scope="session")
def real_mnist():
    """The folder of the real MNIST, from the environment variable MNIST_DIR."""
    if "MNIST_DIR" not in os.environ:
        pytest.skip("needs the real MNIST: set MNIST_DIR to the folder that holds MNIST/raw")
    return Path(os.environ["MNIST_DIR"]).resolve()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """On CI, only a GPU may be missing: there, any other skipped test has failed."""
    report = yield
    if report.skipped and os.environ.get("CI") and not item.get_closest_marker("gpu"):
        report.outcome, report.longrepr = "failed", f"skipped on CI: {report.longrepr}"
    return report
