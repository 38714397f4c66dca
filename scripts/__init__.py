"""Command-line programs. They read arguments and environment, which other packages never do."""
