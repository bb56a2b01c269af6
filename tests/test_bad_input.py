"""A user's mistake gets one clear line and an exit code; so does a peer that is gone."""

import contextlib
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import DISTRIBUTED, ROOT, SCRIPTS, Background, errors, launch, start, write_idx, write_mnist

import train_ddp
import train_manual_ddp

DDP, MANUAL = SCRIPTS
SYNTHETIC = ("--dataset", "synthetic")

VALUES = {  # flags: what the line says
    ("--epochs", "-1"): "argument --epochs: '-1' is not a non-negative int below 2**31",
    ("--batch-size", "1"): "argument --batch-size: '1' is not an int above 1 below 2**31",
    ("--batch-size", "many"): "argument --batch-size: 'many' is not an int above 1",
    ("--accum-steps", "0"): "argument --accum-steps: '0' is not a positive int below 2**31",
    ("--lr", "nan"): "argument --lr: 'nan' is not a positive float below 2**31",
    ("--lr", "inf"): "argument --lr: 'inf' is not a positive float",
    ("--lr", "0"): "argument --lr: '0' is not a positive float",
    ("--clip-grad-norm", "-1"): "argument --clip-grad-norm: '-1' is not a non-negative float",
    ("--timeout", "0"): "argument --timeout: '0' is not a positive float",
    ("--train-size", "0"): "argument --train-size: '0' is not a positive int",
    ("--save-every", "5"): "--save-every: where to? Give --checkpoint as well",
}
MISTAKES = {
    ("--batch-size", "many"): VALUES["--batch-size", "many"],
    ("--no-such-flag",): "unrecognized arguments: --no-such-flag",
    ("--train-size", "60001"): "--train-size 60001: there are 60000 training images",
    ("--batch-size", "70000"): "60000 training images, but a step takes 70000",
    ("--train-size", "100"): "100 training images, but a step takes 128",
    ("--backend", "carrier-pigeon"): "--backend carrier-pigeon: this torch connects cpu by gloo",
    ("--backend", "nccl"): "--backend nccl: this torch connects cpu by gloo",
    ("--metrics", "missing/folder/m.jsonl"): "--metrics: [Errno 2] No such file or directory: 'missing/folder/m.jsonl'",
    ("--metrics", "/"): "--metrics: [Errno 21] Is a directory: '/'",
    ("--dataset", "synthetic", "--profile", __file__): f"--profile: [Errno 17] File exists: '{__file__}'",
    ("--data-dir", "/proc/nowhere"): "no usable MNIST in /proc/nowhere/MNIST/raw",
    ("--data-dir", __file__): "Errno",
}


@pytest.mark.parametrize("flags", VALUES)
def test_values_that_a_flag_does_not_take(flags, monkeypatch, capsys):
    """The next test starts processes; here, there are too many for that."""
    for script in (train_ddp, train_manual_ddp):
        monkeypatch.setattr("sys.argv", ["", *flags])
        with pytest.raises(SystemExit) as end:
            script.parse_args()
        assert end.value.code == 2
        line = capsys.readouterr().err
        assert line.startswith(f"{script.__name__}.py: error: {VALUES[flags]}") and line.count("\n") == 1


def test_mistakes_on_the_command_line(subtests):
    scripts = [SCRIPTS[i % 2] for i in range(len(MISTAKES))]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda flags, script: launch(ROOT / script, *flags), MISTAKES, scripts)
    for (flags, words), result in zip(MISTAKES.items(), results, strict=True):
        with subtests.test(msg=" ".join(flags)):
            (line,) = errors(result)
            assert words in line
            assert result.stderr.strip().endswith(line)


def truncated(raw):
    os.truncate(raw / "train-images-idx3-ubyte", 5000)


def foreign(raw):
    (raw / "t10k-images-idx3-ubyte").write_text("<html>Sign in to use this network</html>")


def empty(raw):
    (raw / "train-labels-idx1-ubyte").write_bytes(b"")


def other_shape(raw):
    write_idx(raw / "t10k-images-idx3-ubyte", np.zeros((101, 32, 32)))


def other_count(raw):
    write_idx(raw / "t10k-labels-idx1-ubyte", np.zeros(100))


def eleven_classes(raw):
    write_idx(raw / "t10k-labels-idx1-ubyte", np.arange(101))


def missing(raw):
    (raw / "t10k-labels-idx1-ubyte").unlink()


def test_damaged_data(subtests, tmp_path):
    damages = (truncated, foreign, empty, other_shape, other_count, eleven_classes, missing)
    folders = [write_mnist(tmp_path / damage.__name__) for damage in damages]
    for damage, folder in zip(damages, folders, strict=True):
        damage(folder / "MNIST" / "raw")
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda folder: launch(ROOT / DDP, "--data-dir", folder, "--batch-size", 8), folders)
    for folder, result in zip(folders, results, strict=True):
        with subtests.test(msg=folder.name):
            (line,) = errors(result)
            assert f"no usable MNIST in {folder}/MNIST/raw" in line
            assert "--dataset synthetic" in line


def test_data_that_one_rank_lacks_ends_all_with_one_line(tmp_path):
    result = launch(ROOT / MANUAL, "--data-dir", tmp_path / "mistyped", nproc=2)
    (line,) = errors(result)
    assert "no usable MNIST" in line
    assert not list(tmp_path.iterdir()), "left behind"


def test_the_line_is_not_lost_when_rank_0_is_late(tmp_path):
    late = tmp_path / "late.py"
    late.write_text(
        "import os, runpy, sys, time\n"
        "time.sleep(3 * (os.environ['RANK'] == '0'))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    result = launch(late, ROOT / DDP, "--lr", "-1", nproc=2)
    (line,) = errors(result)
    assert "argument --lr" in line
    # torchrun's report: it was rank 0 that ended first, and by itself.
    assert re.search(r"first observed failure.*?rank +: 0 .*?exitcode +: 2 ", result.stderr, re.S), result.stderr


def test_half_set_variables(subtests):
    whole = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    whole |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    cases = [{"RANK": 0, "WORLD_SIZE": 2}, {"MASTER_ADDR": "node0"}, whole | {"RANK": "first"}, whole | {"RANK": 2}]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda env: launch(ROOT / DDP, *SYNTHETIC, **env), cases)
    for env, result in zip(cases, results, strict=True):
        with subtests.test(msg=str(env)):
            (line,) = errors(result)
            assert all(name in line for name in DISTRIBUTED)


def test_slurm_tasks_without_torchrun():
    (line,) = errors(launch(ROOT / MANUAL, *SYNTHETIC, SLURM_STEP_NUM_TASKS=4))
    assert "Slurm" in line
    assert "torchrun" in line


def by_hand(rank, world_size, port):
    """Return the variables that torchrun would set, for processes on one machine."""
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_master_port_in_use():
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        result = launch(ROOT / DDP, *SYNTHETIC, "--timeout", 5, **by_hand(0, 2, taken.getsockname()[1]))
    (line,) = errors(result)
    assert "rank 0 of 2 has not met the others" in line
    assert "EADDRINUSE" in line


def test_a_peer_that_never_arrives(free_port):
    (line,) = errors(launch(ROOT / MANUAL, *SYNTHETIC, "--timeout", 3, **by_hand(0, 2, free_port)))
    assert "rank 0 of 2 has not met the others" in line
    assert "1/2 clients joined" in line


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_hangs_or_dies(how, free_port, small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 8, "--epochs", 1000, "--timeout", 20, "--log-interval", 1)
    command = (*start(), ROOT / SCRIPTS[how == signal.SIGKILL], *flags)
    with contextlib.ExitStack() as stack:
        ranks = [Background(*command, log=tmp_path / f"{rank}", **by_hand(rank, 3, free_port)) for rank in range(3)]
        for rank in ranks:
            stack.enter_context(rank)
        ranks[0].wait_for("step 3/")
        ranks[2].process.send_signal(how)
        for rank in ranks[:2]:
            assert rank.wait(60) == 1
            assert "Traceback" not in rank.output()
            assert "lost touch with another rank" in rank.output().splitlines()[-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_stops_every_rank(script, small_mnist):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--lr", "1e9", "--log-interval", 3)
    (line,) = errors(launch(ROOT / script, *flags, nproc=2))
    assert re.search(r"the loss is (nan|inf) in epoch 1/3, step [1-9]", line)


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as stop:
        train_ddp.choose_device(local_rank=0, local_size=3)
    assert stop.value.code == 1
    assert "3 processes on this machine but 2 GPUs" in capsys.readouterr().err


def test_a_mac_trains_on_its_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert train_ddp.choose_device(local_rank=0, local_size=1) == torch.device("cpu")
    assert "training on the CPU" in capsys.readouterr().err
