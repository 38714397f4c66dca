"""Failures between the processes of a group."""


class LostHostError(RuntimeError):
    """A process of the group has failed; the others cannot continue without it."""
