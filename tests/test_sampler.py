"""The hand-written sampler deals the same indices as torch's."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from train_manual_ddp import ManualDistributedSampler


@settings(max_examples=500, deadline=None)
@given(
    size=st.integers(0, 200),
    world_size=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_indices_are_torchs(size, world_size, seed, epoch, shuffle, drop_last):
    for rank in range(world_size):
        options = {"num_replicas": world_size, "rank": rank, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        ours, torchs = ManualDistributedSampler(range(size), **options), DistributedSampler(range(size), **options)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 200), world_size=st.integers(1, 12), epoch=st.integers(0, 100))
def test_no_sample_twice_and_only_the_tail_left_out(size, world_size, epoch):
    dealt = []
    for rank in range(world_size):
        sampler = ManualDistributedSampler(range(size), world_size, rank, drop_last=True)
        sampler.set_epoch(epoch)
        dealt += sampler
    assert len(dealt) == len(set(dealt)) == size // world_size * world_size
