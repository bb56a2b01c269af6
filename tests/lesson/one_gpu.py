import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

train_set = MNIST("data", train=True, transform=ToTensor())
test_set = MNIST("data", train=False, transform=ToTensor())
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(test_set, batch_size=64)

layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(576, 10)]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(3):
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    accuracy = correct.item() / len(test_set)
    print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
torch.save(model.state_dict(), "model.pt")
