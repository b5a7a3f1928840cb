"""A package for one reason: pytest then puts the repository's root on the path, and not this folder, in which `sglang`
would hide that SGLang is not installed."""
