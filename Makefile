# make demo   set everything up, train, and print a report
# make check  lint, types, layers, and the quick tests of the packages that differ from main
# make test   set everything up, check the style, pass the tests: every law on every member of every
#             family, real ranks under Gloo and MPI, faults, the README's commands; the same cases each
#             time
# make test-extended   the costliest tests, which would make `make test` longer than ten minutes; CI
#             runs both
# make test-all   all of these, and what is marked `exhaustive`: whole products of parameters, all tests
#             of ranks in all launches; random cases are new ones each time
# make test-times   as make test, without set-up: which test files take how many CPU seconds
# make test-peers   Keras's own tests of optimizers, trainer and callbacks, with all optimizers wrapped
# make test-versions   set-up, demo, laws, optimizers and ranks with each Python that is found, with
#             older Keras, and with an older TensorFlow
# make results   measure what README.md and docs/results.md show, on quiet cores, as root; then
#             make figures
# make figures   write the tables of docs/records into the pages
# make wheels   wheels of tfcommx and of the repaired Horovod, for the CPU and this Python, in dist/
# make docs   the documents as a site, in build/docs, with all links checked
# make setup  set everything up; TFCOMMX_SETUP="--gpu" for TensorFlow's GPU wheel and NCCL

VENV := $(or $(TFCOMMX_VENV),.venv)
export PATH := $(abspath $(VENV))/bin:$(PATH)

# Ten minutes on two cores
QUICK = not exhaustive and not extended
# Tests that only wait run beside others; those that measure time (`serial`) run alone, afterwards
PYTEST = python -m pytest
# Whole files, because their tests share what fixtures of a module train, compile or start; in the
# order of tests/conftest.py. Three workers on two cores, because a quarter of their time is waiting
SIDE_BY_SIDE = -n 3 --dist loadfile --no-loadscope-reorder
SERIAL = $$(grep -rl mark.serial tests --include=test_*.py)

.PHONY: setup demo check test test-extended test-all test-times test-peers test-versions results figures docs wheels lint
setup:
	python3 scripts/setup $(TFCOMMX_SETUP)

demo: setup
	tfcommx train configs/fashion_mnist.yaml --processes 4

check: lint
	$(PYTEST) $(SIDE_BY_SIDE) -m "not (serial or long_wait) and $(QUICK)" $$(python tests/tests_of_changes.py)

test: setup lint
	$(PYTEST) $(SIDE_BY_SIDE) -m "not serial and $(QUICK)"
	$(PYTEST) -m "serial and $(QUICK)" $(SERIAL)

test-extended: setup
	$(PYTEST) $(SIDE_BY_SIDE) -m "extended and not exhaustive"

test-all: setup lint
	$(PYTEST) $(SIDE_BY_SIDE) -m "not serial" --hypothesis-profile=random
	$(PYTEST) -m serial --hypothesis-profile=random $(SERIAL)

test-times:
	$(PYTEST) -p cpu_times $(SIDE_BY_SIDE) -m "not serial and $(QUICK)"
	$(PYTEST) -p cpu_times -m "serial and $(QUICK)" $(SERIAL)

test-peers: setup
	python tests/peers/run.py

test-versions: setup
	python scripts/verify/versions.py

results: setup wheels
	python scripts/bench results
	python scripts/documents/figures.py

figures: setup
	python scripts/documents/figures.py

# Strict: a link that leads nowhere ends it
docs: setup
	NO_MKDOCS_2_WARNING=1 mkdocs build

wheels: setup
	python scripts/setup/wheels.py

lint: setup
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	find ops scripts tests -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.inl' | xargs clang-format --dry-run -Werror
