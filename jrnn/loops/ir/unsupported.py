"""The exception of what cannot be done with a loop."""


class Unsupported(Exception):
    """Raised with the reason by a strategy or a kernel that cannot run a loop."""
