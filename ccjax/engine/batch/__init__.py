"""Runs many requests at once over one page pool, in the order that `ccjax.policy.scheduling` decides."""
