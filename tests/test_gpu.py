"""What only a GPU can show: NCCL, and the flags that are for GPUs."""

import re
import signal

import pytest
import torch
from conftest import DDP, MANUAL, ROOT, SCRIPTS, Background, finish, torchrun, weights
from small_model import run_script

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLAGS = ("--dataset", "synthetic", "--train-size", 2048, "--batch-size", 32, "--epochs", 2, "--deterministic")


def train(script, *flags, nproc=1):
    """Train a script to its end; return the hash of its weights. Where GPUs are too few, the ranks share one."""
    env = {"nproc": nproc, "gpu": True, "share_gpu": nproc > torch.cuda.device_count()}
    output = finish(run_script, script, *FLAGS, *flags, **env)  # the real model: --deterministic allows no other
    assert ", cuda:0, " in output and ", nccl, " in output
    assert float(re.findall(r"test_accuracy (\S+)", output)[-1]) > 0.8
    return weights(output)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("flags", [(), ("--precision", "bf16"), ("--accum-steps", 2)])
def test_twins_and_reruns_end_on_the_same_bits(flags, nproc):
    ddp, manual = ({train(script, *flags, nproc=nproc) for _ in range(2)} for script in (DDP, MANUAL))
    assert len(ddp) == 1 and ddp == manual


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_run_goes_on_to_the_same_bits(script, tmp_path):
    saving = ("--checkpoint", tmp_path / "ck.pt", "--save-every", 2, "--log-interval", 1)
    with Background(*torchrun(1), ROOT / script, *FLAGS, *saving, log=tmp_path / "log", gpu=True) as job:
        job.wait_for("step 3 ")
        job.kill(0, signal.SIGTERM)
        assert job.wait() == 0 and "stopped by a signal" in job.output()
    assert train(script, *saving) == train(script)
