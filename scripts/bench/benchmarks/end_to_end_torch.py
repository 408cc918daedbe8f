"""A training by PyTorch's DistributedDataParallel, for the benchmark of whole trainings.

It trains the network of end_to_end_fashion.yaml on the same batches, from the same weights, at the
same rates and with the same loss as the other contestants. The recipe's optimizer is PyTorch's SGD
with Nesterov momentum and, as Keras has it, a weight decay that does not pass through the momentum.
At each evaluation the weights are copied to Keras's model, which is scored.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from bench import environments
from bench.benchmarks.end_to_end_rank import Evaluation, bytes_sent, outcome

import tfcommx as cx
from tfcommx.training.callbacks import rate_at
from tfcommx.training.run import Run
from tfcommx.training.steps import Position, fit_calls

environments.use_torch()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    default_hooks,
    powerSGD_hook,
)

# Steps that PowerSGD's hook sums exactly first; PyTorch's 1,000 would be half of a training
EXACT_STEPS = 10
# Order of a Keras kernel's axes in PyTorch, by their number; the same permutation reversed returns
TO_TORCH = {4: (3, 2, 0, 1), 2: (1, 0)}
FROM_TORCH = {4: (2, 3, 1, 0), 2: (1, 0)}


class Network(nn.Module):
    """The network of end_to_end_model.py; its parameters are in the order of Keras's."""

    def __init__(self, inputs: int, outputs: int, filters: list[int], units: int) -> None:
        super().__init__()
        before, blocks, side = inputs, list[nn.Module](), 28
        for position, count in enumerate(filters):
            blocks.append(nn.Conv2d(before, count, 3, padding=1, bias=False))
            if position < 2:
                blocks.append(nn.MaxPool2d(2))
                side //= 2
            blocks += [nn.BatchNorm2d(count, eps=1e-3, momentum=0.1), nn.ReLU()]
            before = count
        self.blocks = nn.Sequential(*blocks)
        self.hidden = nn.Linear(side * side * before, units)
        self.logits = nn.Linear(units, outputs)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the logits of pictures, which are uint8 with channels last, as are Keras's."""
        value = self.blocks(pictures.permute(0, 3, 1, 2) / 255)
        # Keras flattens with channels last
        value = value.permute(0, 2, 3, 1).flatten(1)
        return self.logits(torch.relu(self.hidden(value)))

    def state(self) -> list[torch.Tensor]:
        """Return parameters and moving averages in the order of a Keras model's weights."""
        tensors: list[torch.Tensor] = []
        for module in self.modules():
            tensors += module.parameters(recurse=False)
            if isinstance(module, nn.BatchNorm2d):
                tensors += [module.running_mean, module.running_var]
        return tensors


def load(network: Network, weights: list[np.ndarray]) -> None:
    """Copy a Keras model's weights into the network."""
    with torch.no_grad():
        for tensor, value in zip(network.state(), weights, strict=True):
            axes = TO_TORCH.get(value.ndim, tuple(range(value.ndim)))
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(value.transpose(axes))))


def weights_of(network: Network) -> list[np.ndarray]:
    """Return the network's weights as Keras's model has them."""
    values = [tensor.detach().numpy() for tensor in network.state()]
    return [value.transpose(FROM_TORCH.get(value.ndim, range(value.ndim))) for value in values]


def parallel(network: Network, contestant: str) -> nn.Module:
    """Wrap the network as a user of PyTorch does.

    Args:
        contestant: ddp, ddp_fp16 or ddp_powersgd_RANK.
    """
    hook = contestant.removeprefix("ddp").removeprefix("_")
    # Over Gloo the hook of PowerSGD fails with several buckets
    size = {"bucket_cap_mb": 1000} if hook.startswith("powersgd") else {}
    wrapped = nn.parallel.DistributedDataParallel(network, **size)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        state = powerSGD_hook.PowerSGDState(
            None, int(hook.removeprefix("powersgd_")), start_powerSGD_iter=EXACT_STEPS
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def train(run: Run, job: dict[str, Any], start: float) -> dict[str, Any]:
    """Train as `end_to_end_rank.train` does. **Ranks:** all."""
    comm, recipe, parts = run.comm, run.recipe, job["evaluations"]
    rendezvous = Path(job["output"]).with_suffix(".rendezvous")
    rendezvous.unlink(missing_ok=True)
    comm.gather_objects("removed")
    sent = bytes_sent(job["interface"])
    os.environ["GLOO_SOCKET_IFNAME"] = job["interface"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous.resolve()}",
        rank=cx.rank(),
        world_size=cx.size(),
    )
    torch.set_num_threads(recipe.threads or 1)
    keras.utils.set_random_seed(recipe.seed)
    model = recipe.build_model(run.objective)
    network = Network(model.input_shape[-1], model.output_shape[-1], **recipe.model.model_extra)
    load(network, model.get_weights())
    trained = parallel(network, job["contestant"])
    settings = recipe.optimizer
    optimizer = torch.optim.SGD(
        network.parameters(), 0.0, momentum=settings.momentum, nesterov=settings.nesterov
    )
    matrices = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    evaluation = Evaluation(run, False, start)
    for call in fit_calls(run.phases, Position(0)):
        evaluation.begin(model, call)
        steps = min(run.steps[call.phase] // parts, job["most_steps"] or sys.maxsize)
        evaluation.set_params({"steps": steps})
        batches, done = iter(run.batches(call)), 0
        for part in range(len(call.epochs) * parts):
            for _ in range(steps):
                epoch, step = divmod(done, run.steps[call.phase])
                rate = rate_at(run, call.phase, Position(call.epochs.start + epoch, step))
                pictures, targets = (torch.from_numpy(part.numpy()) for part in next(batches))
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    trained(pictures), targets, label_smoothing=recipe.task.label_smoothing
                ).backward()
                with torch.no_grad():
                    for parameter in matrices:
                        parameter.mul_(1 - rate * settings.weight_decay)
                optimizer.step()
                done += 1
                evaluation.on_train_batch_end(step)
            average(network)
            model.set_weights(weights_of(network))
            evaluation.on_epoch_end(part)
    dist.destroy_process_group()
    return outcome(run, job, model, evaluation, bytes_sent(job["interface"]) - sent)


def average(network: Network) -> None:
    """Average the moving averages of batch norms over the ranks, as AverageBatchNorm does."""
    for name, buffer in network.named_buffers():
        if not name.endswith("num_batches_tracked"):
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
