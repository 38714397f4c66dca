"""The garbage collector is paused inside, and restored afterwards."""

import gc

import pytest

from ccjax.store.bulk import uncollected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collector_state_is_restored(is_enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
