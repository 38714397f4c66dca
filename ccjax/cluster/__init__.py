"""Several instances of the server behind one address, on Ray: replicas, cache-aware routing, and the front that clients
talk to. Needs the extra `cluster`; nothing else does.

Ray places, watches and restarts the replicas. Which one a request goes to is `ccjax.policy.routing`'s, what a replica
answers `ccjax.server`'s.
"""
