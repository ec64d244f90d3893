"""Commands: ``demo``, ``explain`` and ``check``."""

from __future__ import annotations

import argparse
import runpy
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if it did what it says."""
    parser = argparse.ArgumentParser(prog="python -m dask_eindecomp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,explain}")
    commands.add_parser("demo", add_help=False, help="a sentence encoder with the hook off and on")
    explaining = commands.add_parser(
        "explain", help="print the plan of the Dask array a script leaves in a variable"
    )
    explaining.add_argument("script", help="Python file to run")
    explaining.add_argument("--variable", default="result", help="name of the array (default: result)")
    explaining.add_argument("--workers", type=int, help="plan for so many single-threaded workers")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        from dask_eindecomp import demo

        return demo.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _explain(options)


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


if __name__ == "__main__":
    sys.exit(main())
