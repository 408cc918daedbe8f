# make demo   set everything up, train, print and save a report
# make test   set everything up, pass all tests
# make setup  set everything up; TFCOMMX_SETUP="--gpu" for TensorFlow's GPU wheel and NCCL

VENV := $(or $(TFCOMMX_VENV),.venv)
export PATH := $(abspath $(VENV))/bin:$(PATH)

.PHONY: setup demo test lint
setup:
	python3 scripts/bootstrap.py $(TFCOMMX_SETUP)

demo: setup
	TFCOMMX_TERMINAL=$$(tty -s && tty) horovodrun -np 4 --gloo tfcommx train configs/fashion_mnist.yaml

test: setup lint
	python -m pytest

lint: setup
	ruff check .
	ruff format --check .
	mypy
	find ops scripts tests -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.inl' | xargs clang-format --dry-run -Werror
