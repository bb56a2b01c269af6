"""What all tests share: starting the scripts, by torchrun or at once; and a small MNIST.

torch takes seconds to import, so it is imported only where it is used: cluster.py starts without it.
"""

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = DDP, MANUAL = "train_ddp.py", "train_manual_ddp.py"
SMALL_MODEL = ROOT / "tests" / "small_model.py"  # which takes a script and its flags
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
for name in ("OMP_NUM_THREADS", "SLURM_STEP_NUM_TASKS"):  # whoever starts the tests may have set them
    os.environ.pop(name, None)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and what it starts, too
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated virtual environment
# For `Ranks`: a port that the system gives to whoever wants any might be taken again before rank 0 listens on it, so
# these are below those. Each of pytest's workers begins hundreds away from others, also from those of other tests.
PORTS = itertools.count(10_000 + 463 * os.getpid() % 19_000)
FORKSERVER = multiprocessing.get_context("forkserver")  # a process that has imported torch; `Ranks` are forks of it
FORKSERVER.set_forkserver_preload(["conftest", "small_model", "train_ddp", "torch.distributed.optim", "doctor"])


def wait_until(look, timeout=300):
    """Wait until a function returns something; return that."""
    deadline = time.monotonic() + timeout
    while True:
        begun = time.monotonic()
        if found := look():
            return found
        assert begun < deadline, f"waited in vain for {look}"
        # A look that starts a process leaves the cores to others.
        time.sleep(max(0.02, 5 * (time.monotonic() - begun)))


def environment(gpu=False, **changes):
    """Return this process's environment with `changes`, and by default without a GPU."""
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return os.environ | hidden | {name: str(value) for name, value in changes.items()}


def run(command, cwd=ROOT, gpu=False, timeout=400, **env):
    """Run a command to its end; return the CompletedProcess, its output as text."""
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment(gpu, **env), **options)


def torchrun(nproc, *flags):
    """Return the beginning of a command: torchrun with its `flags`, which are --standalone by default."""
    return [TORCHRUN, *(flags or ["--standalone"]), f"--nproc_per_node={nproc}"]


class Background:
    """A command, such as torchrun, and all that it has started; leaving `with` kills what is left of them."""

    def __init__(self, *command, log, cwd=ROOT, stdin=subprocess.DEVNULL, **env):
        self.log = log
        env = environment(**env, TEST_LOG=log)  # all that the command starts has this variable, too
        with log.open("w") as file:
            pipes = {"stdin": stdin, "stdout": file, "stderr": file}
            self.process = subprocess.Popen([*map(str, command)], cwd=cwd, env=env, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        while pids := self.pids():
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait()
        if failed and self.log.is_file():
            print(self.output())  # which pytest shows

    def pids(self):
        """Return the ids of the processes that are left, by rank; None is torchrun's."""
        found = {}
        for process in psutil.process_iter(["environ"]):
            variables = process.info["environ"] or {}
            if variables.get("TEST_LOG") == str(self.log):
                rank = variables.get("RANK")
                found[rank and int(rank)] = process.pid
        return found

    def kill(self, rank, how=signal.SIGKILL):
        os.kill(self.pids()[rank], how)

    def output(self):
        return self.log.read_bytes().decode()

    def wait_for(self, what):
        """Wait until a pattern is in the output, or a function returns something."""
        return wait_until(what if callable(what) else lambda: re.search(what, self.output()))

    def wait(self, timeout=400):
        """Wait for its end; return the exit code."""
        return self.process.wait(timeout)


def is_free(port):
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True


def in_dir(folder, function, *arguments):
    os.chdir(folder)
    function(*arguments)


def be_rank(log, env, target, *arguments):
    import torch

    gc.freeze()  # whoever looks at all objects would copy the memory that this fork shares
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # as it would have read itself, were it imported now
    target(*arguments)


class Ranks(Background):
    """Processes that need no second to start, for what is no test of torchrun: of a script with the small model, or of
    a function.
    """

    def __init__(self, *target, nproc=2, log=None, share_gpu=False, **env):
        from small_model import run_script, with_small_model

        self.file = None if log else tempfile.NamedTemporaryFile()  # noqa: SIM115, it lives as long as this
        self.log = log or Path(self.file.name)
        target = target if callable(target[0]) else (with_small_model, run_script, *target)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": next(filter(is_free, PORTS))}
        self.processes = []
        for rank in range(nproc):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "OMP_NUM_THREADS": 1} | meeting | env
            if share_gpu:  # NCCL refuses two ranks of a host on one GPU, so each is a host of its own
                place |= {"LOCAL_RANK": 0, "NCCL_HOSTID": rank}
            arguments = (self.log, environment(**place), *target)
            self.processes.append(FORKSERVER.Process(target=be_rank, args=arguments))
            self.processes[rank].start()

    def pids(self):
        return {rank: process.pid for rank, process in enumerate(self.processes) if process.is_alive()}

    def wait(self, timeout=300):
        """Wait for their ends; return the exit codes."""
        for process in self.processes:
            process.join(timeout)
            assert not process.is_alive(), "still running"
        return [process.exitcode for process in self.processes]


def finish(*target, nproc=2, **env):
    """Run Ranks that must succeed; return what they print."""
    with Ranks(*target, nproc=nproc, **env) as ranks:
        assert ranks.wait() == [0] * nproc
        return ranks.output()


def fail(*target, nproc=1, **env):
    """Run Ranks that must fail; return the last line that they print."""
    with Ranks(*target, nproc=nproc, **env) as ranks:
        assert 0 not in ranks.wait()
        return ranks.output().splitlines()[-1]


def outcome(metrics):
    """Return what a run's --metrics repeats: not its speed and stops, nor a last digit of sums in another order."""
    lines = [line for line in metrics.open() if not line.startswith(('{"resumed"', '{"stopped"'))]
    entries = [json.loads(line, parse_float=lambda text: f"{float(text):.12g}") for line in lines]
    entries = [{key: entry[key] for key in entry if key != "samples_per_second"} for entry in entries]
    # Each start writes the first line, and after a kill, steps are repeated.
    return [entry for i, entry in enumerate(entries) if entry not in entries[:i]]


def weights(output):
    """Return the hash that a training has printed."""
    (found,) = re.findall(r"weights_sha256 (\w+)", output)
    return found


def write_mnist(folder, train_size=600, test_size=101):
    """Write synthetic images in MNIST's layout."""
    import train_ddp

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for i, (split, size) in enumerate((("train", train_size), ("t10k", test_size))):
        for name, array in zip(("images-idx3", "labels-idx1"), train_ddp.synthesize(0, i, size), strict=True):
            header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4")  # magic number, sizes
            (raw / f"{split}-{name}-ubyte").write_bytes(header.tobytes() + array.astype(np.uint8).tobytes())
    return folder


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory):
    """A folder for --data-dir. No world size here divides its 101 images for testing."""
    return write_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture
def train_many(tmp_path):
    """Return a function that trains many_gpus.py, or what has become of it; it returns what is printed and saved."""
    import torch
    from small_model import run_script

    write_mnist(tmp_path / "data", train_size=2048)

    def train_many(source, nproc=2, run=finish):
        source = source.replace("layers =", "torch.manual_seed(0)\nlayers =")
        seconds = 60 if run is finish else 5  # that a rank may wait for another
        limit = f"import datetime\ndist.init_process_group(timeout=datetime.timedelta(seconds={seconds}), backend="
        (tmp_path / "many.py").write_text(source.replace("dist.init_process_group(", limit))
        output = run(in_dir, tmp_path, run_script, tmp_path / "many.py", nproc=nproc)
        return output, torch.load(tmp_path / "model.pt") if run is finish else None

    return train_many
