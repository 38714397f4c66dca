"""One module per benchmark of `scripts/bench.py`: each has `add_arguments(parser)` and `run(arguments) -> dict`,
most have `QUICK`, other defaults of these arguments with --quick."""
