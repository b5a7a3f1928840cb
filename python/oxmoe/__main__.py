"""`python -m oxmoe demo`, `explain`, `check`, `doctor` and `bench`."""

from __future__ import annotations

import importlib
import sys

import oxmoe
from oxmoe.tools.command import Parser, UsageError

# Command -> (its module, what it does).
COMMANDS = {
    "demo": ("oxmoe.tools.demo", "runs, checks and times one real MoE layer on this machine"),
    "explain": (
        "oxmoe.tools.explain",
        "prints the plan of a layer's call: launches, tiles, shared memory, workspace",
    ),
    "check": ("oxmoe.tools.check.command", "says whether SGLang with oxmoe serves a model, from its config.json"),
    "bench": ("oxmoe.tools.bench", "times MoE layers against the peers installed here"),
    "doctor": ("oxmoe.tools.doctor", "says what oxmoe finds on this machine and what is taken over in SGLang"),
}


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m oxmoe")
    parser.add_argument("--version", action="version", version=f"oxmoe {oxmoe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    # A command's module is loaded for its own arguments only: doctor must run even if bench's torch is missing.
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            importlib.import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except UsageError as error:
        commands.choices[args.command].error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
