"""What all tests share: starting the scripts as a user does, a small MNIST, and who may skip."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train_ddp.py", "train_manual_ddp.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

sys.path.insert(0, str(ROOT))


def environment(gpu=False, network=False, **changes):
    """Return this process's environment, made independent of who started the tests, with `changes`."""
    env = {name: value for name, value in os.environ.items() if name not in (*DISTRIBUTED, "OMP_NUM_THREADS")}
    # Nothing listens there: a test that would download fails at once, on every machine.
    env |= {} if network else dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    env |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return env | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in changes.items()}


def run(command, cwd=ROOT, gpu=False, timeout=180, **env):
    """Run a command to its end; return the CompletedProcess, its output decoded but otherwise as it is."""
    env = environment(gpu, **env)
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=env, timeout=timeout, **pipes)
    result.stdout, result.stderr = result.stdout.decode(), result.stderr.decode()
    return result


def start(nproc=None, *flags):
    """Return the start of a command: `python`, or `torchrun` with its `flags`, which are --standalone by default."""
    if nproc is None:  # threads wait for each other by spinning, which takes minutes when another test has their core
        return ["env", "OMP_NUM_THREADS=1", sys.executable]
    return [TORCHRUN, *(flags or ["--standalone"]), f"--nproc_per_node={nproc}"]


def launch(*command, nproc=None, **options):
    """Run `python command...`, or torchrun with `nproc` processes."""
    return run([*start(nproc), *command], **options)


class Background:
    """A command that runs while the test does something to it; leaving `with` kills all that is left of it."""

    def __init__(self, *command, log, cwd=ROOT, **env):
        self.log, self.mark = log, uuid.uuid4().hex
        with log.open("w") as file:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            env = environment(**env, TEST_MARK=self.mark)
            self.process = subprocess.Popen([*map(str, command)], cwd=cwd, env=env, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        while pids := list(self.pids().values()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def pids(self):
        """Return the ids of the processes that are left, by rank; None is torchrun's."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = environ.read_bytes().split(b"\0")
                if f"TEST_MARK={self.mark}".encode() in variables:
                    ranks = [int(name[5:]) for name in variables if name.startswith(b"RANK=")]
                    found[ranks[0] if ranks else None] = int(environ.parent.name)
        return found

    def kill(self, rank, how=signal.SIGKILL):
        os.kill(self.pids()[rank], how)

    def output(self):
        return self.log.read_text()

    def wait_for(self, what, timeout=120):
        """Wait until a pattern is in the output, or a function returns something."""
        look = what if callable(what) else lambda: re.search(what, self.output())
        deadline = time.monotonic() + timeout
        ended = False
        while not (found := look()):
            assert not ended and time.monotonic() < deadline, f"waited for {what}: {self.output()}"
            ended = self.process.poll() is not None
            time.sleep(0.01)
        return found

    def wait(self, timeout=180):
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.output()}")


def train(script, *flags, **options):
    """Run a script that must succeed; return its CompletedProcess, with `.metrics`, its JSON objects."""
    metrics = Path(options.pop("metrics"))
    if "--checkpoint" not in flags:
        metrics.unlink(missing_ok=True)
    result = launch(ROOT / script, *flags, "--metrics", metrics, **options)
    assert result.returncode == 0, result.stderr
    result.metrics = read_metrics(metrics)
    return result


def read_metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(entries):
    """Return what of a run's --metrics must repeat: all but the times and the memory."""
    clock = ("seconds", "samples_per_second", "peak_memory_bytes")
    return [{key: value for key, value in entry.items() if key not in clock} for entry in entries]


def own_lines(result):
    """Return what the scripts printed, on stderr and stdout, without the lines of torchrun and of older Gloos."""
    lines = (result.stderr + result.stdout).splitlines()
    return [line for line in lines if not re.match(r"[WEI]\d{4} |.*\[Gloo\]|.*peer ranks|$", line)]


def weights(output):
    """Return the hash that a training has printed."""
    (found,) = re.findall(r"weights sha256 (\w+), the same on every rank", output)
    return found


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


@pytest.fixture
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def torchrun_on_path():
    """What an activated virtual environment does to PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(Path(TORCHRUN).parent), os.environ["PATH"]]))
        yield


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
    items.sort(key=lambda item: -item.path.stat().st_size)  # long files first, so that both processes end together
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
