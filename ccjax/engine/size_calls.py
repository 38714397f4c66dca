"""What an engine offers for the compilation of its steps."""

from __future__ import annotations

import contextlib

from ccjax.engine.cancellation import IsCancelled
from ccjax.engine.compiled_sizes import CompiledSizes
from ccjax.engine.loading import Progress
from ccjax.engine.warmup import BackgroundCompiler, StepCompiler


class SizeCalls:
    """The part of `Engine` for sizes that steps are compiled for."""

    _compiled: CompiledSizes
    _steps: StepCompiler
    _compiler: BackgroundCompiler

    def _exclusive(self, *, wait: bool = True) -> contextlib.AbstractContextManager[bool]:
        raise NotImplementedError

    def warmup(self, progress: Progress | None = None, *, only_first: bool = False) -> None:
        """Compiles the steps for all sizes up to `max_model_len`, so that no request pays for it.

        Args:
          only_first: compile a few sizes that all others fit into, to which requests are padded until `compile_one` has
            compiled theirs. A model over several devices compiles all nevertheless: it cannot beside requests.
        """
        with self._exclusive():
            is_all = not only_first or not self._steps.is_apart
            self._steps.warm_up(self._steps.all() if is_all else self._steps.first(), progress)
            if not is_all:
                self._compiled.substitute(self._steps.all())

    def compile_one(self, *, is_cancelled: IsCancelled | None = None) -> bool:
        """Uses idle time: compiles one size that `warmup` left out, those first that requests were padded for. Requests
        go on meanwhile.

        Args:
          is_cancelled: asked often; once it returns True the call ends, while what it has begun goes on.

        Returns:
          Whether there was one, so that there may be another.

        Raises:
          RuntimeError: there is one, and the engine is closed.
        """
        return self._compiler.compile_next(is_cancelled)

    @property
    def num_sizes_left(self) -> int:
        """Sizes that `compile_one` still has to compile."""
        return self._compiled.num_left
