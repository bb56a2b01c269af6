"""A user's mistake, or a bad network, gets a line that says what to do, and an exit code; nothing hangs or is lost."""

import collections
import functools
import gzip
import hashlib
import http.server
import os
import re
import signal
import socket
import threading

import pytest
import torch
from conftest import DDP, MANUAL, SCRIPTS, Ranks, fail, finish, run_script, write_mnist
from torchvision.datasets import MNIST

import train_ddp
import train_manual_ddp

REFUSED = {
    "--epochs -1": "--epochs -1: it has to be 0 or positive",
    "--batch-size 0": "--batch-size 0: it has to be positive",
    "--batch-size many": "argument --batch-size: invalid int value: 'many'",
    "--accum-steps 0": "--accum-steps 0: it has to be positive",
    "--lr nan": "--lr nan: it has to be positive",
    "--lr 0": "--lr 0.0: it has to be positive",
    "--clip-grad-norm -1": "--clip-grad-norm -1.0: it has to be 0 or positive",
    "--timeout 0": "--timeout 0.0: it has to be positive",
    "--train-size 0": "--train-size 0: it has to be positive",
    "--log-interval 0": "--log-interval 0: it has to be positive",
    "--seed -1": "--seed -1: it has to be 0 or positive",
    "--precision fp8": "argument --precision: invalid choice: 'fp8'",
    "--no-such-flag": "unrecognized arguments: --no-such-flag",
    "--save-every 5": "--save-every needs --checkpoint FILE",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_flag_does_not_take(flags, monkeypatch, capsys):
    for script in (train_ddp, train_manual_ddp):
        monkeypatch.setattr("sys.argv", ["train", *flags.split()])
        with pytest.raises(SystemExit, match="2"):
            script.parse_args()
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"train: error: {REFUSED[flags]}")


SMALL = ("--dataset", "synthetic", "--train-size", 64, "--batch-size", 32)
MISTAKES = {
    "--batch-size 70000": "a step takes 70000 samples, but there are 64: lower --batch-size",
    "--metrics missing/m.jsonl": "No such file or directory: 'missing/m.jsonl'",
    "--checkpoint missing/ck.pt": "--checkpoint missing/ck.pt: cannot write to the folder missing",
    "--backend carrier-pigeon": "carrier-pigeon",
    "--dataset mnist --data-dir /proc/no": "no usable MNIST in /proc/no/MNIST/raw: put the four .gz files there, or",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_that_only_a_run_can_see(flags):
    assert MISTAKES[flags] in fail(SCRIPTS[len(flags) % 2], *SMALL, *flags.split())


DAMAGES = {
    "truncated": lambda raw: os.truncate(raw / "train-images-idx3-ubyte", 5000),
    "foreign": lambda raw: (raw / "t10k-images-idx3-ubyte").write_text("<html>Sign in to use this network</html>"),
    "empty": lambda raw: (raw / "train-labels-idx1-ubyte").write_bytes(b""),
    "missing": lambda raw: (raw / "t10k-labels-idx1-ubyte").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data(damage, tmp_path):
    raw = write_mnist(tmp_path) / "MNIST" / "raw"
    DAMAGES[damage](raw)
    assert f"no usable MNIST in {raw}: " in fail(MANUAL, "--data-dir", tmp_path, "--batch-size", 8)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_stops_every_rank_and_is_not_saved(script, small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--log-interval", 3, "--checkpoint", tmp_path / "ck.pt")
    with Ranks(script, *flags, "--lr", 1e9, "--save-every", 1) as ranks:
        assert ranks.wait() == [1, 1]
        first, second = re.findall(r"(?m)^loss (?:nan|inf) in epoch 1, step \d: try a lower --lr.*", ranks.output())
        assert first == second
    assert all(tensor.isfinite().all() for tensor in torch.load(tmp_path / "ck.pt")["model"].values())
    # The loss of the only step is finite, but with the weights after it, that of the test images is not.
    flags = (*flags, "--train-size", 64, "--checkpoint", tmp_path / "other.pt")
    assert "the test loss is nan: try a lower --lr" in fail(script, *flags, "--lr", 1e25, nproc=2)
    assert not (tmp_path / "other.pt").exists()


def pretend(accelerator, *flags):
    """Run a script that believes in two devices of another kind."""
    torch.accelerator.current_accelerator = lambda check_available=True: torch.device(accelerator)
    torch.accelerator.device_count = lambda: 2
    run_script(DDP, *flags)


def test_more_processes_than_gpus_and_a_mac():
    line = fail(pretend, "cuda", *SMALL, nproc=3)
    assert line == "3 processes on this node, but 2 GPUs: lower --nproc_per_node"
    assert ", cpu, " in finish(pretend, "mps", *SMALL, "--epochs", 0, nproc=1)


def test_a_peer_that_never_arrives_and_one_that_hangs():
    assert "1/2 clients joined" in fail(DDP, *SMALL, "--timeout", 2, WORLD_SIZE=2)
    with Ranks(MANUAL, *SMALL, "--epochs", 1000, "--timeout", 5, "--log-interval", 1, nproc=2) as ranks:
        ranks.wait_for("step 1/")
        ranks.kill(1, signal.SIGSTOP)
        ranks.processes[0].join(60)
        assert ranks.processes[0].exitcode == 1, ranks.output()


def with_mirror(mirror, resources, *flags):
    """Run a script whose torchvision downloads from elsewhere."""
    MNIST.mirrors, MNIST.resources = [mirror], resources
    run_script(DDP, *flags)


def test_each_file_is_downloaded_once(small_mnist, tmp_path):
    requests, resources = [], []

    class Mirror(http.server.SimpleHTTPRequestHandler):
        def log_message(self, text, request, *_):
            requests.append(request)

    for path in (small_mnist / "MNIST" / "raw").iterdir():
        data = gzip.compress(path.read_bytes())
        (tmp_path / f"{path.name}.gz").write_bytes(data)
        resources.append((f"{path.name}.gz", hashlib.md5(data).hexdigest()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Mirror, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, flags = f"http://127.0.0.1:{server.server_port}/", ("--data-dir", tmp_path / "data", "--epochs", 0)
    for _ in range(2):
        assert "of 101 test images" in finish(with_mirror, url, resources, *flags, nproc=3, no_proxy="127.0.0.1")
        assert [*collections.Counter(requests).values()] == [2] * 4  # torchvision asks for redirects first
    server.shutdown()


def test_a_firewall_that_swallows_everything(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, but never answers
        url, flags = f"http://127.0.0.1:{silent.getsockname()[1]}/", ("--data-dir", tmp_path / "data")
        assert "timed out" in fail(with_mirror, url, [("train.gz", "0")], *flags, no_proxy="*")
