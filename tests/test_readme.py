"""The README's commands run, print what it shows, and its flags are the scripts'."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, launch, own_lines, run

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
ENTER = "python3 -m venv .venv && . .venv/bin/activate && pip install -r "
FIRST, TESTS = COMMANDS[0], COMMANDS[1]
SOAKS = [command for command in COMMANDS if "tests/soak.py" in command]
TRAININGS = [command for command in COMMANDS[2:] if re.search(r" train_\w*\.py", command)]
TRAININGS = [command for command in TRAININGS if command not in SOAKS and "diff" not in command]


def run_as_it_stands(command, *flags, **options):
    """Run a command of the README in a shell that has entered the virtual environment; `flags` come last."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(["bash", "-c", f"{command} {shlex.join(map(str, flags))}"], PATH=path, **options)


def shape(text):
    """Return text with its numbers, host names and hashes made alike: these differ by machine."""
    text = re.sub(r"[0-9a-f]{64}", "HASH", text)
    text = re.sub(r" on \S+, ", " on HOST, ", text)
    return re.sub(r"\d[\d.,e+-]*\w*", "0", text)


def test_every_command_is_run_or_known():
    assert FIRST.startswith(ENTER + "requirements.txt && ")
    assert TESTS == ENTER + "tests/requirements.txt && pytest tests"  # which is how this test came to run
    assert set(COMMANDS) == {FIRST, TESTS, *TRAININGS, *SOAKS, f"diff {' '.join(SCRIPTS)}"}
    assert len(TRAININGS) >= 6 and len(SOAKS) == 2


def test_the_first_command_prints_what_is_shown():
    result = run_as_it_stands(FIRST.split(" && ")[-1])
    assert result.returncode == 0, result.stderr
    shown = re.search(r"```text\n(.*?)```", README, re.S).group(1)
    assert list(map(shape, own_lines(result))) == list(map(shape, shown.splitlines()))


@pytest.mark.parametrize("command", TRAININGS)
def test_training_command(command, small_mnist, tmp_path):
    # In a copy, where the command may leave its files.
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    result = run_as_it_stands(command, "--data-dir", small_mnist, "--epochs", 1, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "the same on every rank" in result.stdout


@pytest.mark.parametrize("command", SOAKS)
def test_soak_command(command, small_mnist):
    result = run_as_it_stands(command, "--data-dir", small_mnist, "--batch-size", 16, "--kills", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(set(re.findall("weights sha256 [0-9a-f]{64}", result.stdout))) == 1
    assert " killed " in result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_are_those_of_the_table(script):
    table = set(re.findall(r"^\| `(--[a-z-]+)", README, re.M)) - {"--sync"}
    assert table
    flags = set(re.findall(r"^  (--[a-z-]+)", launch(ROOT / script, "--help").stdout, re.M))
    assert flags == table | ({"--sync"} if "manual" in script else set())
