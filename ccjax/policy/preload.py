"""Number of layers to load before the one that runs (CacheCraft eq. 16)."""

from __future__ import annotations

import math

from ccjax.policy._checks import check_count, check_mass

# A number of hidden layers this close (relatively) below an integer counts as it: 4 * (0.3 / 0.4) is below 3 in binary.
_WHOLE_REL_TOL = 1e-9


def preload_depth(num_layers: int, prefill_s: float, load_s: float) -> int:
    """Number of layers to load first, in [1, num_layers], so that no later layer waits for its KV.

    CacheCraft eq. 16: `Lp = (L-1) (1 - Tprefill/Tload) + 1`, rounded up; 1 if loading takes no longer than computing
    (alg. 2 l. 1). While L-1 layers run, `(L-1) Tprefill/Tload` layers load in the background; the others must be loaded
    before. Assumes equal times for all layers. The paper's example: L = 5 and 1:2 give 3.

    Args:
      num_layers: L.
      prefill_s: Tprefill, computing all layers, in seconds.
      load_s: Tload, loading the KV of all layers, in seconds.

    Raises:
      ValueError: no layers, or a time that is negative or not finite.
    """
    check_count("num_layers", num_layers)
    check_mass("prefill_s", prefill_s)
    check_mass("load_s", load_s)
    if prefill_s >= load_s:
        return 1
    num_hidden = (num_layers - 1) * (prefill_s / load_s)
    return num_layers - math.floor(num_hidden * (1.0 + _WHOLE_REL_TOL))
