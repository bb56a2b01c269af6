"""A loop to copy and to change. It has what most loops have, and resumes from last.pt.

    torchrun --standalone --nproc-per-node=2 own_loop.py

The comments 1 to 7 are the seven changes that make it distributed, as in many_gpus.py.
"""

import contextlib
import os

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

train_set = MNIST("data", train=True, transform=Compose([RandomCrop(28, padding=2), ToTensor()]))
test_set = MNIST("data", train=False, transform=ToTensor())
# 3. split the data
sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
share = range(rank, len(test_set), world_size)  # for the test, as the sampler would repeat images
options = {"batch_size": BATCH_SIZE, "num_workers": WORKERS, "pin_memory": cuda}
options["multiprocessing_context"] = "fork" if WORKERS else None  # others run this file once more
train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
test_loader = DataLoader(test_set, sampler=share, **options)

torch.manual_seed(SEED)
layers = [nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()]
model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(576, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
# In optimizer steps. With more processes there are fewer, as len(train_loader) is smaller.
steps = EPOCHS * (len(train_loader) // ACCUM_STEPS)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
first_epoch, best, patience = 0, 0.0, PATIENCE

# Only rank 0 looks for the file, and sends what is in it: all ranks resume, or none does.
box = [None]
if rank == 0 and os.path.exists("last.pt"):
    box = [torch.load("last.pt", map_location="cpu")]
dist.broadcast_object_list(box, src=0)
if state := box[0]:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first_epoch, best, patience = state["progress"]
ddp = DistributedDataParallel(model)  # 4. start from equal weights and average the gradients

for epoch in range(first_epoch, EPOCHS):
    if patience == 0:  # on all ranks alike, as it comes from the accuracy of all
        break
    model.train()
    sampler.set_epoch(epoch)  # 5. shuffle again in every epoch
    # Dropout and augmentation: without `rank`, all ranks would draw the same numbers; without
    # `epoch`, a resumed run would draw those of its first epochs again.
    torch.manual_seed(SEED + epoch * world_size + rank)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, samples, hits in the test
    for i, (images, labels) in enumerate(tqdm(train_loader, leave=False, disable=rank != 0), 1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        complete = i % ACCUM_STEPS == 0
        with contextlib.nullcontext() if complete else ddp.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                logits = ddp(images)  # 4. again: model(images) would average nothing
            loss = nn.functional.cross_entropy(logits.float(), labels)
            (loss / ACCUM_STEPS).backward()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        if complete:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)  # of the averages
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    optimizer.zero_grad()  # what is left of an incomplete step was not averaged

    model.eval()
    for buffer in model.buffers():  # BatchNorm's statistics differ by rank: all take those of rank 0
        dist.broadcast(buffer, src=0)
    with torch.no_grad():
        for images, labels in test_loader:
            sums[2] += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(sums)  # 6. evaluate together: sums over all ranks first, and then the division
    loss, accuracy = (sums[0] / sums[1]).item(), sums[2].item() / len(test_set)
    improved = accuracy > best
    best, patience = (accuracy, PATIENCE) if improved else (best, patience - 1)
    if rank == 0:  # 7. let one rank write, and let all ranks decide: no `break` in here
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.2%}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"scheduler": scheduler.state_dict(), "progress": (epoch + 1, best, patience)}
        for name in ("best.pt", "last.pt") if improved else ("last.pt",):
            torch.save(state, "new.tmp")
            os.replace("new.tmp", name)  # at any moment, the file is the old one or the new one
del ddp  # as it uses the process group, which ends here
dist.destroy_process_group()
