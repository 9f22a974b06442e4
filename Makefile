PYTHON ?= python3
BIN := .venv/bin
# what is installed is compiled when it is first used, and kept: else every process would do it anew
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test docs wheel clean

demo: .venv/ready      ## set up .venv and print Table 1 from a small run
	$(BIN)/tailoring run planets --quick --out runs/demo $(FLAGS)

test: .venv/ready      ## set up .venv, then run the linters and all the tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered --cov-fail-under=95

docs: .venv/ready      ## build the pages into site/
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: .venv/ready     ## build the wheel into dist/
	$(BIN)/pip wheel --no-deps -w dist .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv dist site .pytest_cache .ruff_cache .hypothesis .coverage
