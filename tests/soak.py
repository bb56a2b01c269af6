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

from conftest import ROOT, SCRIPTS, Background, torchrun


def disturb(job, kills, pause, rng):
    """Kill one of a Background job's two ranks, and then of those that torchrun has started again, `kills` times.

    Every other time up to `pause` seconds after the ranks have taken their second step; else up to `pause` after
    they have started, when they import, meet, or read the checkpoint.
    """
    old = set()
    for kill in range(kills):
        known = len(job.output())

        def find_new(old=old):
            new = {rank: pid for rank, pid in job.pids().items() if rank is not None}
            return new if len(new) == 2 and not old & {*new.values()} else None

        ranks = job.wait_for(find_new)
        if kill % 2 == 0:
            job.wait_for(lambda known=known: job.output().count("  loss ", known) > 1)  # so the first step may be saved
        delay, rank = rng.uniform(0, pause), rng.randrange(2)
        time.sleep(delay)
        os.kill(ranks[rank], signal.SIGKILL)
        print(f"rank {rank} killed {delay:.1f} s after its {'start' if kill % 2 else 'second step'}", flush=True)
        old = {*ranks.values()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog="All other flags go to the script.")
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--kills", type=int, default=20, help="(default: %(default)s)")
    args, flags = parser.parse_known_args()
    command, hashes, pause = (ROOT / args.script, "--log-interval", 1, *flags), [], 0
    with tempfile.TemporaryDirectory() as folder:
        saving = ("--checkpoint", Path(folder) / "ck.pt", "--save-every", 10)
        for kills in (0, args.kills):
            launch = torchrun(2, "--standalone", f"--max-restarts={kills}")
            where = {"log": Path(folder) / "log", "cwd": Path.cwd(), "gpu": True}
            where["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = 1  # or restarted ranks would look for the dead
            with Background(*launch, *command, *(saving if kills else ()), **where) as job:
                disturb(job, kills, pause, random.Random(args.script))
                job.wait_for("  loss ")
                began = time.monotonic()
                if job.wait(timeout=None):
                    sys.exit(job.output())
                found = re.findall(r"weights_sha256 (\w+)", job.output())  # two, if a kill comes after the first
                print(f"{kills} kills: {job.output().count('  loss ')} steps, {found[-1]}", flush=True)
                hashes += found
            pause = 0.5 * (time.monotonic() - began) / max(args.kills, 1)  # something is left after the last
    sys.exit(None if len({*hashes}) == 1 else "the weights differ")


if __name__ == "__main__":
    main()
