"""Several server instances behind one address, on Ray: replicas, cache-aware routing, and the front for clients. Needs
the extra `cluster`; nothing else does.

Ray places, monitors and restarts the replicas. `ccjax.policy.routing` chooses the replica of a request, and
`ccjax.server` answers it.
"""
