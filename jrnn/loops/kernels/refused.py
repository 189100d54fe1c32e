"""The error of every kernel."""


class Refused(Exception):
    """Raised with the reason if a kernel cannot run a loop."""
