"""What only a GPU can show: NCCL, and the flags that are for GPUs."""

import signal

import pytest
import torch
from conftest import ROOT, SCRIPTS, Background, errors, launch, start, train

pytestmark = pytest.mark.gpu


@pytest.fixture
def run(small_mnist, tmp_path):
    def run(script, *flags, nproc=1):
        flags = ("--data-dir", small_mnist, "--batch-size", 32, "--epochs", 2, "--deterministic", *flags)
        return train(script, *flags, nproc=nproc, gpu=True, metrics=tmp_path / "metrics.jsonl", timeout=600)

    return run


@pytest.mark.parametrize("flags", [(), ("--precision", "bf16"), ("--accum-steps", "2")])
def test_twins_and_reruns_end_on_the_same_bits(run, flags):
    results = [run(script, *flags) for script in (*SCRIPTS, *SCRIPTS)]
    assert "backend nccl" in results[0].stderr
    assert len({result.metrics[-1]["weights_sha256"] for result in results}) == 1
    assert results[0].metrics[-2]["test_accuracy"] > 0.3
    assert results[0].metrics[-1]["peak_memory_bytes"] > 40e6


@pytest.mark.parametrize("script", SCRIPTS)
def test_reruns_of_a_compiled_model_end_on_the_same_bits(run, script):
    first, second = run(script, "--compile"), run(script, "--compile")
    assert first.metrics[-1]["weights_sha256"] == second.metrics[-1]["weights_sha256"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_run_goes_on_to_the_same_bits(run, script, small_mnist, tmp_path):
    flags = ("--data-dir", small_mnist, "--batch-size", 32, "--epochs", 2, "--deterministic", "--log-interval", 1)
    saving = ("--checkpoint", tmp_path / "ck.pt", "--save-every", 2)
    with Background(*start(1), ROOT / script, *flags, *saving, log=tmp_path / "log", gpu=True) as job:
        job.wait_for("step 3/")
        job.kill(0, signal.SIGTERM)
        assert job.wait() == 0, job.output()
        assert "stopped by a signal" in job.output()
    assert run(script, *saving).metrics[-1]["weights_sha256"] == run(script).metrics[-1]["weights_sha256"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_twins_end_on_the_same_bits_on_two_gpus(run):
    results = [run(script, nproc=2) for script in SCRIPTS]
    assert results[0].metrics[-1]["weights_sha256"] == results[1].metrics[-1]["weights_sha256"]


def test_more_processes_than_gpus():
    gpus = torch.cuda.device_count()
    (line,) = errors(launch(ROOT / SCRIPTS[0], "--dataset", "synthetic", nproc=gpus + 1, gpu=True))
    assert f"{gpus + 1} processes on this machine but {gpus} GPUs" in line
