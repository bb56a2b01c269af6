"""What only a GPU can show: NCCL, and the flags that are for GPUs."""

import re
import signal

import pytest
import torch
from conftest import DDP, MANUAL, ROOT, SCRIPTS, Background, launch, start, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture
def train(small_mnist):
    """Train a script to its end; return the hash of its weights."""

    def train(script, *flags, nproc=1):
        flags = ("--data-dir", small_mnist, "--batch-size", 32, "--epochs", 2, "--deterministic", *flags)
        result = launch(ROOT / script, *flags, nproc=nproc, gpu=True, timeout=600)
        assert result.returncode == 0 and ", nccl, " in result.stderr, result.stderr
        assert float(re.findall(r"accuracy (\S+)%", result.stdout)[-1]) > 20
        return weights(result.stdout)

    return train


@pytest.mark.parametrize(
    "nproc", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two"))]
)
@pytest.mark.parametrize("flags", [(), ("--precision", "bf16"), ("--accum-steps", "2"), ("--compile",)])
def test_twins_and_reruns_end_on_the_same_bits(train, flags, nproc):
    hashes = [train(script, *flags, nproc=nproc) for script in (DDP, DDP, MANUAL, MANUAL)]
    assert hashes[0] == hashes[1] and hashes[2] == hashes[3]
    assert hashes[0] == hashes[2] or flags == ("--compile",)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_run_goes_on_to_the_same_bits(train, script, small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--epochs", 2, "--deterministic", "--log-interval", 1)
    saving = ("--checkpoint", tmp_path / "ck.pt", "--save-every", 2)
    with Background(*start(1), ROOT / script, *flags, *saving, log=tmp_path / "log", gpu=True) as job:
        job.wait_for("step 3/")
        job.kill(0, signal.SIGTERM)
        assert job.wait() == 0 and "stopped by a signal" in job.output()
    assert train(script, *saving) == train(script)
