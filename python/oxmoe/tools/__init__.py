"""The commands of `python -m oxmoe`: a module for each, and what they share."""
