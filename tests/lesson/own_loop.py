"""A loop to copy and to change. It has what most loops have, and resumes after the last epoch that it saved.

    torchrun --standalone --nproc-per-node=2 own_loop.py
    SCRIPT=own_loop.py sbatch --nodes=1 --gpus-per-node=4 --array=1-5%1 slurm_submit_ddp.sh  # a chain

The comments 1 to 7 are the seven changes that make it distributed, as in many_gpus.py.
"""

import contextlib
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, RandomCrop, ToTensor
from tqdm import tqdm

EPOCHS, PATIENCE, SEED = 6, 2, 0  # it stops after PATIENCE epochs without a better accuracy
BATCH_SIZE, WORKERS = 32, 2  # in each process
ACCUM_STEPS, LR, CLIP_NORM = 2, 0.01, 1.0  # for each optimizer step

if cuda := torch.cuda.is_available():  # 1. pick your own device
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda" if cuda else "cpu")
dist.init_process_group("nccl" if cuda else "gloo")  # 2. join the process group
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(SEED)  # also for a random_split, which has to be the same on all ranks
train_set = MNIST("data", train=True, transform=Compose([RandomCrop(28, padding=2), ToTensor()]))
val_set = MNIST("data", train=False, transform=ToTensor())  # as MNIST has no validation set
# 3. split the data
sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)  # equal shares
share = range(rank, len(val_set), world_size)  # each image once, however many ranks there are
options = {"batch_size": BATCH_SIZE, "num_workers": WORKERS, "pin_memory": cuda}
# Other ways to start workers, such as Python 3.14's default, need an `if __name__ == "__main__":`. If
# "fork" hangs, see "It hangs" in the README.
options["multiprocessing_context"] = "fork" if WORKERS else None
# Here, drop_last leaves out a smaller last batch, as each of its samples would weigh more.
train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
val_loader = DataLoader(val_set, sampler=share, **options)

layers = [nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()]
model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(576, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
steps = EPOCHS * (len(train_loader) // ACCUM_STEPS)  # optimizer steps: fewer with more ranks
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
first_epoch, best, patience = 0, -math.inf, PATIENCE  # the best accuracy: higher is better
settings = [EPOCHS, SEED, BATCH_SIZE, ACCUM_STEPS, LR, world_size, len(train_set)]

exists = rank == 0 and os.path.exists("last.pt")
# weights_only=False allows any object, such as NumPy's, but a stranger's file could run code.
box = [torch.load("last.pt", map_location="cpu", weights_only=False) if exists else None]
dist.broadcast_object_list(box, src=0)  # all ranks get what rank 0 has read, or None
if state := box[0]:
    if state["settings"] != settings:  # the schedule would be another one
        sys.exit(f"last.pt is of a run with {state['settings']}, not {settings}: move it and best.pt away")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first_epoch, best, patience = state["progress"]
    if rank == 0:
        print(f"resumed from last.pt, epochs done: {first_epoch}, best accuracy {best:.2%}")
ddp = DistributedDataParallel(model)  # 4. start from equal weights and average the gradients

for epoch in range(first_epoch, EPOCHS):
    if patience == 0:  # on all ranks at once, as `patience` depends on the accuracy over all ranks
        break
    start = time.perf_counter()
    model.train()
    sampler.set_epoch(epoch)  # 5. shuffle again in every epoch
    # Each rank and epoch has a seed of its own, for dropout and augmentation. hash() of numbers, unlike
    # that of strings, is always the same, so a resumed run has the same seeds.
    torch.manual_seed(hash((SEED, epoch, rank)))
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    loss_sum, samples, hits = sums.unbind()  # views: += on one of these changes `sums`, too
    disable = None if rank == 0 else True  # None: tqdm draws the bar in a terminal, and not in a file
    bar = tqdm(train_loader, leave=False, disable=disable)
    for i, batch in enumerate(bar, start=1):
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        complete = i % ACCUM_STEPS == 0  # the last pass of a step
        with contextlib.nullcontext() if complete else ddp.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                logits = ddp(images)  # 4. again: model(images) would average nothing
            # A mean over equally many samples on each rank. For ignored pixels or tokens, see the README.
            loss = nn.functional.cross_entropy(logits.float(), labels)
            (loss / ACCUM_STEPS).backward()
        loss_sum += loss.detach() * len(labels)
        samples += len(labels)
        if complete:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)  # of the averages
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    optimizer.zero_grad()  # drop the gradients of an incomplete step, or the next step would include them

    model.eval()
    for buffer in model.buffers():  # BatchNorm's statistics differ by rank: all take those of rank 0
        dist.broadcast(buffer, src=0)
    with torch.no_grad():
        for images, labels in val_loader:
            hits += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(sums)  # 6. evaluate together: sums over all ranks first, and then the division
    loss, accuracy = loss_sum.item() / samples.item(), hits.item() / len(val_set)
    # Weights and BatchNorm's statistics are equal on all ranks here, so all of them exit or none.
    if not all(x.isfinite().all() for x in model.state_dict().values()):
        sys.exit(f"epoch {epoch + 1}: the weights are not finite, and not saved: try a lower LR")
    improved = accuracy > best
    best, patience = (accuracy, PATIENCE) if improved else (best, patience - 1)
    if rank == 0:  # 7. let one rank write, and let all ranks decide: no `break` in here
        more = f"{world_size} ranks on {device}, {time.perf_counter() - start:.1f} s"
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.2%}, {more}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"scheduler": scheduler.state_dict(), "settings": settings}
        state["progress"] = (epoch + 1, best, patience)
        # best.pt comes first: if the run is killed before last.pt is written, it repeats the epoch.
        names = ["best.pt", "last.pt"] if improved else ["last.pt"]
        for name in names:
            torch.save(state, f"{name}.tmp")
            os.replace(f"{name}.tmp", name)  # so, whenever it is killed, the file is a whole one
del ddp  # without this, on CPUs, threads of Gloo may crash the process at its end
dist.destroy_process_group()
