"""Model definitions as pure functions over parameter trees, independent of chunks, stores and servers."""
