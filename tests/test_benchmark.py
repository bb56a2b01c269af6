"""The benchmark measures what it says: its arithmetic, and its contestants."""

import re

import benchmark
from conftest import ROOT, SCRIPTS


def test_its_tables_are_those_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^\|  \| ms a step \| speed-up \|\n.*\n((?:\|.*\n)+)", readme, re.M)
    shown = [re.findall(r"(?m)^\| (.*?) \|", block) for block in blocks]
    tables = (benchmark.SYNCS, benchmark.TWINS, benchmark.WAYS, benchmark.FLAGS)
    assert shown == [[*names.values()] for names in tables]


def test_ddp_is_set_as_in_the_script():
    source, ours = ((ROOT / name).read_text() for name in (SCRIPTS[0], "tests/benchmark.py"))
    lines = [line.partition("  #")[0].strip() for line in source.splitlines() if re.match(r" +ddp(\.\w+)? = ", line)]
    assert len(lines) == 2
    assert all(line in ours for line in lines)


def test_speed_ups_are_paired(capsys):
    benchmark.print_steps("", {"a": [0.2, 0.4, 0.4], "b": [0.1, 0.1, 0.4]}, {"b": "words"}, "a")
    assert "| words | 100 (100 to 250) | 2.000 (1.500 to 3.000) |" in capsys.readouterr().out


def test_efficiencies(capsys):
    def result(speed):
        return {"samples_per_second": speed, "peak_memory_bytes": 2**30}

    found = {kind: {1: result(100), 2: result(150)} for kind in ("weak", "strong", "twin")}
    found |= {"start": {1: 5, 2: 6}, "limit": {1: 0.8, 2: 1.0}}
    benchmark.print_scripts("", [found], [1, 2])
    row = (
        "| train_ddp.py | 2 | 150 (150 to 150) | 75% (75% to 75%) | 80% (80% to 80%) | 1,024 MiB | 6.0 (6.0 to 6.0) s |"
    )
    assert row in capsys.readouterr().out
