# Every target does its own set-up. Only Python >= 3.11, make and git are assumed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Threads that spin while they wait make training 17 times slower when anything else uses the cores (measured on two).
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: site site-offline serve test test-full lint format clean

site: $(READY) ## build the site into site/, running every notebook whose code changed
	$(BIN)/python -m guide_code.sitebuild build

site-offline: $(READY) ## the same site for file://, into site-offline/
	$(BIN)/python -m guide_code.sitebuild build --offline

serve: $(READY) ## preview with live reload on http://127.0.0.1:8000
	$(BIN)/python -m guide_code.sitebuild serve

test: $(READY) lint
	$(BIN)/python -m pytest -m "not slow"

test-full: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf site site-offline .cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else f'Python 3.11 or newer is needed, but $(PYTHON) is {v}. Try: make PYTHON=python3.12')"
	@echo "setting up .venv, once: a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --constraint constraints.txt pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt torch --editable '.[docs,gpu,hf,test]'
	@touch $@
