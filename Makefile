PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test cover wheel clean

demo: .venv/ready      ## set up .venv and print Table 1 from a small run
	$(BIN)/tailoring run planets --quick --out runs/demo

test: .venv/ready      ## set up .venv, then run the linters and all the tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright
	$(PYTEST)

cover: .venv/ready     ## the tests again, which must reach 95 % of the lines; to watch them takes a fifth longer
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=95

wheel: .venv/ready     ## build the wheel into dist/
	$(BIN)/pip wheel --no-deps -w dist .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv dist .pytest_cache .ruff_cache .hypothesis .coverage
