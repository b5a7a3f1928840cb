"""Which of all experts a rank of another project's call holds, as arguments of `moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypedDict

    from torch import Tensor

    class Ranks(TypedDict, total=False):
        """Options of `moe` that say which of all experts are held here."""

        ep_size: int
        ep_rank: int


def check_part(num_experts: int, local_expert_offset: int, num_local_experts: int, name: str) -> None:
    """Raises ValueError if these are no experts of num_experts. name: what the caller calls num_local_experts."""
    sizes = {"num_experts": num_experts, "local_expert_offset": local_expert_offset, name: num_local_experts}
    for argument, size in sizes.items():
        if not -(2**31) <= int(size) < 2**31:
            raise ValueError(f"{argument}: expected a number of experts, got {size}")
    num_experts, local_expert_offset, num_local_experts = (int(size) for size in sizes.values())
    if num_local_experts < 1 or not 0 <= local_expert_offset <= num_experts - num_local_experts:
        raise ValueError(
            f"local_expert_offset: experts {local_expert_offset} to {local_expert_offset + num_local_experts} "
            f"({name} {num_local_experts}) are not among num_experts {num_experts}"
        )


def by_rank(
    topk_ids: Tensor, num_experts: int, local_expert_offset: int, num_local_experts: int
) -> tuple[Tensor, Ranks]:
    """Returns ids and options of `moe` for a rank that holds num_local_experts from local_expert_offset on. Where ranks
    are no equal parts of the experts, the ids are made local ones, in a few operations of torch."""
    num_experts, offset, local = int(num_experts), int(local_expert_offset), int(num_local_experts)
    if offset % local == 0:
        return topk_ids, {"ep_size": max(offset // local + 1, -(-num_experts // local)), "ep_rank": offset // local}
    import torch

    held = (topk_ids >= offset) & (topk_ids < offset + local)
    # A number that is no expert at all stays as it is, so that `moe` refuses it.
    others = topk_ids.masked_fill((topk_ids >= 0) & (topk_ids < num_experts), -1)
    return torch.where(held, topk_ids - offset, others), {}
