"""`python -m oxmoe bench` and `python -m oxmoe doctor`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "bench": "times MoE layers against the peers installed here",
    "doctor": "says what oxmoe finds on this machine and what is taken over in SGLang",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m oxmoe")
    commands = parser.add_subparsers(dest="command", required=True)
    # A command's module is loaded for its own arguments only: doctor must run where bench's torch is missing.
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            importlib.import_module(f"oxmoe.{name}").add_arguments(command)
    args = parser.parse_args(argv)
    return importlib.import_module(f"oxmoe.{args.command}").run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
