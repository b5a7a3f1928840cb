"""`python -m oxmoe check` says whether SGLang with oxmoe serves a model. It reads the model's config.json and no
weights.

`checkpoint` reads files. `families` knows the models' fields. `layers` judges by the rules of `oxmoe.sglang`.
`command` prints. Nothing here imports torch or SGLang.
"""
