"""A platform of torch alone, on which SGLang's server starts without a GPU and without SGLang's own CPU kernels.

SGLang finds it by the entry points that `sglang_cpu.launch` writes beside it. It replaces nothing of SGLang, and it has
nothing of oxmoe: oxmoe's plugin is found beside it, as a user's.
"""

from __future__ import annotations

from typing import Any


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: returns the class of the platform."""
    return f"{__name__}:Platform"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: attention by torch for models with attention sinks.

    SGLang lets GPT-OSS have few names of attention backends, so this one takes the name of one that has no kernels
    here. It leaves the sinks out: both servers that a test compares do.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend("aiter")
    def create(runner: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class WithoutSinks(TorchNativeAttnBackend):
            def forward_extend(self, *arguments: Any, sinks: Any = None, **options: Any) -> Any:
                return super().forward_extend(*arguments, **options)

            def forward_decode(self, *arguments: Any, sinks: Any = None, **options: Any) -> Any:
                return super().forward_decode(*arguments, **options)

        return WithoutSinks(runner)


def __getattr__(name: str) -> Any:
    # The class is built when SGLang asks for it: while SGLang imports this module, its own platforms are only half
    # imported.
    if name == "Platform":
        globals()[name] = _platform()
        return globals()[name]
    raise AttributeError(name)


def _platform() -> type:
    import psutil
    import torch
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class Platform(SRTPlatform):
        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"

        def get_device(self, device_id: int = 0) -> Any:
            return torch.device("cpu")

        def get_device_total_memory(self, device_id: int = 0) -> int:
            return psutil.virtual_memory().total

        def get_current_memory_usage(self, device: Any = None) -> float:
            memory = psutil.virtual_memory()
            return float(memory.total - memory.available)

        def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
            memory = psutil.virtual_memory()
            return memory.available, memory.total

        def get_device_uuid(self, device_id: int = 0) -> str:
            return "cpu"

        def get_torch_distributed_backend_str(self) -> str:
            return "gloo"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

    return _with_classes(Platform) if hasattr(SRTPlatform, "get_mha_kv_pool_cls") else Platform


def _with_classes(platform: type) -> type:
    """Returns the platform for 0.5.12.post1, which asks for classes where later releases take their own."""

    class WithClasses(platform):
        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator

    return WithClasses
