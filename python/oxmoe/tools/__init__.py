"""The commands of `python -m oxmoe`: a module for each command, and the code that they share."""
