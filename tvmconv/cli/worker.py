"""`tvmconv worker`: lend a device of this host to searches on others, through TVM's RPC."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import INTERRUPTED
from tvmconv.cli.options import add_tracker, port_number, tell_choice
from tvmconv.devices import rpc
from tvmconv.errors import DeviceError
from tvmconv.without_torch import import_tvm


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "worker",
        help="lend a device of this host to searches on others",
        description="Register a device of this host with a tracker of TVM's RPC (python -m tvm.exec.rpc_tracker), for "
        "tvmconv tune --device rpc:KEY on any host to measure on. Ends with Ctrl-C. TVM's RPC asks for no password: "
        "whoever reaches the port can run code here.",
    )
    add_tracker(parser)
    parser.add_argument("--key", metavar="K", required=True, help="the name to register under")
    parser.add_argument("--device", metavar="D", default="auto", help="cuda:N, opencl:N or auto (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=9091, help="the first port to try (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from tvmconv.measuring.worker import serve

    tracker = rpc.tracker_address(args.tracker)
    device = devices.find(args.device)
    if isinstance(device, (devices.Arch, rpc.Remote)):
        raise DeviceError(f"{device.text} is no device of this host: lend cuda:N, opencl:N or auto")
    tell_choice(args.device, device)

    def tell(port: int) -> None:
        print(f"{device.text}, {device.name}: lent as rpc:{args.key} at {args.host}:{port}", flush=True)

    import_tvm()
    try:
        serve(device, args.key, tracker, args.host, args.port, tell)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # TVM's listening thread would keep the process alive
