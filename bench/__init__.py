"""Shoal side by side with what a person would otherwise use: the same work, in turn, in the same processes."""
