"""Training by several processes with `DistributedDataParallel` or FSDP, by NCCL if each has a GPU, else by gloo.

    python tests/helpers/distributed_training.py 2 losses.json  # on two GPUs; on one GPU without FSDP

Both processes take all cases one after another, because to start them takes longer than to train.
"""

import contextlib
import datetime
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from unittest import mock

import torch
from torch import distributed, nn

import tvmconv.torch
from tvmconv.errors import Error
from tvmconv.measure.workers.pool import keep_workers_alive

NUM_STEPS, NUM_BATCHES, BATCH = 50, 10, 32
DDP, FSDP = "ddp", "fsdp"
CASES = [(DDP, "float32"), (DDP, "bfloat16"), (FSDP, "float32")]
TOLERANCES = {"float32": 2e-3, "bfloat16": 5e-2}  # of losses, relative and absolute


@dataclass
class Comparison:
    """The losses of one process, and those of several; and the products that kernels compute in each process."""

    wrapper: str
    dtype: str
    num_processes: int
    one: list[float]
    several: list[float]
    num_kernels: int
    num_kernels_of_several: int

    @property
    def largest_difference(self):
        return max(abs(one - other) for one, other in zip(self.one, self.several, strict=True))

    @property
    def is_equal(self):
        tolerance = TOLERANCES[self.dtype]
        pairs = zip(self.one, self.several, strict=True)
        return all(abs(one - other) <= tolerance * (1 + abs(one)) for one, other in pairs)

    @property
    def learns(self):
        return sum(self.one[-10:]) / 10 < self.one[0] / 2


def make_network(wrapper):
    """A network that is the same in each process; its normalizations do not depend on other images of a batch.

    FSDP takes contiguous parameters alone.
    """
    torch.manual_seed(0)
    layers, channels = [], 3
    for filters, stride in ((16, 2), (32, 1), (32, 2)):
        layers += [nn.Conv2d(channels, filters, 3, stride, 1), nn.GroupNorm(4, filters), nn.ReLU(inplace=True)]
        channels = filters
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))
    return network.to(memory_format=torch.channels_last) if wrapper == DDP else network


def make_batches(rank, num_processes, device):
    """The part of each batch that a process trains on. An image's class is that of a fixed pattern in it."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (NUM_BATCHES, BATCH), generator=generator)
    images = patterns[labels] + torch.randn(NUM_BATCHES, BATCH, 3, 32, 32, generator=generator)
    part = slice(rank, None, num_processes)
    return [
        (x[part].to(device).contiguous(memory_format=torch.channels_last), y[part].to(device))
        for x, y in zip(images, labels, strict=True)
    ]


def wrap_model(model, wrapper):
    if wrapper == DDP:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def train(wrapper, dtype, batches, device, wrap):
    """The losses of the steps, and the number of products that kernels compute."""
    network = make_network(wrapper).to(device)
    is_float32 = dtype == "float32"
    autocast = contextlib.nullcontext() if is_float32 else torch.autocast(device.type, getattr(torch, dtype))
    with autocast, mock.patch("tvmconv.torch.kernels.MAX_CANDIDATES", 1):
        ours = tvmconv.torch.optimize(network, batches[0][0], train=True, choose="tuned")
    report = tvmconv.torch.get_training_report(ours)
    model = wrap(ours)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for number in range(NUM_STEPS):
        x, y = batches[number % NUM_BATCHES]
        optimizer.zero_grad()
        with autocast:
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), sum(line.implementation != "PyTorch" for line in report.lines)


def compare_in_a_process(rank, num_processes, folder, device_type, cases, path):
    """Train in one of the processes; the first one also trains alone, and writes the comparisons to a file."""
    has_own_gpu = device_type == "cuda" and torch.cuda.device_count() >= num_processes
    device = torch.device(device_type, rank if has_own_gpu else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    distributed.init_process_group(
        "nccl" if has_own_gpu else "gloo",  # NCCL refuses a second process on one GPU
        store=distributed.FileStore(f"{folder}/store", num_processes),
        rank=rank,
        world_size=num_processes,
        timeout=datetime.timedelta(seconds=60),
        device_id=device if has_own_gpu else None,
    )
    comparisons = []
    with keep_workers_alive():
        for wrapper, dtype in cases:
            batches = make_batches(rank, num_processes, device)
            losses, count = train(wrapper, dtype, batches, device, lambda model, name=wrapper: wrap_model(model, name))
            distributed.all_reduce(losses)
            if rank:
                continue
            alone, count_alone = train(wrapper, dtype, make_batches(0, 1, device), device, lambda model: model)
            pair = [alone.tolist(), (losses / num_processes).tolist()]
            comparisons.append(Comparison(wrapper, dtype, num_processes, *pair, count_alone, count))
            with open(path, "w") as file:
                json.dump([asdict(each) for each in comparisons], file)
    distributed.destroy_process_group()


def compare(num_processes, folder, device_type, cases=CASES, seconds=60, path=None):
    """The comparisons of all cases; an Error if the processes take too long."""
    deadline = time.monotonic() + seconds
    path = path or f"{folder}/losses.json"
    arguments = num_processes, str(folder), device_type, cases, str(path)
    context = torch.multiprocessing.spawn(compare_in_a_process, arguments, nprocs=num_processes, join=False)
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise Error(f"{num_processes} processes have not trained within {seconds} s")
    finally:
        for process in context.processes:
            process.kill()
    with open(path) as file:
        return [Comparison(**each) for each in json.load(file)]


if __name__ == "__main__":
    count = int(sys.argv[1])
    chosen_cases = CASES if torch.cuda.device_count() >= count else CASES[:2]
    with tempfile.TemporaryDirectory() as temporary:
        for each in compare(count, temporary, "cuda", chosen_cases, path=sys.argv[2]):
            kernels = f"kernels compute {each.num_kernels_of_several} products"
            losses = f"loss {each.one[0]:.3f} to {each.one[-1]:.3f}, difference up to {each.largest_difference:.1e}"
            print(each.wrapper, each.dtype, f"{each.num_processes} processes", kernels, losses, sep="; ")
            assert each.is_equal
            assert each.learns
