"""replay_layers.py SEED SECONDS: replays graphs of layers of few tokens, and prints for each format how many rows were
wrong.

Several such processes on one GPU interrupt each other's launches, so CTAs of a launch begin at very different times.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import torch
from torch import Tensor

import oxmoe
from cases import Shape, apart, make_workspace, make_x, tie_free_logits
from format_cases import EXPERTS, IN_ONE_LAUNCH, dtype_of

SHAPE = Shape("replays", 16, 4, 256, 256)
TOKENS, LAYERS, INPUTS = 2, 3, 20


class Replays:
    """Layers that follow each other on one workspace, captured as a graph, and the results of separate launches."""

    def __init__(self, kind: str, rng: torch.Generator) -> None:
        self.layers = [EXPERTS[kind](SHAPE, "cuda", rng) for _ in range(LAYERS)]
        self.xs = [make_x(TOKENS, SHAPE, dtype_of(kind), "cuda", rng) for _ in range(INPUTS)]
        self.logits = [tie_free_logits(TOKENS, SHAPE.experts, rng).cuda() for _ in range(INPUTS)]
        self.x, self.routing = self.xs[0].clone(), self.logits[0].clone()
        self.outs = [torch.empty_like(self.x) for _ in range(LAYERS)]
        size = oxmoe.workspace_bytes(self.layers[0], TOKENS, SHAPE.top_k)
        self.workspace = make_workspace(size, "cuda")
        self.expected = [self.separate(i) for i in range(INPUTS)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.together()
        self.wrong, self.count = torch.zeros((), dtype=torch.int64, device="cuda"), 0

    def separate(self, i: int) -> Tensor:
        row = self.xs[i]
        for weights in self.layers:
            row = apart(row, weights, *oxmoe.topk(self.logits[i], SHAPE.top_k)).contiguous()
        return row

    def together(self) -> None:
        for weights, x, out in zip(self.layers, [self.x, *self.outs[:-1]], self.outs, strict=True):
            routing = {"router_logits": self.routing, "top_k": SHAPE.top_k}
            oxmoe.moe(x, weights, **routing, out=out, workspace=self.workspace)

    def replay(self) -> None:
        i = self.count % INPUTS
        self.x.copy_(self.xs[i])
        self.routing.copy_(self.logits[i])
        for out in self.outs:
            out.fill_(torch.nan)
        self.graph.replay()
        self.wrong += (self.outs[-1].view(torch.int16) != self.expected[i].view(torch.int16)).any(1).sum()
        self.count += 1


def main(seed: int, seconds: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    every = {kind: Replays(kind, rng) for kind in IN_ONE_LAUNCH}
    end, replays = time.monotonic() + seconds, Counter[str]()
    while time.monotonic() < end:
        for replayed in every.values():
            for _ in range(100):
                replayed.replay()
        torch.cuda.synchronize()
    for kind, replayed in every.items():
        replays[kind] = replayed.count
    print(json.dumps({"replays": replays, "wrong": {kind: int(of.wrong) for kind, of in every.items()}}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
