"""`python -m oxmoe check`: whether SGLang with oxmoe serves a model, from its config.json and no weights.

`checkpoint` reads files, `families` knows the models' fields, `layers` judges by the rules of `oxmoe.sglang`, `command`
prints. Nothing here imports torch or SGLang.
"""
