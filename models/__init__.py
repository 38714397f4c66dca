"""Model definitions as pure functions over parameter trees. They know nothing of chunks, stores or servers."""
