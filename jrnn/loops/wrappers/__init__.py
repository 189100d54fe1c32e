"""Wrappers of the step: masks, loops that stop early, and what a reverse pass computes again."""
