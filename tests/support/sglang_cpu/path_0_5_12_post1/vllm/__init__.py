"""Stands for vLLM, from which SGLang 0.5.12.post1 imports one name if it finds no kernels of its own."""
