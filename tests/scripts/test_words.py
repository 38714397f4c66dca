"""scripts/words.py: retired words are found in names and prose, and nowhere in the product."""

from __future__ import annotations

import pytest

from scripts import words

BROKEN = '''
"""Who comes to this server is welcome."""

class FrontDoor:
    """A seat for each request."""

    def take_in(self, news):
        # nobody waits in line
        self.siblings = news
        raise ValueError(f"wanted a seat, got none in line {len(news)}")
'''


def test_each_retired_word_is_reported_with_its_line():
    found = [line.split(": say ")[0] for line in words.check(BROKEN, "broken.py")]
    assert found == [
        "broken.py:2: 'welcome'",
        "broken.py:4: 'FrontDoor'",
        "broken.py:5: 'seat'",
        "broken.py:7: 'news'",
        "broken.py:7: 'take_in'",
        "broken.py:8: 'in line'",
        "broken.py:8: 'nobody'",
        "broken.py:9: 'siblings'",
        "broken.py:10: 'seat'",
    ]


@pytest.mark.parametrize(
    "fine",
    [
        "welcomed = outdoors = 1",  # other words
        "store.news.take_in()",  # names from elsewhere
        '"""The error is in line 3, behind `news`."""',
        'option = "seats"',  # a key, not a message
    ],
)
def test_allowed_words_and_code_pass(fine):
    assert not words.check(fine, "fine.py")


def test_pages_are_checked_outside_code():
    page = "A `seat` and\n```\na seat\n```\na seat."
    assert words.check_page(page, "page.md") == ["page.md:5: 'seat': say slot, admission"]


def test_demo_corpus_texts_are_exempt():
    source = 'text = "A door of oak."'
    assert words.check(source, "ccjax/text/fine.py") and not words.check(source, "ccjax/demo/fine.py")


def test_command_fails_on_retired_words_and_passes_on_the_repository(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    assert words.main([str(broken)]) == 1 and "say admission" in capsys.readouterr().out
    assert words.main([]) == 0, capsys.readouterr().out
