"""Documents as units of the cache: which chunks belong to a document; warming, pinning, invalidation and erasure."""
