import pytest

from scripts.demo_model.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer()
