"""Run a script like `python` does; on the way, note which training images it reads, and let its model drop out.

    python spy.py SCRIPT FLAGS...

Each rank appends the numbers of the images to a file of its own in the folder SPY, if that variable is set. With
the variable DROPOUT, the model has something random: dropout before its last layer.
"""

import os
import runpy
import sys

import torch.nn.functional as F
import torchvision
from torch.utils.data._utils.fetch import _MapDatasetFetcher

resnet18, fetch = torchvision.models.resnet18, _MapDatasetFetcher.fetch


def with_dropout(**options):
    model = resnet18(**options)
    model.fc.register_forward_pre_hook(lambda fc, inputs: F.dropout(inputs[0], training=fc.training))
    return model


def noted(self, indices):
    if len(self.dataset) == int(os.environ["TRAIN_IMAGES"]):
        with open(f"{os.environ['SPY']}/rank{os.environ.get('RANK', 0)}", "a") as file:
            file.writelines(f"{index}\n" for index in indices)
    return fetch(self, indices)


if "DROPOUT" in os.environ:
    torchvision.models.resnet18 = with_dropout
if "SPY" in os.environ:
    _MapDatasetFetcher.fetch = noted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
