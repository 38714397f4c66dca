"""One program on the devices of several hosts: a leader distributes each operation, and followers repeat it.

JAX requires every process of a mesh to launch the same computations in the same order. Only the leader has requests, a
store and a policy, so it records each device operation when it launches it (`leader`) and sends it to the others
(`wire`), which run it on their own part of the same arrays (`follower`). All operations on the mesh go through `steps`:
jitted steps, `put`, `zeros`, `fetch`. In a single process these are plain JAX.

The hosts of a group trust each other, as JAX's collectives do.
"""

from ccjax.models.lockstep.errors import LostHostError
from ccjax.models.lockstep.group import Group, group, join
from ccjax.models.lockstep.steps import Step, fetch, put, step, zeros

__all__ = ["Group", "LostHostError", "Step", "fetch", "group", "join", "put", "step", "zeros"]
