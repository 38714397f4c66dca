"""The parts of `ccjax serve`: options, messages, and running a cluster."""
