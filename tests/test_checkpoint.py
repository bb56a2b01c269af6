"""Nothing is lost: whatever ends a run, and however often, it ends on the bits of the run that nobody disturbed."""

import contextlib
import os
import random
import resource
import signal

import pytest
import torch
import torch.nn.functional as F
from conftest import DDP, MANUAL, ROOT, SCRIPTS, Background, Ranks, fail, finish, outcome, run_script, start, weights
from soak import disturb
from torch.utils.data import TensorDataset

STOPPED = "stopped by a signal, saved to "


@pytest.fixture(scope="module")
def flags(small_mnist):
    """Two epochs, of 10 steps each at two processes."""
    return ("--data-dir", small_mnist, "--train-size", 320, "--batch-size", 16, "--epochs", 2, "--log-interval", 1)


@pytest.fixture
def saving(tmp_path):
    return ("--checkpoint", tmp_path / "ck.pt", "--save-every", 5, "--metrics", tmp_path / "m.jsonl")


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    metrics = tmp_path_factory.mktemp("undisturbed") / "m"
    finish(DDP, *flags, "--metrics", metrics)
    return outcome(metrics)


@pytest.fixture
def goes_on(flags, saving, undisturbed, tmp_path):
    """Finish an interrupted run, and compare it: goes_on(script)."""

    def goes_on(script=None):
        if script:
            finish(script, *flags, *saving)
        entries = outcome(tmp_path / "m.jsonl")
        # After a kill between an epoch's line and its save, the line is there twice.
        assert [entry for i, entry in enumerate(entries) if entry not in entries[:i]] == undisturbed

    return goes_on


def test_kills_at_any_moment_under_torchrun(flags, saving, goes_on, tmp_path, free_port):
    command = start(2, "--nnodes=1", f"--master-port={free_port}", "--max-restarts=2")  # one for each kill
    with Background(*command, ROOT / MANUAL, *flags, *saving, "--save-every", 1, log=tmp_path / "log") as job:
        disturb(job, 2, 2, 1.5, random.Random(4))  # with this seed, rank 0 in a step, and rank 1 in the second start
        assert job.wait() == 0
        assert "going on from" in job.output()
    goes_on()


def test_a_kill_while_rank_0_writes(flags, saving, goes_on, tmp_path):
    whole, half = tmp_path / "ck.pt", tmp_path / "ck.pt.tmp"
    while not half.exists():  # else it was renamed in that moment
        with Ranks(DDP, *flags, *saving, "--save-every", 1) as ranks:
            ranks.wait_for(whole.exists)
            ranks.wait_for(half.exists)
            ranks.kill(0)
            ranks.wait()
    goes_on(MANUAL)


@pytest.mark.parametrize(
    ("how", "code", "script"), [(signal.SIGTERM, 1, DDP), (signal.SIGINT, 1, DDP), (signal.SIGKILL, -9, MANUAL)]
)
def test_torchrun_is_ended_leaves_no_orphans_and_a_second_start_goes_on(
    how, code, script, flags, saving, goes_on, tmp_path
):
    with Background(*start(2), ROOT / script, *flags, *saving, log=tmp_path / "log") as job:
        job.wait_for("epoch 1/2  step 7/")
        job.process.send_signal(how)
        assert job.wait() == code  # 1 though all workers, to which it passes the signal on, return 0
        goes_on(MANUAL)
        assert not job.pids()
        assert job.output().count(STOPPED) == (code == 1)
        assert "epoch 2/2  step 10/" not in job.output()  # they did not end by having finished


def test_ctrl_c_twice_and_signals_without_a_checkpoint(flags, saving):
    long = (DDP, *flags, "--epochs", 1000, "--batch-size", 300)
    for number, others in ((signal.SIGINT, saving), (signal.SIGINT, ()), (signal.SIGUSR1, ())):
        with Ranks(*long, *others, nproc=1) as ranks:
            ranks.wait_for("step 1/")
            with contextlib.suppress(ProcessLookupError, KeyError):  # until it has ended
                while True:
                    ranks.kill(0, number)
            assert ranks.wait() != [0] and STOPPED not in ranks.output()


def spied(folder, *command):
    """Run a script; note the indices of the images that this rank trains on; let its model drop out."""
    getitem, forward = TensorDataset.__getitem__, torch.nn.Linear.forward

    def noted(self, indices):
        if len(self) == 320:
            with (folder / f"rank{os.environ['RANK']}").open("a") as file:
                file.writelines(f"{index}\n" for index in indices)
        return getitem(self, indices)

    TensorDataset.__getitem__ = noted
    torch.nn.Linear.forward = lambda self, x: forward(self, F.dropout(x, training=self.training))
    run_script(*command)


@pytest.mark.parametrize(
    ("number", "scripts", "after"),
    [(signal.SIGUSR1, SCRIPTS, 1), (signal.SIGTERM, SCRIPTS[::-1], 3), (signal.SIGUSR1, SCRIPTS[::-1], 2)],
)
def test_a_signal_to_one_rank_stops_both_and_the_twin_goes_on(number, scripts, after, flags, tmp_path):
    """Another number of processes uses no sample twice. The same one ends on the same weights, dropout or not."""
    before, twin = ((spied, tmp_path, script, *flags, "--epochs", 1) for script in scripts)
    saving = ("--checkpoint", tmp_path / "ck.pt")
    with Ranks(*before, *saving) as ranks:
        ranks.wait_for("step 2/")
        ranks.kill(1, number)
        assert ranks.wait() == [0, 0]
        assert ranks.output().count(STOPPED) == 1
    used = torch.load(tmp_path / "ck.pt")["place"][1]
    batch, steps = 16 * after, 320 // (16 * after)
    done = -(-used // batch)
    assert done < steps, "not saved where it stopped"
    output = finish(*twin, *saving, nproc=after)
    assert f" after 0 epochs and {done} of {steps} steps" in output
    read = [int(line) for path in tmp_path.glob("rank*") for line in path.read_text().split()]
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0)).tolist()  # torch's, of epoch 0
    assert sorted(read) == sorted(order[:used] + order[done * batch : steps * batch])
    assert after != 2 or weights(output) == weights(finish(*twin))


@pytest.fixture(scope="module")
def saved(flags, tmp_path_factory):
    """What --checkpoint holds after an epoch of one process."""
    path = tmp_path_factory.mktemp("saved") / "ck.pt"
    finish(DDP, *flags, "--epochs", 1, "--checkpoint", path, nproc=1)
    return path.read_bytes()


DAMAGED, OTHER = "ck.pt is damaged: delete it, or give another name", "ck.pt is of a run with --{}: use that, or give"
UNFIT = {  # what is wrong: how to damage the file, and what the line says
    "truncated": (lambda whole: whole[:5_000_000], DAMAGED),
    "empty": (lambda whole: b"", DAMAGED),
    "random bytes": (lambda whole: random.Random(0).randbytes(10_000), DAMAGED),
    "--seed 1": (bytes, OTHER.format("seed 0")),
    "--train-size 300": (bytes, OTHER.format("train-size 320")),
    "--dataset synthetic": (bytes, OTHER.format("dataset mnist")),
}


@pytest.mark.parametrize("wrong", UNFIT)
def test_unfit_files_are_refused_and_stay(wrong, saved, flags, tmp_path):
    damage, line = UNFIT[wrong]
    path, content = tmp_path / "ck.pt", damage(saved)
    path.write_bytes(content)
    other_flags = wrong.split() if damage is bytes else ()
    assert line in fail(MANUAL, *flags, *other_flags, "--checkpoint", path)
    assert path.read_bytes() == content


def on_a_full_disk(*command):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, 100_000_000))
    run_script(*command)


def test_a_full_disk_ends_the_run_and_leaves_the_old_file_which_goes_on(saved, flags, tmp_path):
    path = tmp_path / "ck.pt"
    path.write_bytes(saved)
    with Ranks(on_a_full_disk, DDP, *flags, "--checkpoint", path, "--save-every", 1) as ranks:
        assert 0 not in ranks.wait() and "File too large" in ranks.output()
    assert path.read_bytes() == saved
    again = finish(MANUAL, *flags, "--epochs", 1, "--checkpoint", path, nproc=1)
    assert "after 1 epochs" in again and "step 1/" not in again and "of 101 test images" in again
    more = finish(DDP, *flags, "--lr", 0.001, "--batch-size", 40, "--checkpoint", path, nproc=1)
    assert "epoch 2/2  step 8/8" in more and "epoch 1/2" not in more


def test_a_kill_on_one_of_two_nodes(flags, saving, goes_on, tmp_path, free_port):
    """Two torchruns stand for two nodes. They make a new store for a restart, where asked to."""
    nodes = 'PET_RDZV_CONF=is_host=1 "$@" & PET_RDZV_CONF=is_host=0 "$@" && wait $!'
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--local-addr=127.0.0.1")
    torchrun = start(1, "--nnodes=2", "--max-restarts=1", *where)
    env = {"OMP_NUM_THREADS": 1, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "log": tmp_path / "log"}
    with Background("bash", "-c", nodes, "bash", *torchrun, ROOT / DDP, *flags, *saving, **env) as job:
        job.wait_for("epoch 1/2  step 7/")
        job.kill(1)
        assert job.wait() == 0
        assert "going on from" in job.output()
    goes_on()
