"""An answer in progress: what ends it and what does not."""

from __future__ import annotations

from ccjax.engine import SamplingParams
from ccjax.engine.answer import Answer
from ccjax.runner.sampling import SampledToken

END, WORD = 1, 2


def sampled(tokens: list[int], **sampling) -> Answer:
    answer = Answer(SamplingParams(**sampling), None, frozenset({END}), ())
    for token in tokens:
        answer.push(SampledToken(token, 0.0, ()))
    return answer


def test_an_end_of_text_token_ends_the_answer_unless_it_is_ignored() -> None:
    ended = sampled([WORD, END])
    assert (ended.finish_reason, ended.num_tokens) == ("stop", 1)
    ignored = sampled([WORD, END, WORD], ignore_eos=True)
    assert (ignored.finish_reason, ignored.num_tokens) == (None, 3)
