"""Documents as units of the cache: which chunks are of which document; warm, pin, invalidate and erase them."""
