"""How much may be reused for a request, and the report of what was."""

from __future__ import annotations

import functools

from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.planned_prefill import Prefilled
from ccjax.engine.report import build_report
from ccjax.policy.calibration import Calibration
from ccjax.policy.contract import ReuseContract, reuse_contract
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import get_strategy
from ccjax.types import ReuseMode, ReuseReport


class ReuseContracts:
    """The contracts of an engine's requests, and their reports.

    Attributes:
      settings: the planner's settings for requests without a target of their own.
      calibration: of the model; None if it has none.
    """

    def __init__(self, settings: PlannerSettings, calibration: Calibration | None, frame: PassageFrame) -> None:
        self.settings = settings
        self.calibration = calibration
        self._frame = frame
        contract = functools.partial(reuse_contract, settings=settings, calibration=calibration)
        self._contract = functools.lru_cache(maxsize=64)(contract)  # a calibration's bounds take long

    def contract(self, mode: ReuseMode, quality_target: float | None = None) -> ReuseContract:
        """The contract of a request (`ccjax.policy.contract`); `off` where the strategy reuses nothing."""
        return self._contract(mode if get_strategy(self.settings.strategy).needs else "off", quality_target)

    def report(self, prefilled: Prefilled, contract: ReuseContract, wanted: ReuseMode) -> ReuseReport:
        """Reports what a prefill reused; `wanted` is the mode that was requested."""
        return build_report(
            prefilled,
            mode=wanted,
            contract=contract,
            strategy="full" if contract.mode == "off" else self.settings.strategy,
            num_layers=self.settings.num_layers,
            framed=self._frame.variant_ids(prefilled.asked),
        )
