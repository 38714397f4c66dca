"""Command-line programs. They read arguments and environment; the packages below never do."""
