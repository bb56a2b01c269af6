"""Run a script with a small model in the place of ResNet18: python tests/small_model.py train_ddp.py --its --flags"""

import os
import runpy
import sys
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torchvision
from torch import nn


class Pause(nn.Module):
    """PAUSE in the environment is the seconds that a step takes longer, for tests that disturb a run in its middle."""

    def forward(self, inputs):
        # In an evaluation with gradients, the graphs of all batches would stay in memory.
        assert self.training == torch.is_grad_enabled()
        assert self.training or not torch.is_autocast_enabled("cpu")  # as --help says: tests are fp32
        if self.training:
            time.sleep(float(os.environ.get("PAUSE", "0")))
        return inputs


def resnet18(num_classes):
    """Return ResNet18's first convolution, BatchNorm, and a linear layer."""
    layers = {"conv1": nn.Conv2d(3, 64, 7, 2, 3, bias=False), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
    layers |= {"pool": nn.AdaptiveAvgPool2d(2), "flatten": nn.Flatten(), "fc": nn.Linear(256, num_classes)}
    layers["pause"] = Pause()
    return nn.Sequential(OrderedDict(layers))


def with_small_model(function, *arguments):
    torchvision.models.resnet18 = resnet18
    function(*arguments)


def run_script(script, *flags):
    """Run a script in this process, as `python script flags...` does."""
    sys.argv = [str(script), *map(str, flags)]
    runpy.run_path(str(Path(__file__).resolve().parent.parent / script), run_name="__main__")


if __name__ == "__main__":
    with_small_model(run_script, *sys.argv[1:])
