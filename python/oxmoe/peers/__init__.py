"""Other projects' calls on oxmoe's kernels. Each call has a file, which is named after the project.

A call makes `ExpertWeights` from the project's tensors, and `kept` finds them again at the next call. `topk_forms`
and `packed_topk` read the forms of a top-k result. `oxmoe.sglang` is the plugin for SGLang itself.
"""
