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
    """Kill a random rank of a Background job, and one of those that take its place, and so on, `kills` times.

    Each is killed up to `pause` seconds after all ranks have started: imports, rendezvous and reading the
    checkpoint take the first few. Returns what was done, one line a kill.
    """
    victims, story = {}, []
    while len(story) < kills:

        def replaced(old=victims):
            new = {rank: pid for rank, pid in job.pids().items() if rank is not None}
            return len(new) == nproc and not {*new.values()} & {*old.values()} and new

        victims = job.wait_for(replaced)
        delay, rank = rng.uniform(0, pause), rng.randrange(nproc)
        time.sleep(delay)
        os.kill(victims[rank], signal.SIGKILL)
        story.append(f"rank {rank} killed {delay:.1f} s after its start")
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
        with Background(*start(args.nproc), *command, log=log) as job:
            job.wait_for("  loss ")
            ready = time.monotonic() - began
            peace = report(job, began, 0)
        command += ["--checkpoint", Path(folder) / "ck.pt", "--save-every", args.save_every]
        began, rest = time.monotonic(), time.monotonic() - began - ready
        with Background(*start(args.nproc, "--standalone", f"--max-restarts={args.kills}"), *command, log=log) as job:
            # However late the kills, this leaves something to train after the last one.
            for line in disturb(job, args.nproc, args.kills, ready + rest / args.kills, random.Random(args.script)):
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
