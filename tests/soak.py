"""Train once in peace, and once while random ranks are killed at random moments. Both must end on the same weights.

python tests/soak.py train_ddp.py --kills 20 --data-dir data    # all other flags go to the script
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from conftest import ROOT, SCRIPTS, Background, start


def disturb(job, nproc, kills, pause, rng):
    """Kill a random rank of a Background job, and then of the ranks that torchrun has started again, `kills` times.

    Every other time up to `pause` seconds after the ranks have taken their first step; else up to `pause` after
    they have started, when they import, meet, or read the checkpoint. Returns what was done, one line a kill.
    """
    old, story = set(), []
    for kill in range(kills):
        known = len(job.output())

        def ranks(old=old):
            assert job.process.poll() is None, job.output()
            new = {rank: pid for rank, pid in job.pids().items() if rank is not None}
            return new if len(new) == nproc and not old & {*new.values()} else None

        victims, since = job.wait_for(ranks), "start"
        if kill % 2 == 0:
            job.wait_for(lambda known=known: "  loss " in job.output()[known:])
            since = "first step"
        delay, rank = rng.uniform(0, pause), rng.randrange(nproc)
        time.sleep(delay)
        os.kill(victims[rank], signal.SIGKILL)
        story.append(f"rank {rank} killed {delay:.1f} s after its {since}")
        old = {*victims.values()}
    return story


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog="All other flags go to the script.")
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--nproc", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps (default: %(default)s)")
    args, flags = parser.parse_known_args()
    command = [ROOT / args.script, "--log-interval", 1, *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        began = time.monotonic()
        where = {"cwd": Path.cwd(), "log": log, "gpu": True, "network": True}
        with Background(*start(args.nproc), *command, **where) as job:
            job.wait_for("  loss ")
            ready = time.monotonic()
            peace = report(job, began, 0)
        pause = 0.9 * (time.monotonic() - ready) / args.kills  # so that something is left to train after the last one
        command += ["--checkpoint", Path(folder) / "ck.pt", "--save-every", args.save_every]
        began = time.monotonic()
        with Background(*start(args.nproc, "--standalone", f"--max-restarts={args.kills}"), *command, **where) as job:
            for line in disturb(job, args.nproc, args.kills, pause, random.Random(args.script)):
                print(line)
            war = report(job, began, args.kills)
    sys.exit(None if war == peace else "the weights differ")


def report(job, began, kills):
    """Wait until a job has ended well; print a line about it, and return the hash of its weights."""
    if job.wait(timeout=None):
        sys.exit(job.output())
    steps = len(re.findall(r"  step \d+/", job.output()))
    sha256 = re.search("weights sha256 ([0-9a-f]{64})", job.output()).group(1)
    print(f"{kills} kills: {steps} steps, {time.monotonic() - began:.0f} s, weights sha256 {sha256}", flush=True)
    return sha256


if __name__ == "__main__":
    main()
