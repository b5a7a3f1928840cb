"""`python -m oxmoe explain` prints the plan of a layer's call for any GPU, without a GPU.

The shape is that of a model's layer (--layer), or is given number by number.
"""

from __future__ import annotations

import argparse

import oxmoe
from oxmoe.tools.command import MOST_TOKENS, Listed, UsageError, architecture, known, listed, whole
from oxmoe.tools.shapes import SHAPES

SIZES = ("experts", "top_k", "hidden", "intermediate")
PLAIN = ("bf16", "f16", "f32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    formats = ", ".join(oxmoe.device_info()["formats"])
    parser.add_argument("--layer", help=f"in place of the four numbers below, one of: {', '.join(SHAPES)}")
    parser.add_argument("--experts", type=whole(1, 4096), help="experts that are held")
    parser.add_argument("--top-k", type=whole(1, 32), help="experts of a token")
    parser.add_argument("--hidden", type=whole(1, 1 << 24), help="columns of x and of the output")
    parser.add_argument("--intermediate", type=whole(1, 1 << 24), help="columns between the two products")
    parser.add_argument(
        "--tokens",
        type=listed(whole(0, MOST_TOKENS)),
        nargs="+",
        action=Listed,
        default=[1],
        help="of a call (default: 1)",
    )
    parser.add_argument("--format", help=f"of the weights (default: bf16), one of: {formats}")
    parser.add_argument(
        "--dtype", choices=PLAIN, help="of activations; weights that are not quantised are of the same (default: bf16)"
    )
    parser.add_argument(
        "--arch",
        type=architecture,
        help="a card or an architecture, as B200 or sm_100, or cpu (default: this machine's first GPU, else its CPU)",
    )
    parser.add_argument(
        "--routing",
        choices=("logits", "ids"),
        help="from router logits, or with given ids (default: from logits, and what is different with ids)",
    )
    parser.add_argument(
        "--groups",
        type=whole(1, 32),
        default=0,
        help="groups of experts of the router, as DeepSeek-V3's 8 (default: none)",
    )
    parser.add_argument("--bias", action="store_true", help="the router has a correction bias")
    parser.add_argument("--plain", action="store_true", help="without a gate: w13 has the up rows alone")


def run(args: argparse.Namespace) -> int:
    experts, top_k, hidden, intermediate = shape(args)
    options = {"format": weights(args), "gated": not args.plain, "arch": args.arch, "routing": args.routing}
    options |= {"num_expert_group": args.groups, "correction_bias": args.bias}
    try:
        plans = [oxmoe.explain(experts, top_k, hidden, intermediate, count, **options) for count in args.tokens]
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
    print("\n".join(plans), end="")
    return 0


def shape(args: argparse.Namespace) -> tuple[int, ...]:
    given = [size for size in SIZES if getattr(args, size) is not None]
    if args.layer is not None:
        if given:
            raise UsageError(f"--layer brings --{given[0].replace('_', '-')}: give one or the other")
        (name,) = known("layer", [args.layer], SHAPES)
        return tuple(getattr(SHAPES[name], size) for size in SIZES)
    missing = [f"--{size.replace('_', '-')}" for size in SIZES if size not in given]
    if missing:
        raise UsageError(f"needed: --layer, or {', '.join(missing)}")
    return tuple(getattr(args, size) for size in SIZES)


def weights(args: argparse.Namespace) -> str:
    """Returns the format by its own name."""
    (name,) = known("format", [args.format or args.dtype or "bf16"], oxmoe.device_info()["formats"])
    own = name if name in PLAIN else "bf16"
    if args.dtype not in (None, own):
        raise UsageError(f"--dtype: {name} weights are planned for {own} activations, got {args.dtype}")
    return name
