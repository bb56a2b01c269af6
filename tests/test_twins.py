"""The two scripts are one, but for the lines where DDP is; and the sampler written by hand deals torch's indices."""

import ast
import difflib

from conftest import ROOT, SCRIPTS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from train_manual_ddp import ManualDistributedSampler

HAND_WRITTEN = {"ManualDistributedSampler", "GradientAverager"}
OF_DDP = ("DistributedDataParallel", "DistributedSampler", "averager", "ddp", "--sync", "no_sync()", "torch.utils.data")


def shared_part(script):
    """Return the lines of a script without its module docstring and the hand-written classes."""
    source = (ROOT / script).read_text()
    body, lines = ast.parse(source).body, source.splitlines()
    for node in reversed([body[0]] + [node for node in body if getattr(node, "name", None) in HAND_WRITTEN]):
        del lines[node.lineno - 1 : node.end_lineno]
    return [line for line in lines if line.strip()]


def test_the_scripts_differ_only_where_ddp_is():
    changes = [line for line in difflib.ndiff(*map(shared_part, SCRIPTS)) if line[0] in "+-"]
    assert len(changes) <= 16, "\n".join(changes)
    assert not [line for line in changes if not any(word in line for word in (*OF_DDP, "def train_step("))], changes


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(0, 200), world_size=st.integers(1, 12), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 99)
)
def test_indices_are_torchs(size, world_size, seed, epoch):
    dealt = []
    for rank in range(world_size):
        ours = ManualDistributedSampler(range(size), world_size, rank, seed)
        torchs = DistributedSampler(range(size), world_size, rank, seed=seed, drop_last=True)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        dealt += ours
    assert len(dealt) == len(set(dealt)) == size // world_size * world_size
