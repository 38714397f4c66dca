"""Documents as units of the cache: pinning, invalidation, erasure, and preparation behind the frame."""
