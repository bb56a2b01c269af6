import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # 1. pick your own device
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # 2. join the process group
rank, world_size = dist.get_rank(), dist.get_world_size()

train_set = MNIST("data", train=True, transform=ToTensor())
test_set = MNIST("data", train=False, transform=ToTensor())
sampler = DistributedSampler(train_set, drop_last=True)  # 3. split the data
train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)
test_loader = DataLoader(test_set, batch_size=64, sampler=range(rank, len(test_set), world_size))

layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(576, 10)]
model = nn.Sequential(*layers).to(device)
ddp = DistributedDataParallel(model)  # 4. start from equal weights and average the gradients
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(3):
    sampler.set_epoch(epoch)  # 5. shuffle again in every epoch
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))  # 4. again
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(correct)  # 6. evaluate together
    accuracy = correct.item() / len(test_set)
    if rank == 0:  # 7. let one rank write, and let all ranks decide
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}, {world_size} ranks on {device}")
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
del ddp  # without this, on CPUs, threads of Gloo may crash the process at its end
dist.destroy_process_group()
