"""Training by several processes with `DistributedDataParallel` or FSDP, by NCCL if each has a GPU, else gloo."""

import contextlib
import datetime
import time
from unittest import mock

import torch
from torch import distributed, nn

import tvmconv.torch
from tvmconv.errors import Error

NUM_STEPS, NUM_BATCHES, BATCH = 50, 10, 32
WRAPPERS = DDP, FSDP = "ddp", "fsdp"


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


def train_in_a_process(rank, num_processes, folder, device_type, dtype, wrapper):
    """Train in one of the processes; the first one writes the mean losses of all, and its number of kernels."""
    has_own_gpu = device_type == "cuda" and torch.cuda.device_count() >= num_processes
    device = torch.device(device_type, rank if has_own_gpu else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    distributed.init_process_group(
        "nccl" if has_own_gpu else "gloo",  # NCCL refuses a second process on one GPU
        store=distributed.FileStore(f"{folder}/store-{wrapper}-{dtype}-{num_processes}", num_processes),
        rank=rank,
        world_size=num_processes,
        timeout=datetime.timedelta(seconds=60),
        device_id=device if has_own_gpu else None,
    )
    batches, network = make_batches(rank, num_processes, device), make_network(wrapper).to(device)
    autocast = torch.autocast(device_type, dtype) if dtype is not torch.float32 else contextlib.nullcontext()
    with autocast, mock.patch("tvmconv.torch.kernels.MAX_CANDIDATES", 1):
        ours = tvmconv.torch.optimize(network, batches[0][0], train=True, choose="tuned")
    report = tvmconv.torch.get_training_report(ours)
    model = wrap_model(ours, wrapper) if num_processes > 1 else ours
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
    mean_losses = torch.stack(losses)
    distributed.all_reduce(mean_losses)
    if rank == 0:
        num_kernels = sum(line.implementation != "PyTorch" for line in report.lines)
        file = f"{folder}/losses-{wrapper}-{dtype}-{num_processes}.pt"
        torch.save((mean_losses.cpu() / num_processes, num_kernels), file)
    distributed.destroy_process_group()


def train(num_processes, folder, device_type, dtype, seconds, wrapper=DDP):
    """The losses of each step and the number of products by kernels; an Error if the processes take too long."""
    deadline = time.monotonic() + seconds
    arguments = num_processes, str(folder), device_type, dtype, wrapper
    context = torch.multiprocessing.spawn(train_in_a_process, arguments, nprocs=num_processes, join=False)
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise Error(f"{num_processes} processes have not trained within {seconds} s")
    finally:
        for process in context.processes:
            process.kill()
    return torch.load(f"{folder}/losses-{wrapper}-{dtype}-{num_processes}.pt")
