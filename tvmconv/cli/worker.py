"""Lend a device of this host to searches on others.

Register a device of this host with a tracker of TVM's RPC (python -m tvm.exec.rpc_tracker), so that tvmconv tune
--device rpc:KEY on any host can measure on it. Ctrl-C ends the worker. TVM's RPC has no password: every program that
reaches the port can run code on this host.
"""

from __future__ import annotations

import argparse
import os

from tvmconv import devices
from tvmconv.cli.errors import INTERRUPTED_STATUS
from tvmconv.cli.options import add_device_option, add_option, add_tracker_option, parse_port, print_auto_device
from tvmconv.devices import rpc
from tvmconv.errors import DeviceError
from tvmconv.measure.rpc import serve_sessions
from tvmconv.tvm_import import import_tvm


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_tracker_option(parser)
    parser.add_argument("--key", metavar="K", required=True, help="Key that the device is registered under.")
    add_device_option(parser, "Device to lend: cuda:N, opencl:N or auto")
    add_option(parser, "--host", "HOST", "Address to listen on", default="127.0.0.1")
    add_option(parser, "--port", "PORT", "First port to try", type=parse_port, default=9091)


def run(args: argparse.Namespace) -> int:
    """Serve the device until the process is interrupted."""
    tracker = rpc.parse_tracker_address(args.tracker)
    device = devices.find_device(args.device)
    if isinstance(device, (devices.Arch, rpc.RPCDevice)):
        raise DeviceError(f"{device.text} is not a device of this host: expected cuda:N, opencl:N or auto")
    print_auto_device(args.device, device)

    def print_address(port: int) -> None:
        print(f"{device.text}, {device.name}: lent as rpc:{args.key} at {args.host}:{port}", flush=True)

    import_tvm()
    try:
        serve_sessions(device, args.key, tracker, args.host, args.port, print_address)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED_STATUS)  # TVM's listening thread would keep the process alive
