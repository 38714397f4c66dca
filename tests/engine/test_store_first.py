"""A store that cannot be used is reported before anything is loaded."""

from __future__ import annotations

import pytest

from ccjax.engine import Engine
from ccjax.store.errors import StoreUnavailableError


@pytest.mark.parametrize("url", ["kv", "ftp://host/kv", "file://host/kv"])
def test_a_wrong_url_is_reported_before_the_weights_are_loaded(url):
    stages = []
    with pytest.raises(ValueError, match="^store: wanted"):
        Engine.from_pretrained("demo", store=url, progress=lambda *stage: stages.append(stage))
    assert not stages


def test_an_unusable_directory_is_reported_before_the_weights_are_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    stages = []
    for read_only in (False, True):
        with pytest.raises(StoreUnavailableError, match=f"^store: .*{tmp_path}/file/kv"):
            Engine.from_pretrained(
                "demo",
                store=f"file://{tmp_path}/file/kv",
                read_only=read_only,
                progress=lambda *stage: stages.append(stage),
            )
    assert not stages
