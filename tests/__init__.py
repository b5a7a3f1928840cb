"""This package exists for one reason: pytest then puts the repository's root on the path. Without it pytest would put
this folder there, in which `sglang` would hide that SGLang is not installed."""
