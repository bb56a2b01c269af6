"""What only a GPU can show: NCCL, and the flags that are for GPUs."""

import re
import signal

import pytest
import torch
from conftest import DDP, MANUAL, ROOT, SCRIPTS, Background, run, torchrun, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO = pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))
FLAGS = ("--dataset", "synthetic", "--train-size", 2048, "--batch-size", 32, "--epochs", 2, "--deterministic")


def train(script, *flags, nproc=1):
    """Train a script to its end; return the hash of its weights."""
    result = run([*torchrun(nproc), ROOT / script, *FLAGS, *flags], gpu=True, timeout=600)
    assert result.returncode == 0 and ", nccl, " in result.stderr, result.stderr
    assert float(re.findall(r"accuracy (\S+)%", result.stdout)[-1]) > 80
    return weights(result.stdout)


@pytest.mark.parametrize("nproc", [1, TWO])
@pytest.mark.parametrize("flags", [(), ("--precision", "bf16"), ("--accum-steps", "2"), ("--compile",)])
def test_twins_and_reruns_end_on_the_same_bits(flags, nproc):
    ddp, manual = ({train(script, *flags, nproc=nproc) for _ in range(2)} for script in (DDP, MANUAL))
    assert len(ddp) == len(manual) == 1
    assert ddp == manual or flags == ("--compile",)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_run_goes_on_to_the_same_bits(script, tmp_path):
    saving = ("--checkpoint", tmp_path / "ck.pt", "--save-every", 2, "--log-interval", 1)
    with Background(*torchrun(1), ROOT / script, *FLAGS, *saving, log=tmp_path / "log", gpu=True) as job:
        job.wait_for("step 3/")
        job.kill(0, signal.SIGTERM)
        assert job.wait() == 0 and "stopped by a signal" in job.output()
    assert train(script, *saving) == train(script)
