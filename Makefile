# `make` alone lists these; rarer commands are in docs/contribute.md
PYTHON ?= python3
PY := .venv/bin/python
# Containers often set it; then each of a hundred processes would compile our modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help lab run test store browser accuracy gpu doctor clean setup

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

lab: setup         ## open the lessons in JupyterLab, which saves their texts, too; in a container, OPTIONS=--allow-root
	@$(PY) -m jupyter trust notebooks/*.ipynb > /dev/null
	@$(PY) -m jupyter lab --config=tools/lab.py $(OPTIONS)

run: setup         ## execute all notebooks, then build/site/index.html
	@$(PY) -m tools.run

test: setup        ## lint, types, unit tests, guards, strict nbval: a process a core, three at most, a file or a notebook at a time each
	@$(PY) -m ruff check --quiet . && $(PY) -m ruff format --quiet --check . && $(PY) -m mypy --no-error-summary
	@$(PY) -m pytest -n logical --maxprocesses 3 --dist loadfile -m "not judge" --nbval tests notebooks

store: setup       ## write the notebooks from the texts of lessons/, executed: what nbval compares against; ONLY="03 04"
	@$(PY) -m tools.run --store $(ONLY) && $(PY) -m tools.stamp --fix

browser: setup     ## JupyterLab and the site in chromium; screenshots under build/browser/
	@$(PY) -m pip install -q --disable-pip-version-check -e '.[browser]' -c constraints.txt && $(PY) -m pytest tests/browser

accuracy: setup    ## figures that others published against simulated ones; table, build/accuracy.png, and those of README.md and virtualgpu/docs/accuracy.md
	@$(PY) -m tests.accuracy --write

gpu: setup         ## what only a real GPU can tell: the same bytes and types as virtual ones, its kernels for the clock (nothing without one)
	@$(PY) -m pytest -rs tests/gpu && $(PY) -m tests.gpu.tables --measure

doctor: setup      ## what is installed, which devices are there, and the cure of what fails
	@$(PY) -m tools.doctor

clean:             ## remove everything that make made
	if [ -e .venv/made-by-make ] || [ -e .venv/finished ]; then rm -rf .venv; fi
	rm -rf .nox .hypothesis build virtualgpu/build .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup:
	@$(PYTHON) tools/setup.py
