"""One program on the devices of several hosts: a leader distributes each operation, and followers run the same.

JAX requires every process of a mesh to launch the same computations in the same order. Only the leader has requests, a
store and a policy to decide by, so it records each device operation as it launches it (`leader`) and sends it to the
others (`wire`), which carry it out on their own part of the same arrays (`follower`). Everything that touches the mesh
goes through `steps`: jitted steps, `put`, `zeros`, `fetch`. In a single process these are plain JAX.

Hosts of a group trust each other, as their collectives do.
"""

from ccjax.models.lockstep.errors import LostHostError
from ccjax.models.lockstep.group import Group, group, join
from ccjax.models.lockstep.steps import Step, fetch, put, step, zeros

__all__ = ["Group", "LostHostError", "Step", "fetch", "group", "join", "put", "step", "zeros"]
