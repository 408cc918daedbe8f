"""A rank of PyTorch's DistributedDataParallel, for frameworks.py.

frameworks_torch.py METHOD BATCH STEPS: METHOD is none, plain, fp16 or powersgd/RANK. It runs in an
environment with PyTorch and without TensorFlow.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from frameworks_rank import CHIEF, CLASSES, PORT, measure
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


class Block(nn.Module):
    """Three convolutions of ResNet-50, and the way around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            *convolution(before, width, 1, stride),
            nn.ReLU(),
            *convolution(width, width, 3),
            nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )
        same = stride == 1 and before == 4 * width
        self.around = nn.Sequential(*([] if same else convolution(before, 4 * width, 1, stride)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.way(value) + self.around(value))


def convolution(before: int, width: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Return a convolution and its batch norm; with a bias, as Keras's ResNet-50 has them."""
    return nn.Conv2d(before, width, size, stride, size // 2), nn.BatchNorm2d(width)


def resnet50() -> nn.Module:
    """Make ResNet-50: 3, 4, 6 and 3 blocks."""
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(blocks):
            layers.append(Block(before, width, 2 if number == 0 and width > 64 else 1))
            before = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)]
    return nn.Sequential(*layers)


method, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ |= {"MASTER_ADDR": CHIEF, "MASTER_PORT": str(PORT)}
dist.init_process_group("gloo")
# Threads that wait for each other take the cores from other ranks: 4 of them share 2 cores
torch.set_num_threads(1)
torch.manual_seed(1)
model = resnet50()
kind, _, rank = method.partition("/")
# Over Gloo the hook of PowerSGD fails with several buckets
size = {"bucket_cap_mb": 1000} if kind == "powersgd" else {}
parallel = torch.nn.parallel.DistributedDataParallel(model, **size)
if kind == "fp16":
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
elif kind == "powersgd":
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2
    )
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
trained = model if kind == "none" else parallel
optimizer = torch.optim.SGD(model.parameters(), 0.01)
random = torch.Generator().manual_seed(dist.get_rank())
images = torch.randn(batch, 3, 64, 64, generator=random)
labels = torch.randint(0, CLASSES, (batch,), generator=random)


def step() -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(trained(images), labels).backward()
    optimizer.step()


measure(
    step,
    dist.barrier,
    lambda: [one.detach().numpy() for one in model.parameters()],
    steps,
    f"PyTorch {torch.__version__}",
)
dist.destroy_process_group()
