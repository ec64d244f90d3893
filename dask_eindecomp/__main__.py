"""Commands: ``demo``, ``explain`` and ``calibrate``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

CONNECT = 10.0
"""Seconds in which a scheduler must answer."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if it did what it says."""
    parser = argparse.ArgumentParser(prog="python -m dask_eindecomp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,explain,calibrate}")
    commands.add_parser("demo", add_help=False, help="a sentence encoder with the hook off and on")
    explaining = commands.add_parser(
        "explain", help="print the plan of the Dask array a script leaves in a variable"
    )
    explaining.add_argument("script", help="Python file to run")
    explaining.add_argument("--variable", default="result", help="name of the array (default: result)")
    explaining.add_argument("--workers", type=int, help="plan for so many single-threaded workers")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    calibrating = commands.add_parser("calibrate", help="measure a cluster and print its topology as JSON")
    calibrating.add_argument(
        "--scheduler", required=True, metavar="ADDRESS", help="such as tcp://127.0.0.1:8786"
    )
    calibrating.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there instead")
    calibrating.add_argument(
        "--repeats", type=int, default=3, help="how often everything is measured (default: 3)"
    )
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        from dask_eindecomp import demo

        return demo.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _calibrate(options) if options.command == "calibrate" else _explain(options)


def _explain(options: argparse.Namespace) -> int:
    from dask_eindecomp import Topology, explain

    names = runpy.run_path(options.script)
    if options.variable not in names:
        print(
            f"{options.script} has no variable {options.variable!r}; name one with --variable",
            file=sys.stderr,
        )
        return 2
    topology = None if options.workers is None else Topology(workers=options.workers)
    plan = explain(names[options.variable], topology=topology)
    print(plan.to_json() if options.json else plan)
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from distributed import Client

    from dask_eindecomp.calibration import calibration
    from dask_eindecomp.topology import TopologyError

    if options.out is not None and not options.out.parent.is_dir():
        print(f"cannot write {options.out}: there is no folder {options.out.parent}", file=sys.stderr)
        return 2
    try:
        client = Client(options.scheduler, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        print(f"no scheduler answers at {options.scheduler}: {error}", file=sys.stderr)
        return 2
    with client:
        try:
            measured = calibration(client, repeats=options.repeats)
        except TopologyError as error:
            print(error, file=sys.stderr)
            return 2
    text = measured.topology.to_json()
    if options.out is None:
        print(measured, file=sys.stderr)
        print(text)
    else:
        options.out.write_text(f"{text}\n")
        print(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
