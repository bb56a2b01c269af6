"""What all tests share: starting the scripts, by torchrun or at once; a small MNIST; and who may skip."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = DDP, MANUAL = "train_ddp.py", "train_manual_ddp.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TORCHRUNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated virtual environment
FORKSERVER = multiprocessing.get_context("forkserver")  # a process that has imported torch; `Ranks` are forks of it
FORKSERVER.set_forkserver_preload(["conftest", "train_ddp", "torch._dynamo"])


def environment(gpu=False, network=False, **changes):
    """Return this process's environment, made independent of who started the tests, with `changes`."""
    env = {name: value for name, value in os.environ.items() if name not in TORCHRUNS}
    # Nothing listens there: a test that would download fails at once, on every machine.
    env |= {} if network else dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    env |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return env | {name: str(value) for name, value in changes.items()}


def run(command, cwd=ROOT, gpu=False, timeout=180, **env):
    """Run a command to its end; return the CompletedProcess, its output decoded but otherwise as it is."""
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=environment(gpu, **env), timeout=timeout, **pipes)
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


class Job:
    """Processes that run while the test does something to them; leaving `with` kills what is left of them."""

    def __enter__(self):
        return self

    def output(self):
        return self.log.read_text()

    def wait_for(self, what, timeout=120):
        """Wait until a pattern is in the output, or a function returns something."""
        look = what if callable(what) else lambda: re.search(what, self.output())
        deadline = time.monotonic() + timeout
        while not (found := look()):
            assert time.monotonic() < deadline, f"no {what}: {self.output()}"
            time.sleep(0.01)
        return found


class Background(Job):
    """A command, such as torchrun, and all that it has started."""

    def __init__(self, *command, log, cwd=ROOT, **env):
        self.log, self.mark = log, uuid.uuid4().hex
        with log.open("w") as file:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            env = environment(**env, TEST_MARK=self.mark)
            self.process = subprocess.Popen([*map(str, command)], cwd=cwd, env=env, **pipes)

    def __exit__(self, *_):
        self.process.kill()
        while pids := self.pids():
            for rank in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
        self.process.wait()

    def pids(self):
        """Return the ids of the processes that are left, by rank; None is torchrun's."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = dict(line.partition("=")[::2] for line in environ.read_text(errors="replace").split("\0"))
                if variables.get("TEST_MARK") == self.mark:
                    rank = variables.get("RANK")
                    found[rank and int(rank)] = int(environ.parent.name)
        return found

    def kill(self, rank, how=signal.SIGKILL):
        os.kill(self.pids()[rank], how)

    def running(self):
        return self.process.poll() is None

    def wait(self, timeout=180):
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.output()}")


def run_script(script, *flags):
    """Run a script in this process, as `python script flags...` does."""
    sys.argv = [script, *map(str, flags)]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def in_group(function, *arguments):
    """Call a function in a process group."""
    dist.init_process_group("gloo")
    function(*arguments)
    dist.destroy_process_group()


def be_rank(log, env, function, arguments):
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    function(*arguments)


class Ranks(Job):
    """The processes of a script, or of a function, that need no second to start, for what is no test of torchrun."""

    def __init__(self, target, *arguments, nproc=2, log=None, **env):
        self.log = Path(log or tempfile.mkstemp()[1])
        function, *arguments = (target, *arguments) if callable(target) else (run_script, target, *arguments)
        env = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "OMP_NUM_THREADS": 1, "MASTER_PORT": find_port()} | env
        self.processes = []
        for rank in range(nproc):
            place = environment(MASTER_ADDR="127.0.0.1", RANK=rank, LOCAL_RANK=rank, **env)
            process = FORKSERVER.Process(target=be_rank, args=(self.log, place, function, arguments), daemon=True)
            process.start()
            self.processes.append(process)

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def kill(self, rank, how=signal.SIGKILL):
        os.kill(self.processes[rank].pid, how)

    def running(self):
        return any(process.is_alive() for process in self.processes)

    def wait(self, timeout=120):
        """Wait for their ends; return the exit codes."""
        for process in self.processes:
            process.join(timeout)
            assert not process.is_alive(), f"still running: {self.output()}"
        return [process.exitcode for process in self.processes]


def finish(*target, nproc=2, **env):
    """Run Ranks that must succeed; return what they print."""
    with Ranks(*target, nproc=nproc, **env) as ranks:
        assert ranks.wait() == [0] * nproc, ranks.output()
        return ranks.output()


def fail(*target, nproc=1, **env):
    """Run Ranks that must fail; return the last line that they print."""
    with Ranks(*target, nproc=nproc, **env) as ranks:
        assert 0 not in ranks.wait(), ranks.output()
        return ranks.output().splitlines()[-1]


def outcome(metrics):
    """Return what of a run's --metrics must repeat: all but the times, and a last digit of sums in another order."""
    entries = [json.loads(line, parse_float=lambda text: f"{float(text):.12g}") for line in metrics.open()]
    return [{key: entry[key] for key in entry if key not in ("seconds", "samples_per_second")} for entry in entries]


def weights(output):
    """Return the hash that a training has printed."""
    (found,) = re.findall(r"weights sha256 (\w+), the same on every rank", output)
    return found


def find_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_mnist(folder, train=600, test=101):
    """Write a data set in MNIST's layout: each class a bright bar of its own, under noise."""
    rng, raw = np.random.default_rng(0), folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, size in (("train", train), ("t10k", test)):
        labels = rng.integers(10, size=size)
        images = rng.integers(100, size=(size, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 3 : 2 * label + 6] += 150
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4")  # magic number, sizes
            (raw / f"{split}-{name}-ubyte").write_bytes(header.tobytes() + array.astype(np.uint8).tobytes())
    return folder


free_port = pytest.fixture(find_port)


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory):
    """A folder for --data-dir: 600 training images and 101 for testing, which no world size here divides."""
    return write_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture(scope="session")
def real_mnist():
    """The folder of the real MNIST, from the environment variable MNIST_DIR."""
    return os.environ.get("MNIST_DIR") or pytest.skip("MNIST_DIR does not name the folder that holds MNIST/raw")


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
