"""`ccjax serve --coordinator-address ...`: one model over the devices of several processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from ccjax.cli.options import StartupError, flag
from ccjax.cli.serving.messages import Display, naming, stages
from ccjax.cli.serving.options import AUTO, ServeOptions, engine_settings


def check_host_flags(args: ServeOptions) -> None:
    """Checks that the options fit together; raises StartupError."""
    number, process = args.num_processes, args.process_id
    if args.cluster is not None:
        for name in ("coordinator_address", "process_id"):
            if getattr(args, name) is not None:
                raise StartupError(f"{flag(ServeOptions, name)}: wanted none with --cluster ray, which finds hosts")
    elif args.coordinator_address in (None, AUTO):
        for name in ("num_processes", "process_id"):
            if getattr(args, name) is not None:
                raise StartupError(f"{flag(ServeOptions, name)}: wanted only with --coordinator-address HOST:PORT")
    elif number is None or process is None or not 0 <= process < number:
        raise StartupError(f"--process-id: wanted 0 to --num-processes - 1, got {process} of {number}")


def join_hosts(args: ServeOptions) -> bool:
    """Joins the group of processes, if the options ask for one; True if this process is a follower.

    Raises:
      StartupError: the others did not connect.
    """
    if args.coordinator_address is None:
        return False
    from ccjax.engine.hosts import group, join

    found = group()
    if found is None:
        where = None if args.coordinator_address == AUTO else args.coordinator_address
        try:
            found = join(where, args.num_processes, args.process_id)
        except (RuntimeError, ValueError, OSError) as error:
            raise StartupError(f"--coordinator-address: {str(error).splitlines()[0]}") from error
        if found.is_leader:  # calls waiting for the devices may never return
            found.when_lost(lambda reason: os._exit(1))
    return not found.is_leader


def run_follower(args: ServeOptions) -> int:
    """Follows process 0 until that ends; returns the exit code."""
    from ccjax.engine.hosts import LostHostError, follow
    from ccjax.server.loading import with_dtype

    display = Display(stages(), lambda *_: None, threading.Event())
    with naming(args, "--model"), contextlib.closing(display):
        settings = with_dtype(engine_settings(args))
        try:
            follow(args.model, progress=display, **settings)
        except LostHostError as error:
            print(f"ccjax serve: {error}", file=sys.stderr)
            return 1
    return 0
