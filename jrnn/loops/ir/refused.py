"""The exception of what cannot run a loop."""


class Refused(Exception):
    """Raised with the reason by a strategy or a kernel that cannot run a loop."""
