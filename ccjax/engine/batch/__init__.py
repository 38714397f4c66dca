"""Many requests at once over one pool of pages. Who runs when is the business of `ccjax.policy.scheduling`."""
