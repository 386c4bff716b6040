"""Build random candidates of MetaSchedule for the tasks of networks, on a machine that needs no GPU.

    tvmconv bench metaschedule-candidates mobilenet_v2 --dtype f16 --arch sm_90 --rounds 4 -o candidates
    tvmconv bench relax-models mobilenet_v2 --dtype f16 --method metaschedule --metaschedule-folder candidates

The second command times the candidates on a GPU of the architecture, and compiles and times the network. Each round has
two candidates of each task.
"""

from __future__ import annotations

import argparse
import itertools

from tvmconv.baselines import metaschedule_model
from tvmconv.baselines.metaschedule_sampling import read_candidates
from tvmconv.benchmarks.common import add_output
from tvmconv.benchmarks.relax_methods import DTYPES, NetworkCase, Worker, get_metaschedule_module
from tvmconv.cli import options

MAX_SECONDS = 3600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("networks", nargs="+", metavar="NAME", help="Networks of torchvision.")
    options.add_option(parser, "--dtype", None, "Dtype", choices=DTYPES, repeat=True)
    options.add_option(parser, "--batch", "N", "Batch size", type=options.parse_count, repeat=True)
    options.add_option(parser, "--arch", "ARCH", "Architecture or device to build for", default="sm_90")
    options.add_option(parser, "--rounds", "N", "Number of rounds", type=options.parse_count, default=2)
    text = "Time limit of each network in seconds"
    options.add_option(parser, "--limit", "S", text, type=options.parse_positive, default=MAX_SECONDS)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Build the candidates of each case in a folder of its own, and print how many there are."""
    for dtype, network, batch in itertools.product(args.dtype or ["f16"], args.networks, args.batch or [1]):
        case = NetworkCase(network, dtype, batch, (), None, args.limit, log="", lock="", device=args.arch)
        worker = Worker(case, lambda event: None)
        folder = args.out / case.name
        folder.mkdir(parents=True)
        log = args.out / f"{case.name}-build.log"
        num_tasks = metaschedule_model.build_candidates(
            get_metaschedule_module(worker),
            worker.device,
            folder,
            log=log,
            seconds=args.limit,
            num_rounds=args.rounds,
        )
        _, candidates = read_candidates(folder)
        num_built = sum(each["file"] is not None for each in candidates)
        print(f"{case.name}: {num_built} of {len(candidates)} candidates of {num_tasks} tasks were built", flush=True)
    return 0
