"""The two scripts are one, but for the lines where DDP is."""

import ast
import difflib

from conftest import ROOT, SCRIPTS

HAND_WRITTEN = {"ManualDistributedSampler", "GradientAverager"}
LIMIT = 20


def shared_part(script):
    """Return the lines of a script without its module docstring and the hand-written classes."""
    source = (ROOT / script).read_text()
    body = ast.parse(source).body
    left_out = [body[0]] + [node for node in body if isinstance(node, ast.ClassDef) and node.name in HAND_WRITTEN]
    lines = source.splitlines()
    for node in reversed(left_out):
        del lines[node.lineno - 1 : node.end_lineno]
    return [line for line in lines if line.strip()]


def difference(ours, theirs):
    changes = difflib.unified_diff(ours, theirs, n=0, lineterm="")
    return [line for line in changes if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_the_scripts_differ_only_where_ddp_is():
    ddp, manual = map(shared_part, SCRIPTS)
    changes = difference(ddp, manual)
    assert len(changes) <= LIMIT, "\n".join(changes)

    # Functions there take the averager as well. What else differs must speak of DDP, of what replaces it, or of both.
    changes = difference(
        [line.replace("ddp, ", "model, ") for line in ddp], [line.replace("averager, ", "") for line in manual]
    )
    words = (
        "DistributedDataParallel",
        "GradientAverager",
        "DistributedSampler",
        "no_sync()",
        "--sync",
        "ddp.",
        "averager.",
    )
    strangers = [line for line in changes if not any(word in line for word in words)]
    assert not strangers, "\n".join(strangers)


def test_same_functions_in_the_same_order():
    names = [
        [node.name for node in ast.parse((ROOT / script).read_text()).body if hasattr(node, "name")]
        for script in SCRIPTS
    ]
    assert names[0] == [name for name in names[1] if name not in HAND_WRITTEN]
    assert set(names[1]) - set(names[0]) == HAND_WRITTEN
