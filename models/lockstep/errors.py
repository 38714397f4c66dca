"""What goes wrong between the processes of a group."""


class LostHostError(RuntimeError):
    """A process of the group has failed; the others can compute nothing without it."""
