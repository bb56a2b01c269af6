import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

test_set = MNIST("data", train=False, transform=ToTensor())
layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(576, 10)]
model = nn.Sequential(*layers)
model.load_state_dict(torch.load("model.pt", map_location="cpu"))

correct = 0
with torch.no_grad():
    for images, labels in DataLoader(test_set, batch_size=64):
        correct += (model(images).argmax(dim=1) == labels).sum().item()
print(f"accuracy {correct / len(test_set):.2%}")
