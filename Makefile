# make run   execute every notebook; site under build/      make lab    open them in JupyterLab
# make test  unit tests, guards, strict nbval               make bench  the figures, as ratios
#                                                           make accuracy  published figures against simulated
PYTHON ?= python3
PY := .venv/bin/python
# Containers often set it; then each of a hundred processes would compile our modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run site lab test bench everywhere accuracy judges faults gpu matrix browser doctor store stamp wheel clean setup

run: setup         ## execute all notebooks, then build/site/index.html
	@$(PY) tools/run.py

site: setup        ## the site of the stored outputs, nothing executed: build/site/
	@$(PY) tools/run.py --stored

lab: setup         ## open them in JupyterLab, which saves a lesson's text, too; in a container, OPTIONS=--allow-root
	@$(PY) -m jupyter trust notebooks/*.ipynb >/dev/null && $(PY) -m jupyter lab --config=tools/lab.py $(OPTIONS)

test: setup        ## lint, types, unit tests, guards, strict nbval; a process a core, three at most, a file or a notebook at a time each
	@$(PY) -m ruff check --quiet . && $(PY) -m ruff format --quiet --check . && $(PY) -m mypy --no-error-summary
	@$(PY) -m pytest -n logical --maxprocesses 3 --dist loadfile -m "not judge" --nbval tests notebooks

bench: setup       ## timings, side by side in one run
	@$(PY) -m pip install -q --disable-pip-version-check -e '.[bench]' -c constraints.txt && $(PY) -m tests.bench

accuracy: setup    ## figures that others published against simulated ones; table, build/accuracy.png, and the READMEs'
	@$(PY) -m tests.accuracy --write

everywhere: setup  ## each notebook to its end as on machines with 0, 1, 2 and 4 GPUs; ONLY="2 04"
	@$(PY) tools/everywhere.py $(ONLY)

judges: setup      ## other people's programs; PYTORCH_TEST=folder PYTORCH_EXAMPLES=checkout PYTORCH_TUTORIALS=checkout LABS=folder (tests/judges/README.md)
	@$(PY) -m pip install -q --disable-pip-version-check -e '.[judges]' -c constraints.txt && $(PY) -m tests.judges op_db --dry
	@$(PY) -m pytest -n 2 -m judge tests
	@$(if $(PYTORCH_TEST),$(PY) -m tests.judges pytorch $(PYTORCH_TEST))
	@$(if $(PYTORCH_TEST),$(PY) -m tests.judges distributed $(PYTORCH_TEST))
	@$(if $(PYTORCH_EXAMPLES),$(PY) -m tests.judges examples $(PYTORCH_EXAMPLES))
	@$(if $(PYTORCH_EXAMPLES),$(PY) -m tests.judges examples --dry $(PYTORCH_EXAMPLES))
	@$(if $(PYTORCH_TUTORIALS),$(PY) -m tests.judges tutorials $(PYTORCH_TUTORIALS))
	@$(if $(LABS),$(PY) -m tests.judges labs $(LABS))

faults: setup      ## ten minutes of kills, stops, full disks, limits and misuses at random moments; OPTIONS="--only fit --seed 7 --minutes 60"
	@$(PY) -m tests.faults $(OPTIONS)

gpu: setup         ## what only a real GPU can tell: the same bytes and types as virtual ones, and its kernels for the clock (nothing without one)
	@$(PY) -m pytest -rs tests/gpu && $(PY) -m tests.gpu.tables --measure

matrix: setup      ## the suite on Python 3.11-3.13 with oldest and newest versions, on other processors, as in Colab, in a browser; ONLY=colab
	@$(PY) -m pip install -q --disable-pip-version-check -e '.[matrix]' -c constraints.txt && $(PY) -m nox $(if $(ONLY),-s "$(ONLY)")

browser: setup     ## JupyterLab and the site in chromium; screenshots under build/browser/
	@$(PY) -m pip install -q --disable-pip-version-check -e '.[browser]' -c constraints.txt && $(PY) -m pytest tests/browser

store: setup       ## execute and keep the outputs in notebooks/ (what nbval compares against)
	@$(PY) tools/run.py --store && $(PY) tools/stamp.py --fix

doctor: setup      ## what is installed, which devices are there, and the cure of what fails
	@$(PY) tools/doctor.py

stamp: setup       ## badges, set-up cells and README pictures, from pyproject's repository name and the notebooks
	@$(PY) tools/stamp.py --fix

wheel: setup       ## virtualgpu alone, to install where PyTorch is: build/virtualgpu-*.whl
	@$(PY) tools/wheel.py

setup:
	@$(PYTHON) tools/setup.py

clean:             ## everything that make made
	if [ -e .venv/made-by-make ] || [ -e .venv/finished ]; then rm -rf .venv; fi
	rm -rf .nox .hypothesis build .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
