"""GradientAverager and evaluation on 2, 3 and 4 real processes; averager_worker.py holds the checks."""

import pytest
from conftest import ROOT, launch


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_averager(world_size):
    result = launch(ROOT / "tests" / "averager_worker.py", nproc=world_size)
    assert result.returncode == 0, result.stderr
    assert "all checks passed" in result.stdout
