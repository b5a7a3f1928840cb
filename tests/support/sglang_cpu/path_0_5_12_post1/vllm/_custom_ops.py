from typing import Any


def rotary_embedding(*arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("vllm's rotary_embedding is not there on a CPU")
