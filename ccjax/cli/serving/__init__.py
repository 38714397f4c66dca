"""What `ccjax serve` is made of: its options, what it says, and how it runs a cluster."""
