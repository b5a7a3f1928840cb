"""Other projects' calls, served by oxmoe: a file for each call, which is named after the project.

What a call makes of the project's tensors is `ExpertWeights`; `kept` finds it again at the next call. `topk_forms` and
`packed_topk` read the forms of a top-k result. SGLang itself is `oxmoe.sglang`.
"""
