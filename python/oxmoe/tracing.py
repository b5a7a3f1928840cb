"""Says whether torch traces: then calls must go through operators, which torch can see."""

from __future__ import annotations

from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None

if HAS_TORCH:
    import torch

    def tracing() -> bool:
        """Returns True under torch.compile, export, make_fx, FakeTensorMode and any other dispatch mode."""
        return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0

else:

    def tracing() -> bool:
        """Returns False: without torch nothing traces."""
        return False
